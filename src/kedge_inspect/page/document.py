"""The self-contained HTML file: style, script, plotting library, data, and its key figures without JavaScript."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from string import Template
from typing import Any

from kedge_base.errors import DataError
from kedge_inspect import page
from kedge_inspect.page.changes import figure, ranged

MARKER = "<!-- kedge report -->"
"""Second line of every page; a file with it may be overwritten by a newer page."""

SCRIPTS = ("dom", "charts", "verdict", "curves", "samples", "clipping", "frontier", "cost", "reward_model", "texts",
           "held_out", "critic", "episode", "evaluation", "generation", "sweep", "labels",
           "main")  # fmt: skip
"""Parts of the page's script, in order of dependency."""

STYLES = ("style", "evaluation", "sweep")
"""Parts of the page's style sheet."""

ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""JSON escapes of characters that could end a script or start a comment."""


def render_page(data: Mapping[str, Any], *, live: str | None = None) -> bytes:
    """The page as HTML.

    Nothing in `data` can become markup or code: it is in a block of JSON without any `<`, and the page's content
    security policy allows a single script, by its hash.

    Args:
        data: The result of `page_data`.
        live: URL on the page's own server with newer data, for a page that follows a run; None for a static page.
    """
    script = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    page = Template(_asset("page.html")).substitute(
        marker=MARKER,
        title=html.escape(str(data.get("title", ""))),
        policy=_policy(script, connect="'none'" if live is None else "'self'"),
        style="\n".join(_asset(f"{name}.css") for name in STYLES),
        plain=plain_verdict(data),
        data=_as_json({**data, "live": live}),
        plotly="" if "labels" in data else _plotly(),  # tables only
        script=script,
    )
    # UTF-8 cannot encode lone surrogates, which a run may contain; they become JSON escapes.
    return page.encode("utf-8", "backslashreplace")


def is_page(beginning: bytes) -> bool:
    """True if a file that starts like this is a kedge report."""
    return MARKER.encode() in beginning.split(b"\n")[:3]


@lru_cache(maxsize=1)
def _plotly() -> str:
    """The plotly.js that plotly ships, compressed to 40 % of its size."""
    source = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(source, mtime=0)).decode("ascii")


def _asset(name: str) -> str:
    return (files(page) / "assets" / name).read_text(encoding="utf-8")


def _policy(script: str, *, connect: str) -> str:
    """The content security policy: only the page's own script, by its hash, and what that script loads."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return (
        f"default-src 'none'; script-src 'sha256-{digest}' 'strict-dynamic'; style-src 'unsafe-inline'; "
        f"img-src data: blob:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _as_json(data: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:  # kedge itself writes only finite numbers
        raise DataError(f"a file of the run has a number that no page can show ({error})") from error
    return text.translate(str.maketrans(ESCAPED))


def plain_verdict(
    data: Mapping[str, Any], *, note: str = "The charts and responses of this page need JavaScript."
) -> str:
    """The title, results, sentences, findings, and first and last values of a page; all text is escaped.

    Args:
        data: The result of `page_data`.
        note: A line below the title.
    """
    runs = data.get("runs", ())
    return "\n".join(
        [
            f"<h1>{_text(data.get('title', ''))}</h1>",
            f"<p>{_text(note)}</p>",
            _list([f"{each['label']}: {ranged(each)}" for each in data.get("headlines", ())]),
            *(_verdict(data[part]) for part in ("sweep", "labels") if data.get(part)),
            *(_run(run) for run in runs),
            *(_group(group, runs) for group in data.get("findings", ())),
        ]
    )


def _verdict(part: Mapping[str, Any]) -> str:
    """The sentences and findings on a sweep or on labels; the script draws their tables."""
    findings = [line for group in part.get("findings", ()) for line in map(_one_line, group["findings"])]
    failed = [f"{each['name']} failed: {each['error']}" for each in part.get("trials", ()) if each["error"] is not None]
    return "".join(f"<p>{_text(sentence)}</p>" for sentence in part["sentences"]) + _list(findings + failed)


def _one_line(finding: Mapping[str, Any]) -> str:
    return f"{finding['seen']}. {finding['means']} Try: {finding['try']}"


def _run(run: Mapping[str, Any]) -> str:
    sentences = "".join(
        f"<p>{_text(sentence)}</p>" for sentence in [*run["sentences"], run["doctor"]["verdict"]] if sentence
    )
    title = f"<h2>{_text(run['name'])} ({_text(run['state'])})</h2>{sentences}"
    if not run["first_and_last"]:
        return title
    cells = [
        (f"{row['label']} {row['unit']}", figure(row["first"]), figure(row["last"])) for row in run["first_and_last"]
    ]
    rows = (f"<tr>{''.join(f'<td>{_text(cell.strip())}</td>' for cell in row)}</tr>" for row in cells)
    head = "".join(f'<th scope="col">{name}</th>' for name in ("", "first", "last"))
    return f"{title}<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _group(group: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{runs[each['run']]['name']}: {_one_line(each)}" for each in group["findings"]]
    return f"<h3>{_text(group['findings'][0]['rule'])} ({_text(group['severity'])})</h3>{_list(lines)}"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(line)}</li>' for line in lines)}</ul>" if lines else ""


def _text(value: object) -> str:
    return html.escape(str(value))

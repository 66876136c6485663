"""The key figures as HTML, for readers without JavaScript."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from kedge.inspect.page.wording import figure

__all__ = ["plain_verdict"]


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
            _list([_headline(each) for each in data.get("headlines", ())]),
            _sweep(data["sweep"]) if data.get("sweep") else "",
            *(_run(run) for run in runs),
            *(_group(group, runs) for group in data.get("findings", ())),
        ]
    )


def _sweep(sweep: Mapping[str, Any]) -> str:
    sentences = "".join(f"<p>{_text(sentence)}</p>" for sentence in sweep["sentences"])
    settings = [sweep["settings"][place] for place in sweep["order"]]
    rows = [[each["name"], _known(each["value"]), _known(each["low"]), _known(each["high"]), _known(each["kl"]),
             f"{each['num_values']} of {each['num_seeds']}"] for each in settings]  # fmt: skip
    failed = [f"{each['name']} failed: {each['error']}" for each in sweep["trials"] if each["error"] is not None]
    head = ["", sweep["metric"] or "result", "low", "high", "KL", "seeds"]
    return sentences + _table(head, rows) + _list(failed)


def _known(value: float | None) -> str:
    return "–" if value is None else figure(value)


def _run(run: Mapping[str, Any]) -> str:
    sentences = "".join(
        f"<p>{_text(sentence)}</p>" for sentence in [*run["sentences"], run["doctor"]["verdict"]] if sentence
    )
    rows = [[f"{row['label']} {row['unit']}".strip(), figure(row["first"]), figure(row["last"])]
            for row in run["first_and_last"]]  # fmt: skip
    return f"<h2>{_text(run['name'])} ({_text(run['state'])})</h2>{sentences}{_table(['', 'first', 'last'], rows)}"


def _headline(each: Mapping[str, Any]) -> str:
    limits = "" if each["low"] is None else f" ({figure(each['low'])} to {figure(each['high'])})"
    return f"{each['label']}: {figure(each['value'])}{limits}"


def _group(group: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{runs[each['run']]['name']}: {each['seen']}. {each['means']} Try: {each['try']}"
             for each in group["findings"]]  # fmt: skip
    return f"<h3>{_text(group['findings'][0]['rule'])} ({_text(group['severity'])})</h3>{_list(lines)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    titles = "".join(f'<th scope="col">{_text(title)}</th>' for title in head)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(line)}</li>' for line in lines)}</ul>" if lines else ""


def _text(value: object) -> str:
    return html.escape(str(value))

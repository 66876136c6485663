"""Rendering of the self-contained HTML file: style, script, plotting library and data. It makes no requests."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from string import Template
from typing import Any

from kedge.errors import DataError
from kedge.inspect.page.plain import plain_verdict

__all__ = ["MARKER", "is_page", "render_page"]

MARKER = "<!-- kedge report -->"
"""Second line of every page; a file with it may be overwritten by a newer page."""

SCRIPTS = ("dom", "charts", "verdict", "curves", "samples", "clipping", "frontier", "cost", "reward_model", "texts",
           "held_out", "critic", "episode", "evaluation", "generation", "sweep", "main")  # fmt: skip
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
    script = _script()
    page = Template(_asset("page.html")).substitute(
        marker=MARKER,
        title=html.escape(str(data.get("title", ""))),
        policy=_policy(script, connect="'none'" if live is None else "'self'"),
        style="\n".join(_asset(f"{name}.css") for name in STYLES),
        plain=plain_verdict(data),
        data=_as_json({**data, "live": live}),
        plotly=_plotly(),
        script=script,
    )
    # UTF-8 cannot encode lone surrogates, which a run may contain; they become JSON escapes.
    return page.encode("utf-8", "backslashreplace")


def is_page(beginning: bytes) -> bool:
    """Whether a file that begins like this is a kedge report."""
    return MARKER.encode() in beginning.split(b"\n")[:3]


@lru_cache(maxsize=1)
def _plotly() -> str:
    """plotly.js as shipped with plotly, compressed to two fifths of its size."""
    source = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(source, mtime=0)).decode("ascii")


def _script() -> str:
    return "\n".join(_asset(f"{name}.js") for name in SCRIPTS)


def _asset(name: str) -> str:
    return (files("kedge.inspect.page") / "assets" / name).read_text(encoding="utf-8")


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
    except (ValueError, RecursionError) as error:  # what kedge itself writes is finite
        raise DataError(f"a file of the run has a number that no page can show ({error})") from error
    return text.translate(str.maketrans(ESCAPED))

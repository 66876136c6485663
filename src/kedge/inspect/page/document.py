"""One HTML file that holds all it needs: style, script, drawing library and figures. It asks no network."""

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

__all__ = ["MARKER", "is_page", "render_page"]

MARKER = "<!-- kedge report -->"
"""The second line of every page: a file that holds it may be replaced by a newer one."""

SCRIPTS = ("dom", "charts", "verdict", "curves", "samples", "clipping", "frontier", "cost", "reward_model", "main")
"""The parts of the page's script, in the order in which they build on each other."""

ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""What could end a script or begin a comment, as JSON writes it otherwise."""


def render_page(data: Mapping[str, Any], *, live: str | None = None) -> bytes:
    """The page as a file holds it.

    Nothing of `data` can become markup or run: it lies in a block of JSON without a `<`, and the page's policy names
    the one script that may run, by its hash.

    Args:
        data: What `page_data` gives.
        live: A URL of the page's own server that answers with newer data, for a page that follows a run; None for a
            page that stands alone.
    """
    script = _script()
    page = Template(_asset("page.html")).substitute(
        marker=MARKER,
        title=html.escape(str(data.get("title", ""))),
        policy=_policy(script, connect="'none'" if live is None else "'self'"),
        style=_asset("style.css"),
        data=_as_json({**data, "live": live}),
        plotly=_plotly(),
        script=script,
    )
    # Half of a surrogate pair, which a run may hold and UTF-8 has no form for, is JSON's own escape then.
    return page.encode("utf-8", "backslashreplace")


def is_page(beginning: bytes) -> bool:
    """Whether a file that begins so is a page of kedge's."""
    return MARKER.encode() in beginning.split(b"\n")[:3]


@lru_cache(maxsize=1)
def _plotly() -> str:
    """plotly.js as plotly ships it, at two fifths of its size."""
    source = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(source, mtime=0)).decode("ascii")


def _script() -> str:
    return "\n".join(_asset(f"{name}.js") for name in SCRIPTS)


def _asset(name: str) -> str:
    return (files("kedge.inspect.page") / "assets" / name).read_text(encoding="utf-8")


def _policy(script: str, *, connect: str) -> str:
    """What the browser lets the page do: run its own script, by its hash, and what that one loads, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return (
        f"default-src 'none'; script-src 'sha256-{digest}' 'strict-dynamic'; style-src 'unsafe-inline'; "
        f"img-src data: blob:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _as_json(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(str.maketrans(ESCAPED))

"""What mkdocs calls while it builds the site."""

from __future__ import annotations

import re

__all__ = ["on_page_content"]


def on_page_content(html: str, **_: object) -> str:
    """Let long names break at their joints, but in a table's first column; mkdocs calls this for each page."""
    return re.sub(r"(</td>\s*<td>)(.*?)(?=</td>)", lambda cell: cell[1] + _joints(cell[2]), html, flags=re.DOTALL)


def _joints(cell: str) -> str:
    return re.sub(r"<code>([^<]*)</code>", lambda code: f"<code>{_breaks(code[1])}</code>", cell)


def _breaks(name: str) -> str:
    return re.sub(r"(::|[/_=])(?=\w)", r"\1<wbr>", name)

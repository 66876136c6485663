"""Hooks of mkdocs."""

from __future__ import annotations

import re

__all__ = ["on_page_content"]


def on_page_content(html: str, **_: object) -> str:
    """Allow line breaks in long names in table cells, except in the first column."""
    return re.sub(r"(</td>\s*<td>)(.*?)(?=</td>)", lambda cell: cell[1] + _with_breaks(cell[2]), html, flags=re.DOTALL)


def _with_breaks(cell: str) -> str:
    return re.sub(r"<code>([^<]*)</code>", lambda code: f"<code>{_breaks(code[1])}</code>", cell)


def _breaks(name: str) -> str:
    return re.sub(r"(::|[/_=])(?=\w)", r"\1<wbr>", name)

"""Pages that can be read on a phone: long names may break, and the rows of tables of prose become cards."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

LONG_CELL = 60
"""Characters; a table with longer cells in three columns or more is stacked on a narrow screen. Others scroll."""

SHORT_CELL = 24
"""Characters; a shorter cell is shown beside its label."""


def with_readable_tables(page: str) -> str:
    """The page with labeled cells in its tables, `data-stacked` on tables of prose, and break points in long names."""
    page = re.sub(r"(<h[23] [^>]*>)(.*?)(?=<a|</h)", lambda head: head[1] + _heading(head[2]), page)
    return re.sub(r"<table>(.*?)</table>", lambda table: _table(table[1]), page, flags=re.DOTALL)


def _heading(inner: str) -> str:
    """A heading with long names that may break after an underscore; its tags stay as they are."""
    return re.sub(r"(>|^)([^<]*)", lambda text: text[1] + re.sub(r"_(?=\w)", "_<wbr>", text[2]), inner)


def _table(inner: str) -> str:
    heads = [_text(head) for head in re.findall(r"<th[^>]*>(.*?)</th>", inner, flags=re.DOTALL)]
    cells = [_text(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", inner, flags=re.DOTALL)]
    stacked = " data-stacked" if len(heads) > 2 and max(map(len, cells), default=0) > LONG_CELL else ""
    rows = re.sub(r"(<tr>)(.*?)(</tr>)", lambda row: row[1] + _row(row[2], heads) + row[3], inner, flags=re.DOTALL)
    return f"<table{stacked}>{rows}</table>"


def _row(row: str, heads: list[str]) -> str:
    numbers: Iterator[int] = iter(range(len(heads)))

    def cell(found: re.Match[str]) -> str:
        number = next(numbers, 0)
        text = _text(found[2])
        label = f' data-label="{html.escape(heads[number])}"' if heads and text not in ("", "–") else ""
        label += " data-short" if label and len(text) <= SHORT_CELL else ""
        return f"<td{found[1]}{label}>{_with_breaks(found[2])}</td>"

    return re.sub(r"<td([^>]*)>(.*?)</td>", cell, row, flags=re.DOTALL)


def _text(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", markup)).strip()


def _with_breaks(cell: str) -> str:
    return re.sub(r"<code>([^<]*)</code>", lambda code: f"<code>{_breaks(code[1])}</code>", cell)


def _breaks(name: str) -> str:
    return re.sub(r"(::|[/_=])(?=\w)", r"\1<wbr>", name)

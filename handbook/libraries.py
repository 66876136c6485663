"""Generates the page about other libraries: its text, with the tables of `kedge.config.libraries`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kedge.config.libraries import LIBRARIES

__all__ = ["libraries_page"]

TEXT = Path(__file__).with_name("other-libraries.md")


def libraries_page() -> str:
    """docs/other-libraries.md."""
    text = TEXT.read_text(encoding="utf-8")
    for title, rows in LIBRARIES["TRL"].items():
        table = _counterparts("TRL", rows) if title else _reasons(rows)
        text = text.replace(f"<!-- table: {title or 'none'} -->", table)
    for library in ("OpenRLHF", "verl"):
        parts = [
            f"### {library}: {title.lower()}\n\n{_counterparts(library, rows)}"
            if title
            else f"### {library}: without a counterpart\n\n{_reasons(rows)}"
            for title, rows in LIBRARIES[library].items()
        ]
        text = text.replace(f"<!-- tables: {library} -->", "\n\n".join(parts))
    return text


def _counterparts(library: str, rows: Sequence[tuple[str, str]]) -> str:
    return _table((library, "kedge"), [(_names(names), here) for names, here in rows])


def _reasons(rows: Sequence[tuple[str, str]]) -> str:
    return _table(("reason", "arguments"), [(here, _names(names)) for names, here in rows])


def _names(names: str) -> str:
    # Dotted names are not in backticks, which a test would take for fields of kedge.
    return ", ".join(f"<code>{name}</code>" if "." in name else f"`{name}`" for name in names.split())


def _table(heads: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"| {left} | {right} |" for left, right in (heads, *rows)).replace("\n", "\n|---|---|\n", 1)

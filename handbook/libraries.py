"""Generates the page about other libraries: its text, with the tables of `kedge_base.libraries`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from kedge_base.libraries import LIBRARIES

TEXT = Path(__file__).with_name("other-libraries.md")


def libraries_page() -> str:
    """docs/other-libraries.md."""
    text = TEXT.read_text(encoding="utf-8")
    for title, rows in LIBRARIES["TRL"].items():
        text = text.replace(f"<!-- table: {title} -->", _counterparts("TRL", rows))
    for library in ("OpenRLHF", "verl", "verl-agent", "AgileRL"):
        parts = [
            f"### {library}: {title.lower()}\n\n{_counterparts(library, rows)}"
            for title, rows in LIBRARIES[library].items()
            if title
        ]
        text = text.replace(f"<!-- tables: {library} -->", "\n\n".join(parts))
    return text


def _counterparts(library: str, rows: Sequence[tuple[str, str]]) -> str:
    """The table; arguments with the same counterpart share a row, where the first of them is."""
    sharing: dict[str, list[str]] = {}
    for names, here in rows:
        sharing.setdefault(here, []).extend(names.split())
    return _table((library, "kedge"), [(_names(names), here) for here, names in sharing.items()])


def _names(names: Iterable[str]) -> str:
    # Dotted names are not in backticks, which a test would take for fields of kedge.
    return ", ".join(f"<code>{name}</code>" if "." in name else f"`{name}`" for name in names)


def _table(heads: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"| {left} | {right} |" for left, right in (heads, *rows)).replace("\n", "\n|---|---|\n", 1)

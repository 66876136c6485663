"""The works that defaults come from, by the short names that fields cite."""

import re
from pathlib import Path

from kedge.config.table import read_table

__all__ = ["SOURCES", "cited_works"]

SOURCES: dict[str, str] = {row[0]: row[1] for row in read_table(Path(__file__).with_name("works.tsv"))}


def cited_works(text: str) -> dict[str, str]:
    """The works whose short names appear in a text, in the order of `SOURCES`."""
    return {
        name: work
        for name, work in SOURCES.items()
        if re.search(rf"(?<![\w.-]){'(?<!Dr. )' if name == 'GRPO' else ''}{re.escape(name)}(?![\w-]|\+)", text)
    }

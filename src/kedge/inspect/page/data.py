"""The data of a run in words: what it used, held out and dropped."""

from __future__ import annotations

from collections.abc import Mapping

from kedge.inspect.record import RunRecord

__all__ = ["data_sentences"]


def data_sentences(record: RunRecord) -> list[str]:
    """One sentence per role of the data; none for runs that did not write `data.json`."""
    lines = {role: usage.get("line") for role, usage in record.data.items() if isinstance(usage, Mapping)}
    return [f"{role.capitalize()}: {line}." for role, line in lines.items() if isinstance(line, str)]

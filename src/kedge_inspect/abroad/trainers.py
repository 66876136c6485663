"""The trainers of other libraries whose logs kedge reads: how their logs and settings are recognized."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kedge_base.texts import read_table


@dataclass(frozen=True)
class Trainer:
    """A trainer of another library.

    Attributes:
        key: As for `--library`: `trl-grpo`.
        title: In sentences: `TRL's GRPO`.
        stage: The corresponding stage of kedge.
        marks: Names of metrics; a log with all names of one of these groups was written by it.
        setting: The name of a setting that only it has, or an empty text.
        library: Its library in the table of settings.
        tables: The titles of the tables with its settings there; all if empty.
    """

    key: str
    title: str
    stage: str
    marks: tuple[frozenset[str], ...]
    setting: str
    library: str
    tables: tuple[str, ...]

    @property
    def name(self) -> str:
        """As its library calls it: `GRPO`."""
        return self.title.rpartition(" ")[2]


def _read_trainers(path: Path) -> Iterator[Trainer]:
    """The trainers of a table, which explains its columns."""
    for key, name, stage, marks, setting, library, *tables in read_table(path):
        groups = tuple(frozenset(group.split()) for group in marks.split("; "))
        titles = tuple(title for each in tables for title in each.split("; "))
        yield Trainer(key, name, stage, groups, setting, library, titles)


TRAINERS = tuple(_read_trainers(Path(__file__).with_name("trainers.tsv")))

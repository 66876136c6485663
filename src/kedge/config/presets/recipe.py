"""Presets: named sets of values, each with its source."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge_base.texts import read_table


@dataclass(frozen=True)
class Cited:
    """A value and where it was published."""

    value: Any
    source: str


@dataclass(frozen=True)
class Preset:
    """A named recipe: its purpose, and its values by dotted name."""

    name: str
    about: str
    values: dict[str, Cited]

    @property
    def settings(self) -> dict[str, Any]:
        """The values without their sources."""
        return {name: cited.value for name, cited in self.values.items()}


def read_presets(path: Path) -> tuple[Preset, ...]:
    """The presets of a table with the columns name, field, value as JSON and source.

    A line without a field starts a preset; its last column is the purpose.
    """
    presets: list[Preset] = []
    for name, field, value, source in read_table(path):
        if not field:
            presets.append(Preset(name, source, {}))
        else:
            presets[-1].values[field] = Cited(json.loads(value), source)
    return tuple(presets)

"""Presets: named sets of values, each with its source."""

from dataclasses import dataclass
from typing import Any

__all__ = ["Cited", "Preset"]


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

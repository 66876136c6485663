"""What a preset is: values that somebody published, each with where."""

from dataclasses import dataclass
from typing import Any

__all__ = ["Cited", "Preset"]


@dataclass(frozen=True)
class Cited:
    """A value and the place it was published at."""

    value: Any
    source: str


@dataclass(frozen=True)
class Preset:
    """A named recipe: what it is for, and its values by dotted name."""

    name: str
    about: str
    values: dict[str, Cited]

    @property
    def settings(self) -> dict[str, Any]:
        """The values alone."""
        return {name: cited.value for name, cited in self.values.items()}

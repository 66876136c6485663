"""What a logger is, and what it is told of the run that it logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kedge.logs.samples import Sample

__all__ = ["LoggedRun", "Logger", "samples_name"]


class Logger(Protocol):
    """Where metrics and samples go while a run is at work. It may raise whatever its package raises."""

    def write(self, update: int, metrics: Mapping[str, Any]) -> None:
        """Log the figures of one update, by their names in `metrics.jsonl`; updates come in ascending order."""
        ...

    def write_samples(self, update: int, samples: Sequence[Sample]) -> None:
        """Log responses of one update, as text: at least one, and of one kind; see `samples_name`."""
        ...

    def close(self) -> None:
        """Have everything written, and end."""
        ...


@dataclass(frozen=True)
class LoggedRun:
    """A run as its loggers know it.

    Attributes:
        folder: The run's own.
        stage: `sft`, `reward` or `ppo`.
        project: What it is filed under.
        id: Its own, eight characters; the same again when it is resumed.
        settings: What it runs under, in JSON's types.
    """

    folder: Path
    stage: str
    project: str
    id: str
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What it is listed as: its folder's name, and its id since many runs' folders are called alike."""
        return f"{self.folder.name}-{self.id}"


def samples_name(samples: Sequence[Sample]) -> str:
    """What samples are called beside the metrics: answers to prompts that are asked again and again stand apart."""
    return "samples" if samples[0].fixed is None else "fixed_samples"

"""The protocol of third-party loggers, and the run that they log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kedge.logs.samples import Sample

__all__ = ["LoggedRun", "Logger", "samples_name"]


class Logger(Protocol):
    """A destination of metrics and samples. It may raise whatever its package raises."""

    @property
    def last_update(self) -> int | None:
        """The last update that the log held when it was opened, −1 for none.

        None if everything is stored as it is written: then kedge's own record is right, also after a kill.
        """
        ...

    def write(self, update: int, metrics: Mapping[str, Any]) -> None:
        """Log the metrics of one update, named as in `metrics.jsonl`; updates are in ascending order."""
        ...

    def write_samples(self, update: int, samples: Sequence[Sample]) -> None:
        """Log responses of one update as text: at least one, all of one kind; see `samples_name`."""
        ...

    def close(self) -> None:
        """Write everything out and close the log."""
        ...


@dataclass(frozen=True)
class LoggedRun:
    """A run as its loggers see it.

    Attributes:
        folder: The run's folder.
        stage: `sft`, `reward` or `ppo`.
        project: The project it belongs to.
        id: Eight characters that stay the same when the run is resumed.
        settings: Its configuration, in JSON types.
    """

    folder: Path
    stage: str
    project: str
    id: str
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Display name: the folder's name, and the id because many runs' folders have the same name."""
        return f"{self.folder.name}-{self.id}"


def samples_name(samples: Sequence[Sample]) -> str:
    """Name of the samples in a log; responses to fixed prompts have one of their own."""
    return "samples" if samples[0].fixed is None else "fixed_samples"

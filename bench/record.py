"""Saves a complete benchmark run, so that its page can be regenerated."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.cases import Results
from bench.systems import Measurement


@dataclass(frozen=True)
class Record:
    """The measurements of a run, and its environment.

    Attributes:
        machine: From `describe_machine`.
        versions: From `describe_versions`.
        num_rounds: Rounds of the cases that have a target.
        results: The measurements.
        card: For a GPU run: the GPU's name, its measured FLOP/s and the policy's number of parameters.
    """

    machine: dict[str, str]
    versions: dict[str, str]
    num_rounds: int
    results: Results
    card: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Save as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Record:
        """Load a saved record."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        measured = {
            case: {name: [Measurement(**run) for run in runs] for name, runs in jobs.items()}
            for case, jobs in fields.pop("results").items()
        }
        return cls(**fields, results=measured)

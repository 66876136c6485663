"""A whole run of the benchmark as a file, from which its page can be written anew."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.cases import Results
from bench.systems import Measurement

__all__ = ["Record"]


@dataclass(frozen=True)
class Record:
    """What was measured, on what.

    Attributes:
        machine: What `describe_machine` says.
        versions: What `describe_versions` says.
        num_rounds: Rounds of the cases that have a limit to meet.
        results: The measurements.
        card: Of a GPU's run: the card's name, its measured FLOP/s and the policy's parameters.
    """

    machine: dict[str, str]
    versions: dict[str, str]
    num_rounds: int
    results: Results
    card: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write it down as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read what `save` wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        measured = {
            case: {name: [Measurement(**run) for run in runs] for name, runs in jobs.items()}
            for case, jobs in fields.pop("results").items()
        }
        return cls(**fields, results=measured)

"""TensorBoard: event files in the run's folder, for `tensorboard --logdir`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from kedge.logs.json_lines import Sample
from kedge.logs.loggers.logger import LoggedRun, samples_name


class TensorBoardLogger:
    """Scalars, and text for samples and settings, in `tensorboard/`; flushed after each row.

    Args:
        run: The run to log.
    """

    def __init__(self, run: LoggedRun) -> None:
        # Hide rows that a killed process wrote after kedge's last record, since they are written again.
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.last_update + 1)
        self._writer.add_text("settings", _literal(json.dumps(run.settings, indent=2)), 0)

    last_update = None

    def write(self, update: int, metrics: Mapping[str, Any]) -> None:
        """Log metrics as scalars."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, update)
        self._writer.flush()

    def write_samples(self, update: int, samples: Sequence[Sample]) -> None:
        """Log responses as one text."""
        self._writer.add_text(samples_name(samples), "\n\n---\n\n".join(map(_as_markdown, samples)), update)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _as_markdown(sample: Sample) -> str:
    score = "none" if sample.score is None else f"{sample.score:.4g}"
    return f"prompt\n\n{_literal(sample.prompt)}\n\nresponse, score {score}\n\n{_literal(sample.response)}"


def _literal(text: str) -> str:
    """Text as an indented Markdown code block, which nothing inside it can end."""
    return "\n".join(f"    {line}" for line in text.splitlines())


open_log = TensorBoardLogger

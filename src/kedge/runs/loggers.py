"""Opens the loggers that a run is configured with."""

from __future__ import annotations

from collections.abc import Callable

from kedge.config import Config
from kedge.logs.json_lines import plain_json
from kedge.logs.loggers import LoggedRun, LoggerGroup, LoggerState
from kedge.runs.run import Run

__all__ = ["open_loggers"]


def open_loggers(config: Config, run: Run, *, warn: Callable[[str], None]) -> LoggerGroup:
    """The loggers of a started run; each one is opened with its first row.

    Args:
        config: The resolved configuration.
        run: The run.
        warn: Prints a warning line.
    """
    state = LoggerState(run.folder)
    facts = {name: str(fact) for name, fact in run.facts.items()}
    settings = plain_json({**config.model_dump(mode="json"), "facts": facts})
    logged = LoggedRun(run.folder, run.stage, config.runtime.project, state.id, settings)
    return LoggerGroup(config.runtime.loggers if run.ranks.is_first else [], state, logged, warn=warn)

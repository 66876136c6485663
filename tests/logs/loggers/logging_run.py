"""A run that the tests of every logger log: first rows, a kill, and last rows, some of them repeated."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kedge.logs.json_lines import Sample
from kedge.logs.loggers import LoggedRun, LoggerGroup, LoggerState

SAMPLE = Sample(
    prompt="The boat", response="```\n# left <b>port</b>", tokens=["a", "b"], score=1.5, stopped=True,
    logprobs=[-1.0, -2.0], ref_logprobs=None, values=[0.0, 0.5], rewards=[0.0, 1.0], advantages=[0.1, 0.2],
)  # fmt: skip
SETTINGS = {"ppo": {"clip_range": 0.2}}


def log_run(folder: Path, logger: str, updates: range, *, project: str = "tides") -> LoggedRun:
    """Open a logger as a new or resumed run does; a warning is a failure."""

    def refuse(line: str) -> None:
        raise AssertionError(line)

    state = LoggerState(folder)
    run = LoggedRun(folder, "ppo", project, state.id, SETTINGS)
    with LoggerGroup([logger], state, run, warn=refuse) as loggers:
        for update in updates:
            loggers.write(
                update, {"reward/score_mean": update / 4, "score/brief.py:length": update, "objective/kl": None}
            )
            loggers.write_samples(update, [SAMPLE, SAMPLE])
            loggers.write_samples(update, [dataclasses.replace(SAMPLE, response="again", fixed=0)])
    return run

"""All that the page shows, as one JSON value: what is drawn is decided here, the page only draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kedge.inspect.page.clipping import clipping
from kedge.inspect.page.cost import cost
from kedge.inspect.page.curves import course
from kedge.inspect.page.frontier import Checkpoint, frontier
from kedge.inspect.page.panels import PANELS, find_panels
from kedge.inspect.page.responses import sampled
from kedge.inspect.page.scores import policy_scores, reward_model
from kedge.inspect.page.verdict import describe_run, final_figures
from kedge.inspect.record import RunRecord

__all__ = ["Headline", "ReportedRun", "page_data"]

MOST_SAMPLE_BYTES = 1_400_000
MOST_POINTS = 3000
"""Of one metric over all runs of a page."""

MOST_POINTS_OF_A_RUN = 1000
FEWEST_POINTS_OF_A_RUN = 100


@dataclass(frozen=True)
class ReportedRun:
    """A run on the page.

    Attributes:
        name: What it is called there.
        record: What its folder tells.
        findings: The doctor's, each with `rule`, `severity`, `seen`, `means`, `try`, `docs`; gravest first. None where
            nobody has looked.
        checkpoints: What judges outside of the run said of the policy on its way.
        reward_models: The runs that trained the reward models of this one, by name, where they are not on the page.
    """

    name: str
    record: RunRecord
    findings: Sequence[Mapping[str, str]] | None = None
    checkpoints: Sequence[Checkpoint] = ()
    reward_models: Mapping[str, RunRecord] = field(default_factory=dict)


@dataclass(frozen=True)
class Headline:
    """A figure of several stages together, with its confidence interval where it has one."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


def page_data(
    runs: Sequence[ReportedRun], *, title: str, headlines: Sequence[Headline] = (), written: str = ""
) -> dict[str, Any]:
    """Everything on the page, in JSON's types; bounded in size, however long the runs were.

    Args:
        runs: What is shown, overlaid where the stage is the same.
        title: Of the page.
        headlines: Figures that stand above all runs.
        written: When, in words.
    """
    points = max(FEWEST_POINTS_OF_A_RUN, min(MOST_POINTS_OF_A_RUN, MOST_POINTS // max(1, len(runs))))
    num_sampled = sum(1 for run in runs if run.record.samples)
    shown = [_run(run, points, MOST_SAMPLE_BYTES // max(1, num_sampled)) for run in runs]
    stages = [stage for stage in PANELS if any(run.record.stage == stage for run in runs)]
    metrics = {stage: _metrics(shown, stage) for stage in stages}
    return {
        "title": title,
        "written": written,
        "headlines": [vars(headline) for headline in headlines],
        "runs": shown,
        "panels": {stage: find_panels(stage, metrics[stage]) for stage in stages},
    }


def _run(run: ReportedRun, most_points: int, most_bytes: int) -> dict[str, Any]:
    record = run.record
    models = {run.name: record} if record.stage == "reward" else run.reward_models
    return {
        "name": run.name,
        "stage": record.stage,
        "state": record.state,
        "facts": dict(record.facts),
        "sentences": describe_run(record),
        "findings": None if run.findings is None else [dict(finding) for finding in run.findings],
        "incidents": len(record.incidents),
        "figures": final_figures(record),
        "curves": course(record, most_points=most_points),
        "samples": sampled(record, most_bytes=most_bytes),
        "clipping": clipping(record),
        "frontier": frontier(record, run.checkpoints),
        "cost": cost(record),
        "reward_models": [{"name": name, **reward_model(trained)} for name, trained in models.items()],
        "policy_scores": policy_scores(record),
    }


def _metrics(runs: Sequence[Mapping[str, Any]], stage: str) -> list[str]:
    return list(dict.fromkeys(name for run in runs if run["stage"] == stage for name in run["curves"]["columns"]))

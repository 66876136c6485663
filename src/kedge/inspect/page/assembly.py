"""The data of the page as one JSON value: all decisions are made here, and the page only draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kedge.inspect.page.clipping import clipping
from kedge.inspect.page.cost import cost
from kedge.inspect.page.critic import critic
from kedge.inspect.page.curves import curves
from kedge.inspect.page.data import data_sentences
from kedge.inspect.page.evaluation import evaluation
from kedge.inspect.page.findings import grouped_findings
from kedge.inspect.page.frontier import FrontierPoint, frontier
from kedge.inspect.page.generation import generation
from kedge.inspect.page.held_out import held_out
from kedge.inspect.page.judge_agreement import judge_agreement
from kedge.inspect.page.panels import PANELS, find_panels
from kedge.inspect.page.responses import shown_responses
from kedge.inspect.page.scores import policy_scores, reward_model
from kedge.inspect.page.sweep import sweep_part
from kedge.inspect.page.verdict import describe_run, first_and_last
from kedge.inspect.page.video import video
from kedge.inspect.page.wording import typographic
from kedge.inspect.record import RunRecord
from kedge.inspect.sweeps import Sweep

__all__ = ["Headline", "ReportedRun", "page_data"]

MOST_SAMPLE_BYTES = 1_400_000
MOST_POINTS = 3000
"""Points of one metric, over all runs of a page."""

MOST_POINTS_OF_A_RUN = 1000
FEWEST_POINTS_OF_A_RUN = 100


@dataclass(frozen=True)
class ReportedRun:
    """A run on the page.

    Attributes:
        name: Its name on the page.
        record: The content of its folder.
        findings: The doctor's, each with `rule`, `severity`, `seen`, `means`, `try`, and the `field` to change if there
            is one. None if the run was not diagnosed.
        verdict: The doctor's line on what it checked; empty if it has no rules for the stage.
        is_clean: Whether the doctor checked something and found nothing.
        frontier: Values of judges outside the run.
        reward_models: The runs that trained its reward models, by name, if they are not on the page themselves.
    """

    name: str
    record: RunRecord
    findings: Sequence[Mapping[str, str]] | None = None
    verdict: str = ""
    is_clean: bool = False
    frontier: Sequence[FrontierPoint] = ()
    reward_models: Mapping[str, RunRecord] = field(default_factory=dict)


@dataclass(frozen=True)
class Headline:
    """A result of a whole chain, with its confidence interval if it has one."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


def page_data(
    runs: Sequence[ReportedRun],
    *,
    title: str,
    headlines: Sequence[Headline] = (),
    written: str = "",
    sweep: Sweep | None = None,
) -> dict[str, Any]:
    """The data of the page in JSON types, bounded in size however long the runs are.

    Args:
        runs: The runs; those of one stage are overlaid.
        title: Title of the page.
        headlines: Results shown above all runs.
        written: When the page was written, as text.
        sweep: The sweep that the runs belong to; its settings are then overlaid in place of its runs.
    """
    points = max(FEWEST_POINTS_OF_A_RUN, min(MOST_POINTS_OF_A_RUN, MOST_POINTS // max(1, len(runs))))
    num_with_samples = sum(1 for run in runs if run.record.samples or run.record.results)
    shown = [
        {"index": index, "color": index, **_run(run, points, MOST_SAMPLE_BYTES // max(1, num_with_samples))}
        for index, run in enumerate(runs)
    ]
    overlaid = None if sweep is None else sweep_part(
        sweep, {run.name: run.record for run in runs}, most_points=points)  # fmt: skip
    for setting in overlaid["settings"] if overlaid else ():
        for index in setting["runs"]:
            shown[index]["color"] = setting["color"]
    stages = [stage for stage in PANELS if any(run.record.stage == stage for run in runs)]
    metrics = {stage: _metrics(shown, stage) for stage in stages}
    return {
        "title": title,
        "written": written,
        "headlines": [vars(headline) for headline in headlines],
        "runs": shown,
        "sweep": overlaid,
        "judge_agreement": judge_agreement({run.name: run.record for run in runs}),
        "findings": grouped_findings([run.findings for run in runs]),
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
        "sentences": [*describe_run(record), *data_sentences(record)],
        "doctor": {"verdict": typographic(run.verdict), "clean": run.is_clean},
        "incidents": len(record.incidents),
        "first_and_last": first_and_last(record),
        "curves": curves(record, most_points=most_points),
        "samples": shown_responses(record, most_bytes=most_bytes),
        "clipping": clipping(record),
        "frontier": frontier(record, run.frontier),
        "held_out": held_out(record),
        "critic": critic(record),
        "cost": cost(record),
        "reward_models": [{"name": name, **reward_model(trained)} for name, trained in models.items()],
        "evaluation": evaluation(record, most_bytes=most_bytes),
        "generation": generation(record, most_bytes=most_bytes),
        "policy_scores": policy_scores(record),
        "video": video(record),
    }


def _metrics(runs: Sequence[Mapping[str, Any]], stage: str) -> list[str]:
    return list(dict.fromkeys(name for run in runs if run["stage"] == stage for name in run["curves"]["columns"]))

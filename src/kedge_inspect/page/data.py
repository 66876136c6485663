"""Builds the data of the page as a JSON value: all decisions are made here, and the page only draws."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kedge_base.run_folder.output import VIDEO_FILE
from kedge_inspect.doctor.rule import Finding, severity_rank
from kedge_inspect.page.checks import FrontierPoint, critic, frontier, held_out
from kedge_inspect.page.clipping import clipping
from kedge_inspect.page.curves import curves
from kedge_inspect.page.looks import has_part, look_of
from kedge_inspect.page.responses import evaluation, generation, judge_agreement, shown_responses
from kedge_inspect.page.scores import cost, policy_scores, reward_model
from kedge_inspect.page.sweep import sweep_part
from kedge_inspect.page.verdict import data_sentences, describe_run, first_and_last
from kedge_inspect.record import RunRecord
from kedge_inspect.sweeps import Sweep

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
        findings: The doctor's.
        verdict: The doctor's line on its checks; empty if it has no rules for the stage.
        is_clean: Whether the doctor checked something and found nothing.
        frontier: Values of judges outside the run.
        reward_models: The runs that trained its reward models, by name, if they are not on the page themselves.
    """

    name: str
    record: RunRecord
    findings: Sequence[Finding] = ()
    verdict: str = ""
    is_clean: bool = False
    frontier: Sequence[FrontierPoint] = ()
    reward_models: Mapping[str, RunRecord] = field(default_factory=dict)


def page_data(
    runs: Sequence[ReportedRun],
    *,
    title: str,
    headlines: Sequence[Mapping[str, Any]] = (),
    written: str = "",
    sweep: Sweep | None = None,
) -> dict[str, Any]:
    """The data of the page in JSON types, bounded in size however long the runs are.

    Args:
        runs: The runs; runs of one stage are overlaid.
        title: Title of the page.
        headlines: Results shown above all runs: `label`, `value`, and its interval from `low` to `high`, or null.
        written: When the page was written, as text.
        sweep: The sweep that the runs belong to; its settings are then overlaid, not its runs.
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
    stages = dict.fromkeys(run.record.stage for run in runs)
    return {
        "title": title,
        "written": written,
        "headlines": list(headlines),
        "runs": shown,
        "sweep": overlaid,
        "judge_agreement": judge_agreement({run.name: run.record for run in runs}),
        "findings": _grouped_findings([run.findings for run in runs]),
        "panels": {
            stage: look.panels_of(name for run in shown if run["stage"] == stage for name in run["curves"]["columns"])
            for stage in stages
            if (look := look_of(stage)).panels
        },
    }


def _run(run: ReportedRun, most_points: int, most_bytes: int) -> dict[str, Any]:
    record = run.record
    models = {run.name: record} if has_part(record, "reward_model") else run.reward_models
    return {
        "name": run.name,
        "stage": record.stage,
        "state": record.state,
        "stops_at": record.stops_at,
        "facts": dict(record.facts),
        "sentences": [*describe_run(record), *data_sentences(record)],
        "doctor": {"verdict": run.verdict, "clean": run.is_clean},
        "incidents": 0 if record.trainer else len(record.incidents),
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


OPPOSITE = {"too_high": "too_low", "too_low": "too_high"}


def _grouped_findings(findings: Sequence[Sequence[Finding]]) -> list[dict[str, Any]]:
    """Group the findings, most severe first.

    Findings with the same field to change, of the same rule, or on the same figures are one group: symptoms of one
    cause, or one problem of several runs. Findings that first move a field in the other direction form another group.

    Returns:
        Groups with the `severity` of their worst finding and their `findings`, the worst first, each with the index of
        its `run`.
    """
    groups: list[list[tuple[int, Finding]]] = []
    keys: list[set[str]] = []
    for run, found in enumerate(findings):
        for finding in found:
            moved = f"{finding.field} {finding.direction}" if finding.field else finding.rule
            own = {finding.rule, moved, f"{run}: {finding.seen.partition(';')[0]}"}
            opposite = f"{finding.field} {OPPOSITE.get(finding.direction)}"
            fits = (place for place, known in enumerate(keys) if known & own and opposite not in known)
            place = next(fits, len(groups))
            if place == len(groups):
                groups.append([])
                keys.append(set())
            groups[place].append((run, finding))
            keys[place] |= own
    worst_first = [sorted(group, key=lambda entry: severity_rank(entry[1])) for group in groups]
    return [
        {"severity": group[0][1].severity, "findings": [{"run": run, **_shown(finding)} for run, finding in group]}
        for group in sorted(worst_first, key=lambda group: severity_rank(group[0][1]))
    ]


def _shown(finding: Finding) -> dict[str, str]:
    return {name: text for name, text in finding.as_json().items() if name != "docs"}


JUDGE = "gold"
INTERVALS = {
    "win_rate_over_sft": "PPO's win rate over SFT",
    "win_rate_over_references": "PPO's win rate over the references",
}
WRITERS = {"sft": "Gold quality of SFT", "ppo": "Gold quality of PPO", "references": "Gold quality of the references"}


def demo_frontier(summary: Mapping[str, Any], run: str) -> list[FrontierPoint]:
    """The gold judge's values along a run; empty for chains other than the demo.

    Args:
        summary: The chain's `summary.json`.
        run: Name of the run's folder.
    """
    return [
        FrontierPoint(
            update=each["update"],
            kl=each["kl"],
            proxy=each["proxy"],
            judges={JUDGE: each["gold"]},
        )
        for each in summary.get("curves", {}).get(run, ())
    ]


def demo_headlines(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The demo's results."""
    rates = [{"label": label, **summary[name]} for name, label in INTERVALS.items() if name in summary]
    quality = {name: {"value": value, "low": None} for name, value in summary.get("gold_quality", {}).items()}
    return [*rates, *({"label": label, **quality[name]} for name, label in WRITERS.items() if name in quality)]


MOST_BYTES = 6_000_000
"""Maximum size of an animation in the page; larger ones remain separate files."""


def video(record: RunRecord) -> str | None:
    """The run's animation as a data URI; None without one, or if it is too large for a page."""
    path = record.folder / VIDEO_FILE
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            return None
        content = path.read_bytes()
    except OSError:
        return None
    return f"data:image/webp;base64,{base64.b64encode(content).decode('ascii')}"

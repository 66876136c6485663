"""Control: returns that stay flat or collapse, updates that go too far, and the look of its runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from kedge_inspect.doctor.rule import Remedy, Symptom, rule, scale, set_to
from kedge_inspect.doctor.series import MIN_LEVEL, MIN_TREND, Series, fmt, rose
from kedge_inspect.look import Look, Panel, Row
from kedge_inspect.page.changes import change_of, ends_of, figure, joined
from kedge_inspect.page.looks import PPO
from kedge_inspect.record import RunRecord

CONTROL = ("control",)

LOST = 0.5
"""Share of the gain that a run has lost again."""

FAR = 0.1
TOO_FAR = 1.0
"""KL of an update, nats per step: in the first ten updates on HalfCheetah-v5 at most 0.015 with a clip range of 0.2,
and 0.3 to 0.5 without a clip."""


@rule(
    "The policy has unlearned: an update went further than its steps could support, and the next ones learned from "
    "the play of a bad policy.",
    needs=("episode/return_mean",),
    updates=2 * MIN_TREND,
    stages=CONTROL,
)
def return_collapsed(run: RunRecord, returns: Series) -> Symptom | None:
    """Seen: `episode/return_mean` rose and fell again.

    Try: Lower `control.learning_rate` to a third; end updates early with `control.early_stop_kl`. The best checkpoint
    may still be there.

    Threshold: More than half of the gain is lost, from the best three updates to the last quarter, and more than three
    standard errors.
    """
    if returns.peak <= returns.early:
        return None
    lost = (returns.peak - returns.late) / (returns.peak - returns.early)
    if lost <= LOST or returns.peak - returns.late <= 3 * returns.rise_error:
        return None
    return Symptom(
        "serious",
        f"the mean return fell from {fmt(returns.peak)} (update {returns.peak_updates[0]}) to {fmt(returns.late)} "
        f"({returns.late_span}): {lost:.0%} of what it had gained",
        _smaller_steps(run),
    )


@rule(
    "Nothing is learned: what is rewarded was hardly ever met, or steps are too few or too small.",
    needs=("episode/return_mean",),
    updates=4 * MIN_TREND,
    stages=CONTROL,
)
def return_flat(run: RunRecord, returns: Series) -> Symptom | None:
    """Seen: `episode/return_mean` neither rose nor had a peak.

    Try: More environments, a larger `control.entropy_coef`, a longer run; and check the reward.

    Threshold: After 32 updates, neither the last quarter nor any three updates are three standard errors above the
    first three.
    """
    if rose(returns) or returns.peak - returns.early > 3 * returns.rise_error:
        return None
    return Symptom(
        "warning",
        f"the mean return stayed near {fmt(returns.late)} for {len(returns)} updates",
        (
            scale("control.num_envs", 2.0),
            scale("control.entropy_coef", 2.0),
            scale("control.total_steps", 3.0),
        ),
        "check that the reward differs between good and bad behavior within an episode's reach",
    )


@rule(
    "Each update moves the policy further than the steps that it was computed from can support.",
    needs=("policy/distance_moved",),
    updates=MIN_LEVEL,
    stages=CONTROL,
)
def updates_too_large(run: RunRecord, moved: Series) -> Symptom | None:
    """Seen: `policy/distance_moved` is high late in the run.

    Try: `control.policy_loss=clipped`, if it is unclipped; lower `control.learning_rate` to a third; end updates early
    with `control.early_stop_kl`.

    Threshold: 0.1 nats per step is a warning, 1 is serious. On HalfCheetah-v5 it is at most 0.015 with a clip range of
    0.2, and 0.3 to 0.5 without a clip.
    """
    if moved.late <= FAR:
        return None
    return Symptom(
        "serious" if moved.late > TOO_FAR else "warning",
        f"an update moves the policy by {fmt(moved.late)} nats per step ({moved.late_span})",
        _smaller_steps(run),
    )


def _smaller_steps(run: RunRecord) -> Iterator[Remedy]:
    if run.setting("control.policy_loss") == "unclipped" and (run.setting("control.num_epochs") or 1) > 1:
        yield set_to("control.policy_loss", "clipped", why="so that steps have a bound")
    yield scale("control.learning_rate", 1 / 3)
    if run.setting("control.early_stop_kl") is None:
        yield set_to("control.early_stop_kl", 0.02, why="to end an update that moves too far")


def _sentences(record: RunRecord, progress: str) -> list[str]:
    """A control run's results."""
    total = ends_of(record, "episode/return_mean")
    name = record.setting("control.env")
    if total is None:
        return [f"{progress} in {name}; no episode has ended."]
    parts = [f"entropy {change_of(entropy)} nats per step"] if (entropy := ends_of(record, "policy/entropy")) else []
    if length := ends_of(record, "episode/length_mean"):
        parts.append(f"an episode's length {change_of(length)} steps")
    if evaluated := ends_of(record, "eval/return_mean"):
        parts.append(f"the most likely actions return {figure(evaluated.last)}")
    return [f"{progress} in {name}: the return of an episode {change_of(total)}.", joined(parts)]


SIZE = ("control.num_envs", "control.num_steps")


def _updates(record: RunRecord) -> int | None:
    total, *sizes = (record.setting(name) for name in ("control.total_steps", *SIZE))
    known = all(isinstance(each, int) and each > 0 for each in (total, *sizes))
    return total // math.prod(sizes) if known else None


ROWS = (
    Row("episode/return_mean", "Return of the last 100 episodes", good="up"),
    Row("eval/return_mean", "Return of the most likely actions", good="up"),
    Row("episode/length_mean", "Episode length", "steps"),
    Row("policy/entropy", "Entropy", "nats per step"),
    Row("policy/clip_fraction", "Clip fraction", "share"),
    Row("policy/distance_moved", "KL of an update", "nats per step"),
    Row("value/explained_variance", "Explained variance", "share", "up"),
    Row("tokens_per_second", "Steps per second", "1/s"),
)

SHARED = ("Entropy", "Clip fraction", "Ratio range", "Policy loss", "Gradient norm", "Explained variance", "Value loss")
PANELS = (
    Panel(
        "Episodes",
        "Return",
        "sum of rewards",
        {"episode/return_mean": "last 100 episodes", "eval/return_mean": "most likely actions"},
        "Rises, then levels off. In the environment's own unit.",
        key=True,
    ),
    Panel("Episodes", "Length", "steps", {"episode/length_mean": "last 100 episodes"}, key=True),
    Panel(
        "Policy step",
        "KL of an update",
        "nats per step",
        {"policy/distance_moved": "after the update", "policy/approx_kl": "mean over its steps"},
        "KL(old‖new) of the distributions. Below about 0.05.",
        logarithmic=True,
        key=True,
    ),
    *(replace(panel, unit=panel.unit.replace("token", "step")) for panel in PPO.panels if panel.title in SHARED),
    Panel(
        "Critic",
        "Values and returns",
        "reward as the critic learns it",
        {"value/mean": "values", "value/returns_mean": "returns"},
        "Values follow returns.",
    ),
    Panel(
        "Speed and memory",
        "Time by phase",
        "seconds per update",
        {"time/rollout": "playing", "time/experience": "experience", "time/train": "training"},
        "",
        stacked=True,
    ),
    Panel("Speed and memory", "Steps per second", "1/s", {"tokens_per_second": "environment steps"}, ""),
    Panel("Schedules", "Learning rate", "", {"policy/learning_rate": "learning rate"}),
)

LOOK = Look(
    rows=ROWS,
    panels=PANELS,
    sentences=_sentences,
    size=SIZE,
    items="steps",
    total=_updates,
    goals=("eval/return_mean", "episode/return_mean"),
    rules=(updates_too_large, return_collapsed, return_flat),
)

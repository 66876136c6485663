"""A critic that `kedge critic` trained: whether it explains anything on prompts that it was not fitted to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.needs import Needs
from kedge.inspect.doctor.remedies import scale, set_to
from kedge.inspect.record import RunRecord

__all__ = ["CRITIC_EXPLAINS_NOTHING"]

LITTLE = 0.05
"""Explained variance of a critic that saves PPO next to nothing: advantages vary as much as without a critic."""


def _explained(run: RunRecord) -> Mapping[str, Any] | None:
    explained = run.summary.get("explained_variance")
    is_known = isinstance(explained, Mapping) and explained["low"] is not None  # null with a single prompt
    return explained if is_known else None


def _explains_nothing(run: RunRecord) -> Symptom | None:
    explained = _explained(run)
    if explained is None or explained["value"] >= LITTLE or run.summary.get("measured_on") != "held-out prompts":
        return None
    return Symptom(
        "serious" if explained["high"] < LITTLE else "warning",
        f"on held-out prompts the critic explains {explained['value']:.0%} of the variance of the returns "
        f"({explained['low']:.0%} to {explained['high']:.0%})",
        tuple(_learn_more(run)),
    )


def _learn_more(run: RunRecord) -> Iterator[Remedy]:
    if run.setting("critic.kind") == "shared":
        yield set_to(run, "critic.kind", "separate", why="to train more than a head")
    yield scale(run, "critic.num_responses", 2.0)
    if run.setting("critic.kind") != "shared":
        yield scale(run, "critic.learning_rate", 3.0)


def _unmeasured(run: RunRecord) -> str:
    if not run.summary:
        return "the critic is measured at the end"
    return "" if run.summary.get("measured_on") == "held-out prompts" else "nothing was held out (data.eval_fraction)"


CRITIC_EXPLAINS_NOTHING = Rule(
    "critic_explains_nothing",
    "PPO would start from values that tell good responses from bad ones hardly better than their mean: too few "
    "responses to learn from, steps too small, or returns that nothing in a prompt and its prefix foretells.",
    ("explained_variance", "eval/explained_variance"),
    _explains_nothing,
    Needs(stages=("critic",), lacks=_unmeasured),
)

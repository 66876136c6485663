"""Responses to the same prompt, whose scores a critic-free advantage compares with each other."""

from __future__ import annotations

from collections.abc import Iterator

from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.needs import Needs
from kedge.inspect.doctor.remedies import scale, set_to
from kedge.inspect.doctor.trends import MIN_TREND, combine, fmt, read
from kedge.inspect.record import RunRecord

__all__ = ["GROUPS_WITHOUT_SPREAD", "GROUP_STD_BLOWS_UP", "LENGTH_BIAS"]

IN_GROUPS = ("rloo", "grpo", "dr_grpo", "reinforce++_baseline", "opo")
"""Advantages that compare the responses to a prompt with each other."""

MANY_CONSTANT, MOST_CONSTANT = 0.5, 0.9
"""Share of groups without spread above which most of the sampling, or nearly all, is wasted. Training on sorting digits
went well up to 0.77, with ever smaller batches."""

MANY_SMALL = 0.2
"""Share of groups with a tenth of the usual spread. Equally distributed scores give 0.08 with two responses per prompt,
and less than 0.01 from three on."""

LONGER = 1.3
"""Length of the low-scored responses, relative to the start, that is more than drift."""

APART = 1.15
"""How much longer the low-scored responses have become than the high-scored ones, relative to the start."""


def _compares(run: RunRecord) -> bool:
    """Whether the advantage compares the responses to a prompt."""
    return run.setting("ppo.advantage") in IN_GROUPS


def _divides_by_std(run: RunRecord) -> bool:
    return run.setting("ppo.advantage") == "grpo"


def _averages_responses(run: RunRecord) -> bool:
    return _compares(run) and run.setting("ppo.aggregation") == "sequence"


def _without_spread(run: RunRecord) -> Symptom | None:
    constant = read(run, "group/constant", at_least=MIN_TREND)
    if constant is None or constant.late < MANY_CONSTANT or not _compares(run):
        return None
    return Symptom(
        "warning" if constant.late >= MOST_CONSTANT else "note",
        f"the responses of {constant.late:.0%} of the prompts all score the same ({constant.late_span}); at the start "
        f"it was {constant.early:.0%}",
        tuple(_find_spread(run)),
        "prompts that are neither solved nor out of reach, or a reward that tells responses apart",
    )


def _find_spread(run: RunRecord) -> Iterator[Remedy]:
    if run.setting("ppo.constant_groups") in (None, "keep"):
        yield set_to(run, "ppo.constant_groups", "resample", why="to train on prompts with spread alone")
    yield scale(run, "rollout.num_responses", 2.0)


def _blows_up(run: RunRecord) -> Symptom | None:
    small = read(run, "group/small_spread", at_least=MIN_TREND)
    if small is None or small.late < MANY_SMALL or not _divides_by_std(run):
        return None
    return Symptom(
        "warning",
        f"in {small.late:.0%} of the groups with spread, the scores differ by less than a tenth of what is usual "
        f"({small.late_span})",
        (set_to(run, "ppo.advantage", "dr_grpo", why="which does not divide by it"),),
    )


def _length_bias(run: RunRecord) -> Symptom | None:
    names = ("group/length_below", "group/length_above")
    below = combine(run, names, lambda low, high: low, at_least=MIN_TREND)
    apart = combine(run, names, lambda low, high: low / high if high > 0 else None, at_least=MIN_TREND)
    if below is None or apart is None or below.early <= 0 or apart.early <= 0 or not _averages_responses(run):
        return None
    if below.late < LONGER * below.early or apart.late < APART * apart.early:
        return None
    return Symptom(
        "warning",
        f"the responses that score below their group's mean grow from {fmt(below.early)} to {fmt(below.late)} tokens "
        f"({below.late_span}), and from {fmt(apart.early)} to {fmt(apart.late)} times the length of the others",
        (set_to(run, "ppo.aggregation", "token", why="so that every token has the same weight"),),
    )


GROUPS_WITHOUT_SPREAD = Rule(
    "groups_without_spread",
    "The responses to most prompts score alike. The advantages of these prompts are 0, apart from a KL in the reward: "
    "they are sampled, scored and evaluated, and teach nothing about the score.",
    ("group/constant",),
    _without_spread,
    Needs(("group/constant",), MIN_TREND, fits=_compares),
)

GROUP_STD_BLOWS_UP = Rule(
    "group_std_blows_up",
    "Dividing by a group's standard deviation gives every group the same weight. Where its responses are nearly equal, "
    "it makes differences that mean little as large as those that mean much.",
    ("group/small_spread",),
    _blows_up,
    Needs(("group/small_spread",), MIN_TREND, fits=_divides_by_std),
)

LENGTH_BIAS = Rule(
    "length_bias",
    "A mean over each response's tokens divides the loss of a long response by its length, so a bad response costs "
    "less per token the longer it is. The policy learns to make bad responses longer.",
    ("group/length_below", "group/length_above"),
    _length_bias,
    Needs(
        ("group/length_below", "group/length_above"),
        MIN_TREND,
        fits=_averages_responses,
    ),
)

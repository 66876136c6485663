"""Critic: its predictions, and the advantages computed from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kedge_inspect.doctor.rule import SMALLER_STEPS, Direction, Remedy, Symptom, instruct, rule, scale, set_to
from kedge_inspect.doctor.series import MIN_TREND, WINDOW, Series, fmt, read, rose
from kedge_inspect.page.changes import percent
from kedge_inspect.record import RunRecord, is_number
from kedge_inspect.resolved import (
    compares_groups,
    critic_of,
    estimator_facts,
    is_detached,
    is_frozen,
    num_readout_batches,
)

BIASED = 1.0
"""Distance of the mean value from the mean return, in standard deviations of the returns, of a critic that has not even
learned the mean. A value head that starts at 0 is off by 0.6 after three of the demo's updates and by 0.1 at the
end."""

USELESS = 0.05
"""Explained variance up to which a critic is not worth its cost. A value head on the policy's trunk ends runs as short
as the demo's between −0.1 and 0.05, so a limit of 0 would be decided by chance; a separate critic ends above 0.5.
"""

HARMFUL = -1.0
"""Explained variance of values that vary like the returns but are unrelated to them. Small runs that ended well dropped
to −0.7.
"""

DESTROYED = -100.0
"""Explained variance that needs no history: the values vary ten times as much as the returns."""

NOISY = -0.1
"""Explained variance at which the values are no longer constant but vary on their own: the critic's steps are too
large. Values unrelated to the returns have minus the square of their relative standard deviation."""

CONSTANT = 0.01
"""Standard deviation of the values, relative to the returns', of a head that outputs nearly the same everywhere."""

SATURATED = 0.1
"""Standard deviation of the scores relative to the first update, or of an update's returns relative to the largest so
far, below which there is nothing left to explain.
"""

TRAINED = 50
"""Updates after which a value head on the policy's trunk should explain something: after 16 it is at about 0, after 26
at about 0.1."""

CRITIC_RATE = 10.0
"""Learning rate of a critic that fits the returns as fast as the policy changes them, as a multiple of the policy's: at
the policy's own, the demo's ends at an explained variance of a third, at ten times that of two thirds."""

WARM_UP = 5
"""Suggested number of updates that train only the critic."""

BINDING = 0.5
"""Share of clipped values: most of the critic's gradient is cut off."""

TOO_WIDE = 3.0
"""Standard deviation of the values, relative to the returns': at 3 the explained variance is −3 at best."""

LARGE = 5.0
SMALL = 0.05
"""Standard deviation of the returns at which losses and clips in score units are out of proportion: the squared error
is 25 times as large, or 400 times as small, as the policy loss."""

IDLE = 0.02
"""Share of the advantages' variance up to which a critic that adds to a baseline is not worth its passes. A value head
that explains 0.45 takes away 0.3 to 0.5."""

OF_CRITIC = {
    "ppo.critic_learning_rate": None,
    "ppo.value_warmup_updates": 0,
    "ppo.num_critic_epochs": 1,
    "ppo.value_gae_lambda": None,
    "ppo.critic_check": None,
}
"""Settings that a run without a critic accepts only at these values."""

NEEDED = ("value/explained_variance", "value/mean", "value/returns_mean", "value/returns_std|reward/score_std")
"""The metrics that every verdict on a critic needs."""


@dataclass(frozen=True)
class _Critic:
    """A critic's figures late in the run; distances are in standard deviations of the returns."""

    explained: Series
    bias: float
    values_std: float | None
    returns_std: float


def has_critic(run: RunRecord) -> bool:
    """True if the run has a critic, or its configuration does not say."""
    return critic_of(run) != "none"


def relies_on_critic(run: RunRecord) -> bool:
    """True if the advantages rely on a critic, rather than give it the weight that it deserves."""
    return has_critic(run) and estimator_facts(run).adds_to == "none"


def trains_critic(run: RunRecord) -> bool:
    """True if the run has a critic that a loss trains, or its configuration does not say."""
    return has_critic(run) and num_readout_batches(run) is None and not is_frozen(run)


def with_something_to_explain(run: RunRecord, explained: Series) -> Series:
    """Drop the updates whose returns hardly vary: their explained variance means nothing.

    In a batch without a success, they differ only by their KL: the values' usual spread is hundreds of times as large.
    """
    spread = read(run, "value/returns_std", at_least=1) or read(run, "reward/score_std", at_least=1)
    if spread is None:
        return explained
    largest = accumulate(spread.values, max)
    pairs = zip(spread.items, largest, strict=True)
    flat = {update for (update, std), most in pairs if std < SATURATED * most}
    return Series.of((update, value) for update, value in explained.items if update not in flat)


def _critic(run: RunRecord, explained: Series, mean: Series, returns: Series) -> _Critic | None:
    unit = read(run, "value/returns_std", at_least=MIN_TREND) or read(run, "reward/score_std", at_least=MIN_TREND)
    if unit is None or unit.late <= 0:
        return None
    scores = read(run, "reward/score_std")
    if scores is not None and scores.late <= SATURATED * scores.first:
        return None
    told = with_something_to_explain(run, explained)
    if not told:
        return None
    values_std = read(run, "value/std", at_least=MIN_TREND)
    bias = abs(returns.late - mean.late) / unit.late
    return _Critic(told, bias, values_std.late / unit.late if values_std else None, unit.late)


def _below_zero(run: RunRecord) -> Symptom | None:
    """Symptom of a run that is too short for a full verdict but ends with harmful values."""
    explained = read(run, "value/explained_variance", at_least=2)
    if explained is None or len(explained) >= MIN_TREND:
        return None
    told = with_something_to_explain(run, explained)
    if told and told.values[-1] < DESTROYED:
        return Symptom(
            "serious",
            f"explained variance is {fmt(told.values[-1])} in update {told.updates[-1]}",
            train_critic_less(run),
        )
    if run.state == "running" or len(told) < WINDOW or told.late >= 0:
        return None
    return Symptom(
        "note",
        f"explained variance is {fmt(told.late)} at the end ({told.late_span}), after {len(explained)} "
        "updates of training the critic",
        train_critic_less(run) if told.late < NOISY else _train_critic_more(run),
    )


@rule(
    "The critic predicts hardly better than a constant, or worse. The advantages are then little more than the raw "
    "score, with all its noise, on every token.",
    needs=NEEDED,
    early=_below_zero,
    updates=MIN_TREND,
    fits=relies_on_critic,
)
def dead_critic(run: RunRecord, explained: Series, mean: Series, returns: Series) -> Symptom | None:
    """Seen: `value/explained_variance` is 0.05 or below, or `value/mean` is far from `value/returns_mean`.

    Try: A value head on the policy's trunk learns as slowly as the policy does: `ppo.critic=separate` gives the critic
    its own weights and learning rate; else triple `ppo.value_coef` and `ppo.value_head_rate`. A separate critic needs
    about ten times the policy's rate, `ppo.critic_learning_rate` (`bench/defaults/RESULTS.md`).
    `ppo.value_warmup_updates=5` trains either before the policy. Below −0.1, unless it is rising, the values are noise:
    a third of the critic's learning rate, or twice the batches of a read-out, as in `ppo.critic={readout: 16}`. As long
    as the explained variance is 0.05 or below, `ppo.gae_lambda=1`, the default: with 0.95 a score reaches the early
    tokens of a long response through the values alone ([measured](critic.md#does-it-pay)).

    Threshold: A late explained variance of at most 0.05, or a mean value one standard deviation of the returns off.
    Serious if the mean is off, the explained variance is below −1 (worse than unrelated values) or the values are
    nearly constant; otherwise a note, and from 50 updates on a warning if the explained variance is not above 0. A
    finished run of 3 to 7 updates gets a note if its explained variance ends below 0. Skipped once the scores' standard
    deviation has fallen to a tenth, and in updates whose returns have less than a tenth of the largest standard
    deviation so far. Not for a critic that adds to a baseline; see [idle_critic](#idle_critic).
    """
    critic = _critic(run, explained, mean, returns)
    if critic is None:
        return None
    late = critic.explained.late
    if late > USELESS and critic.bias < BIASED:
        return None
    constant = critic.values_std is not None and critic.values_std < CONSTANT
    serious = critic.bias >= BIASED or late < HARMFUL or constant
    seen = f"explained variance is {fmt(late)} ({critic.explained.late_span})"
    if critic.bias >= BIASED:
        seen += f"; the mean value is {fmt(critic.bias)} standard deviations away from the mean return"
    if constant:
        seen += "; the values are nearly constant"
    worse = late <= 0.0 and explained.updates[-1] >= TRAINED
    severity = "serious" if serious else "warning" if worse else "note"
    instead = _rely_on_it_less(run) if late <= USELESS else ()
    return Symptom(severity, seen, (*_train_critic(run, critic), *instead))


def _train_critic(run: RunRecord, critic: _Critic) -> Iterator[Remedy]:
    """Train the critic less if its values are noise, else more."""
    noisy = critic.explained.late < NOISY and critic.bias < BIASED and not rose(critic.explained)
    return train_critic_less(run) if noisy else _train_critic_more(run)


def train_critic_less(run: RunRecord) -> Iterator[Remedy]:
    """Lower the critic's learning rate, or the policy's if they share it; and warm the critic up.

    A read-out is fitted to more responses instead, and a frozen critic is trained.
    """
    if batches := num_readout_batches(run):
        yield set_to("ppo.critic", {"readout": 2 * batches}, why="to fit it to more responses")
    elif is_frozen(run):
        yield _TRAINED
    elif run.setting("ppo.critic_learning_rate"):
        yield scale("ppo.critic_learning_rate", 1 / 3)
    elif critic_of(run) == "shared" and run.number("ppo.value_head_rate") > 1:
        yield scale("ppo.value_head_rate", 1 / 3)
    else:
        yield SMALLER_STEPS
    yield from _warm_up(run)


_TRAINED = set_to("ppo.critic", "separate", why="for a critic with its own weights and learning rate")


def _train_critic_more(run: RunRecord) -> Iterator[Remedy]:
    # A saved critic with a value head on the policy's trunk cannot start a separate one.
    is_saved = run.setting("ppo.critic_init") not in (None, "auto", "reward", "policy")
    separate = () if is_saved and critic_of(run) == "shared" else (_TRAINED,)
    if has_critic(run) and not trains_critic(run):
        yield from separate
    elif critic_of(run) == "separate":
        yield from _raise_critic_rate(run)
    else:
        yield from () if is_detached(run) else separate
        yield scale("ppo.value_coef", 3.0)
        yield scale("ppo.value_head_rate", 3.0)
    yield from _warm_up(run)


def _raise_critic_rate(run: RunRecord) -> Iterator[Remedy]:
    """Raise the critic's learning rate. Adam's steps hardly depend on the weight of a separate loss, so value_coef
    would not help.
    """
    if run.setting("ppo.value_coef") == 0:
        yield set_to("ppo.value_coef", 0.1, "too_low")
    own = run.setting("ppo.critic_learning_rate")
    policy = run.setting("ppo.learning_rate")
    if own:
        yield scale("ppo.critic_learning_rate", 3.0)
    elif policy:
        yield set_to("ppo.critic_learning_rate", float(f"{CRITIC_RATE * policy:.2g}"), "too_low")


def _rely_on_it_less(run: RunRecord) -> Iterator[Remedy]:
    """Rely less on the critic: with λ below 1, a score reaches early tokens only through the values
    (bench/study/RESULTS.md).
    """
    gae_lambda = run.setting("ppo.gae_lambda")
    if is_number(gae_lambda) and gae_lambda < 1 and estimator_facts(run).decays_by_lambda:
        yield set_to("ppo.gae_lambda", 1.0, "too_low", why="as long as the critic explains so little")


def _warm_up(run: RunRecord) -> Iterator[Remedy]:
    is_too_short = run.setting("ppo.num_updates") in range(1, WARM_UP + 1)  # none left for the policy
    if not run.setting("ppo.value_warmup_updates.at_most") and not is_too_short:
        yield set_to("ppo.value_warmup_updates", WARM_UP, why="to train the critic alone first")


@rule(
    "The critic tells nothing that its baseline does not, so its weight is near 0, and the advantages are those of a "
    "run without one. It adds no noise, but costs its passes, and the loss of a shared head still moves the policy.",
    needs=("advantage/variance_saved",),
    updates=MIN_TREND,
    fits=lambda run: has_critic(run) and estimator_facts(run).adds_to != "none",
)
def idle_critic(run: RunRecord, saved: Series) -> Symptom | None:
    """Seen: With `rloo_critic` or `reinforce++_critic` as `ppo.advantage`, `advantage/variance_saved` stays near 0.

    Try: Leave it, since it may still learn; or save its passes with the same advantage without a critic: `rloo` or
    `reinforce++` as `ppo.advantage`, and `none` as `ppo.critic`, without the critic's settings. With
    `ppo.critic=detached` a head's loss leaves the policy alone.

    Threshold: At most 2% of the variance late in the run. A note.
    """
    if saved.late > IDLE:
        return None
    weight = read(run, "advantage/critic_weight")
    at = f", with a weight of {fmt(weight.late)}" if weight else ""
    return Symptom(
        "note",
        f"the critic takes away {saved.late:.1%} of the advantages' variance{at} ({saved.late_span})",
        (
            set_to("ppo.advantage", estimator_facts(run).adds_to, why="to save the critic's passes"),
            set_to("ppo.critic", "none"),
            *(
                instruct(name, f"leave out {name}")
                for name, off in OF_CRITIC.items()
                if run.setting(name) not in (None, off)
            ),
        ),
    )


@rule(
    "The value clip is narrower than the critic's errors and cuts off their gradient, so the values lag behind the "
    "returns.",
    needs=("value/clip_fraction", *NEEDED),
    updates=MIN_TREND,
    fits=lambda run: trains_critic(run) and (not run.config or run.setting("ppo.value_clip_range") is not None),
)
def value_clip_binding(
    run: RunRecord, clipped: Series, explained: Series, mean: Series, returns: Series
) -> Symptom | None:
    """Seen: `value/clip_fraction` stays high.

    Try: Raise `ppo.value_clip_range` fivefold.

    Threshold: At least half of the values are clipped late in the run. A warning, or serious if the mean value is at
    least one standard deviation of the returns away from the mean return, and the critic does not just add to a
    baseline.
    """
    critic = _critic(run, explained, mean, returns)
    if critic is None or clipped.late < BINDING:
        return None
    return Symptom(
        "serious" if critic.bias >= BIASED and relies_on_critic(run) else "warning",
        f"{clipped.late:.0%} of the values are clipped ({clipped.late_span}); explained variance is "
        f"{fmt(critic.explained.late)}, and the mean value is {fmt(critic.bias)} standard deviations away from the "
        "mean return",
        (scale("ppo.value_clip_range", 5.0),),
    )


@rule(
    "The critic and the returns are on different scales: either the critic's errors swamp the advantages, or its "
    "gradient swamps the policy's.",
    needs=NEEDED,
    updates=MIN_TREND,
    fits=trains_critic,
)
def value_scale_mismatch(run: RunRecord, explained: Series, mean: Series, returns: Series) -> Symptom | None:
    """Seen: `value/std` is far larger than `value/returns_std`; or `value/returns_std` is far from 1 with
    `ppo.value_unit=score`, or `value/mean` from `value/returns_mean`; or, with `ppo.value_loss=hl_gauss`,
    `value/outside_support` stays above 0, or the bins are wide compared with `value/returns_std`.

    Try: `ppo.value_unit=returns_std`. If the values vary too much, `ppo.critic_init=policy`, which starts a separate
    critic with equal values, and the learning rates of [dead_critic](#dead_critic). The ends of
    `ppo.value_loss={hl_gauss: …}` five standard deviations from the mean return.

    Threshold: Values with three times the standard deviation of the returns, at which the explained variance is −3 at
    best; in score units, returns with a standard deviation above 5 or below 0.05, or a mean value more than a standard
    deviation from the mean return. Serious; a warning if the returns are too small. With a histogram, instead of the
    unit: 5% of the returns outside the support, a warning, serious from half of them on; or bins twice as wide as the
    standard deviation of the returns, a note.
    """
    critic = _critic(run, explained, mean, returns)
    if critic is None:
        return None
    if critic.values_std is not None and critic.values_std > TOO_WIDE:
        equal_start = set_to("ppo.critic_init", "policy", why="to start with equal values")
        is_shared = critic_of(run) == "shared"  # on a trunk that is the policy
        return Symptom(
            "serious",
            f"the values' standard deviation is {fmt(critic.values_std)} times that of the returns "
            f"({critic.explained.late_span})",
            (*[equal_start] * (not is_shared), *_train_critic(run, critic)),
        )
    if run.choice("ppo.value_loss") == "hl_gauss":
        return _support_symptom(run, returns, critic.returns_std)
    is_far = critic.bias >= BIASED
    if run.setting("ppo.value_unit") != "score" or (SMALL <= critic.returns_std <= LARGE and not is_far):
        return None
    loss = read(run, "value/loss")
    if is_far:
        seen = (
            f"the mean value is {fmt(mean.late)} where the mean return is {fmt(returns.late)} "
            f"({critic.explained.late_span}): the critic's steps are too small for scores of this size"
        )
    else:
        seen = (
            f"the returns' standard deviation is {fmt(critic.returns_std)} ({critic.explained.late_span}), and the "
            "value loss grows with its square" + (f": it is {fmt(loss.late)}" if loss else "")
        )
    return Symptom(
        "serious" if critic.returns_std > LARGE or is_far else "warning",
        seen,
        (set_to("ppo.value_unit", "returns_std", why="to make both independent of the reward's scale"),),
    )


OUTSIDE = 0.05
"""Share of returns outside the support from which it is too narrow; they are predicted as its nearest end."""

MOSTLY_OUTSIDE = 0.5
"""Share of returns outside the support at which the critic mostly predicts a constant."""

COARSE = 2.0
"""Width of a bin, in standard deviations of the returns: a target's Gaussian is then 1.5 times as wide as the returns
are spread, so that targets hardly differ."""

DEFAULT_BINS = (-10.0, 10.0, 101)
"""The default histogram of `ppo.value_loss=hl_gauss`."""

REACH = 5.0
"""Distance of the suggested ends from the mean return, in standard deviations of the returns."""


def _support_symptom(run: RunRecord, mean: Series, returns_std: float) -> Symptom | None:
    """Symptom of a histogram that is too narrow or too wide for the returns; None if it fits or is absent."""
    outside = read(run, "value/outside_support", at_least=MIN_TREND)
    if outside is None:
        return None
    low, high, num_bins = run.setting("ppo.value_loss.hl_gauss") or DEFAULT_BINS
    wanted = [_outwards(mean.late + sign * REACH * returns_std, sign) for sign in (-1, 1)]
    if outside.late >= OUTSIDE:
        return Symptom(
            "serious" if outside.late >= MOSTLY_OUTSIDE else "warning",
            f"{outside.late:.0%} of the returns are outside the critic's support, {fmt(low)} to {fmt(high)} "
            f"({outside.late_span})",
            (_set_bins([min(low, wanted[0]), max(high, wanted[1]), num_bins], "too_low"),),
        )
    width = (high - low) / num_bins
    if width < COARSE * returns_std:
        return None
    return Symptom(
        "note",
        f"a bin of the critic's support is {fmt(width)} wide, and the returns' standard deviation is "
        f"{fmt(returns_std)} ({mean.late_span})",
        (_set_bins([*wanted, num_bins], "too_high"),),
    )


def _set_bins(bins: list[float], direction: Direction) -> Remedy:
    return set_to("ppo.value_loss", {"hl_gauss": bins}, direction)


def _outwards(value: float, sign: int) -> float:
    """Round to two digits, away from the mean."""
    if value == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 1)
    return round((math.floor if sign < 0 else math.ceil)(value / unit) * unit, 12)


CHANCE = 0.5
"""Share of pairs that uninformative values order correctly."""

TELLING = 0.6
"""Share of pairs ordered by a perfect critic below which continuations are too noisy to distinguish it from chance."""


def _checks(run: RunRecord) -> list[dict[str, Any]]:
    """The checks of a critic that has been trained for some updates, or of a finished one."""
    return [row for row in run.critic_checks if run.stage == "evaluate" or row["update"] >= MIN_TREND]


def _is_checked(run: RunRecord) -> bool:
    return bool(run.critic_checks)


def _too_early(run: RunRecord) -> str:
    return "" if _checks(run) else f"the critic was not checked after update {MIN_TREND} or later"


@rule(
    "The mean return of a few other responses to the prompt, which is the baseline of RLOO and GRPO, is closer to what "
    "the policy earns from a prefix than the critic's value is. With groups of that size, a run without a critic would "
    "have less noisy advantages.",
    updates=0,
    stages=("ppo", "evaluate"),
    fits=lambda run: _is_checked(run) and (relies_on_critic(run) or not compares_groups(run)),
    lacks=_too_early,
)
def critic_worse_than_prompt_mean(run: RunRecord) -> Symptom | None:
    """Seen: With `ppo.critic_check`, or in `kedge evaluate` with `--critic`, `critic/explained_variance` is below
    `critic/explained_variance_prompt_mean`.

    Try: Train the critic more, as for [dead_critic](#dead_critic); or compare with groups of that size
    (`--preset rloo`).

    Threshold: The 95% interval of the difference, over resampled prompts, is below 0 in the last check after update 8
    or later. A note; a warning if the interval of `critic/explained_variance` reaches down to 0, serious if that of
    `critic/pairs_across` reaches down to chance. Not with `rloo_critic`, whose baseline is that mean.
    """
    check = _checks(run)[-1]
    gain = check.get("gain")
    if gain is None or gain["high"] is None or gain["high"] >= 0:
        return None
    explained, prompt, across = (
        check[name] for name in ("explained_variance", "prompt_explained_variance", "pairs_across")
    )
    seen = (
        f"of the mean returns of continuations the critic explains {percent(explained)}, the mean return of "
        f"{check['num_continuations']:.3g} other responses to the prompt {percent(prompt)}"
        f"{_place(check)}"
    )
    if across is not None:
        seen += f"; its values order {percent(across)} of the pairs of different prompts right, where chance is 50%"
    is_chance = across is not None and across["low"] <= CHANCE
    severity = "serious" if is_chance else "warning" if explained["low"] <= 0 else "note"
    remedies = () if run.stage == "evaluate" else _train_critic_more(run)
    return Symptom(severity, seen, remedies, "or compare with groups of that size (--preset rloo)")


@rule(
    "The critic cannot tell a good beginning of a response from a bad one, only one prompt from another. It gives no "
    "credit to single tokens.",
    updates=0,
    stages=("ppo", "evaluate"),
    fits=_is_checked,
    lacks=_too_early,
)
def critic_blind_within_prompts(run: RunRecord) -> Symptom | None:
    """Seen: With `ppo.critic_check`, or in `kedge evaluate` with `--critic`, `critic/pairs_within` is near ½.

    Try: Train the critic for longer, or compare with an advantage from groups of responses, such as RLOO's (`--preset
    rloo`).

    Threshold: The 95% interval includes ½ in the last check after update 8 or later, and a perfect critic would reach
    0.6 or more despite the noise of the continuations. A note.
    """
    check = _checks(run)[-1]
    within = check.get("pairs_within")
    if within is None or within["low"] > CHANCE or (check.get("ceiling_within") or 0.0) < TELLING:
        return None
    return Symptom(
        "note",
        f"its values order {percent(within)} of the pairs of prefixes of one prompt right, where chance is 50% and a "
        f"perfect critic would reach about {check['ceiling_within']:.0%}{_place(check)}",
        (),
        "train the critic for longer, or compare with an advantage from groups of responses (--preset rloo)",
    )


def _place(check: Mapping[str, Any]) -> str:
    """Return when the critic was checked; one trained by `kedge critic` has no update."""
    return f" (after update {check['update']})" if check["update"] else ""

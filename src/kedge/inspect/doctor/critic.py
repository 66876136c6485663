"""The critic, and the advantages computed from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.needs import Needs
from kedge.inspect.doctor.remedies import scale, set_to
from kedge.inspect.doctor.responses import nearly_all_truncated
from kedge.inspect.doctor.rewards import NEARLY_CONSTANT, scores_are_constant
from kedge.inspect.doctor.support import support_symptom
from kedge.inspect.doctor.trends import MIN_LEVEL, MIN_TREND, WINDOW, Series, fmt, read, rose
from kedge.inspect.record import RunRecord
from kedge.inspect.resolved import critic_of, whitens_advantages

__all__ = ["DEAD_CRITIC", "VALUE_CLIP_BINDING", "VALUE_SCALE_MISMATCH", "WHITENING_CONSTANT_BATCH"]

BIASED = 1.0
"""Distance of the mean value from the mean return, in standard deviations of the returns, of a critic that has not even
learned the mean. A value head that starts at 0 is off by 0.6 after three of the demo's updates and by 0.1 at the
end."""

USELESS = 0.05
"""Explained variance up to which a critic is not worth its cost. A value head on the policy's trunk ends runs as short
as the demo's between −0.1 and 0.05, so a limit of 0 would decide by chance; a separate critic ends them above 0.5."""

HARMFUL = -1.0
"""Explained variance of values that vary like the returns but are unrelated to them. Small runs that ended well went
down to −0.7."""

DESTROYED = -100.0
"""Explained variance that needs no history: the values vary ten times as much as the returns."""

NOISY = -0.1
"""Explained variance at which the values are no longer constant but vary on their own: the critic's steps are too
large. Values unrelated to the returns have minus the square of their relative standard deviation."""

CONSTANT = 0.01
"""Standard deviation of the values, relative to the returns', of a head that outputs nearly the same everywhere."""

SATURATED = 0.1
"""Standard deviation of the scores, relative to the first update, at which there is nothing left to explain."""

TRAINED = 50
"""Updates after which a value head on the policy's trunk should explain something: after 16 it is at about 0, after 26
at about 0.1."""

CRITIC_RATE = 10.0
"""Learning rate of a critic that fits the returns as fast as the policy changes them, as a multiple of the policy's: at
the policy's own, the demo's ends at an explained variance of a third, at ten times that of two thirds."""

BINDING = 0.5
"""Share of clipped values: most of the critic's gradient is cut off."""

TOO_WIDE = 3.0
"""Standard deviation of the values, relative to the returns': at 3 the explained variance is −3 at best."""

LARGE, SMALL = 5.0, 0.05
"""Standard deviation of the returns at which losses and clips in score units are out of proportion: the squared error
is 25 times as large, or 400 times as small, as the policy loss."""

CRITIC_METRICS = (
    "value/explained_variance",
    "value/mean",
    "value/returns_mean",
    "value/returns_std",
    "value/std",
    "reward/score_std",
)
NEEDED = ("value/explained_variance", "value/mean", "value/returns_mean", "value/returns_std|reward/score_std")
"""Of these, the ones without which nothing can be said about a critic."""


@dataclass(frozen=True)
class _Critic:
    """Late figures of a critic that has something to explain; lengths in standard deviations of the returns."""

    explained: float
    rising: bool
    bias: float
    values_std: float | None
    returns_std: float
    updates: int
    span: str


def has_critic(run: RunRecord) -> bool:
    """Whether the run may have a critic; true if its configuration does not say."""
    return critic_of(run) != "none"


def _critic(run: RunRecord) -> _Critic | None:
    explained = read(run, "value/explained_variance", at_least=MIN_TREND)
    mean, returns = read(run, "value/mean", at_least=MIN_TREND), read(run, "value/returns_mean", at_least=MIN_TREND)
    unit = read(run, "value/returns_std", at_least=MIN_TREND) or read(run, "reward/score_std", at_least=MIN_TREND)
    if explained is None or mean is None or returns is None or unit is None or unit.late <= 0:
        return None
    scores = read(run, "reward/score_std")
    if scores is not None and scores.late <= SATURATED * scores.first:
        return None
    values_std = read(run, "value/std", at_least=MIN_TREND)
    return _Critic(
        explained.late,
        rose(explained),
        abs(returns.late - mean.late) / unit.late,
        values_std.late / unit.late if values_std else None,
        unit.late,
        explained.updates[-1],
        explained.late_span,
    )


def _dead(run: RunRecord) -> Symptom | None:
    critic = _critic(run)
    if critic is None:
        return _below_zero(run)
    if critic.explained > USELESS and critic.bias < BIASED:
        return None
    constant = critic.values_std is not None and critic.values_std < CONSTANT
    serious = critic.bias >= BIASED or critic.explained < HARMFUL or constant
    seen = f"explained variance is {fmt(critic.explained)} ({critic.span})"
    if critic.bias >= BIASED:
        seen += f"; the mean value is {fmt(critic.bias)} standard deviations away from the mean return"
    if constant:
        seen += "; the values are nearly constant"
    worse = critic.explained <= 0.0 and critic.updates >= TRAINED
    severity = "serious" if serious else "warning" if worse else "note"
    noisy = critic.explained < NOISY and critic.bias < BIASED and not critic.rising
    train = _train_critic_less(run) if noisy else _train_critic_more(run)
    instead = _rely_on_it_less(run) if critic.explained <= USELESS else ()
    return Symptom(severity, seen, (*train, *instead))


def _below_zero(run: RunRecord) -> Symptom | None:
    """A run too short for a verdict on its critic, at whose end the values do harm."""
    explained = read(run, "value/explained_variance", at_least=2)
    if explained is None or len(explained) >= MIN_TREND:
        return None
    if explained.values[-1] < DESTROYED:
        return Symptom(
            "serious",
            f"explained variance is {fmt(explained.values[-1])} in update {explained.updates[-1]}",
            tuple(_train_critic_less(run)),
        )
    if run.state == "running" or len(explained) < WINDOW or explained.late >= 0:
        return None
    return Symptom(
        "note",
        f"explained variance is {fmt(explained.late)} at the end ({explained.late_span}), after {len(explained)} "
        "updates of training the critic",
        tuple(_train_critic_less(run) if explained.late < NOISY else _train_critic_more(run)),
    )


def _train_critic_less(run: RunRecord) -> Iterator[Remedy]:
    if run.setting("ppo.critic_learning_rate"):
        yield scale(run, "ppo.critic_learning_rate", 1 / 3)
    elif critic_of(run) == "shared" and (run.setting("ppo.value_head_rate") or 0) > 1:
        yield scale(run, "ppo.value_head_rate", 1 / 3)
    else:
        yield scale(run, "ppo.learning_rate", 1 / 3)
    yield from _warm_up(run)


def _train_critic_more(run: RunRecord) -> Iterator[Remedy]:
    if critic_of(run) == "separate":
        yield from _raise_critic_rate(run)
    else:
        yield set_to(run, "ppo.critic", "separate", why="for a critic with weights and a learning rate of its own")
        yield scale(run, "ppo.value_coef", 3.0)
        yield scale(run, "ppo.value_head_rate", 3.0)
    yield from _warm_up(run)


def _raise_critic_rate(run: RunRecord) -> Iterator[Remedy]:
    """Adam's steps hardly depend on the weight of a loss that no other shares, so value_coef would not help."""
    if run.setting("ppo.value_coef") == 0:
        yield set_to(run, "ppo.value_coef", 0.1, "too_low")
    own, policy = run.setting("ppo.critic_learning_rate"), run.setting("ppo.learning_rate")
    if own:
        yield scale(run, "ppo.critic_learning_rate", 3.0)
    elif policy:
        yield set_to(run, "ppo.critic_learning_rate", float(f"{CRITIC_RATE * policy:.2g}"), "too_low")


def _rely_on_it_less(run: RunRecord) -> Iterator[Remedy]:
    """With λ below 1 a score reaches early tokens through the values alone (bench/study/RESULTS.md)."""
    gae_lambda = run.setting("ppo.gae_lambda")
    if isinstance(gae_lambda, (int, float)) and gae_lambda < 1 and run.setting("ppo.advantage") in (None, "gae"):
        yield set_to(run, "ppo.gae_lambda", 1.0, "too_low", why="as long as the critic explains so little")


def _warm_up(run: RunRecord) -> Iterator[Remedy]:
    if not run.setting("ppo.value_warmup_updates"):
        yield set_to(run, "ppo.value_warmup_updates", 5, why="to train the critic alone first")


def _clip_binding(run: RunRecord) -> Symptom | None:
    critic, clipped = _critic(run), read(run, "value/clip_fraction", at_least=MIN_TREND)
    if critic is None or clipped is None or clipped.late < BINDING:
        return None
    return Symptom(
        "serious" if critic.bias >= BIASED else "warning",
        f"{clipped.late:.0%} of the values are clipped ({clipped.late_span}); explained variance is "
        f"{fmt(critic.explained)}, and the mean value is {fmt(critic.bias)} standard deviations away from the mean "
        "return",
        (scale(run, "ppo.value_clip_range", 5.0),),
    )


def _scale_mismatch(run: RunRecord) -> Symptom | None:
    critic = _critic(run)
    if critic is None:
        return None
    if critic.values_std is not None and critic.values_std > TOO_WIDE:
        return Symptom(
            "serious",
            f"the values' standard deviation is {fmt(critic.values_std)} times that of the returns ({critic.span})",
            (
                set_to(run, "ppo.critic_init", "policy", why="to start with equal values"),
                scale(run, "ppo.value_coef", 3.0),
            ),
        )
    if run.setting("ppo.value_loss") == "hl_gauss":
        return support_symptom(run, critic.returns_std)
    is_far = critic.bias >= BIASED
    if run.setting("ppo.value_unit") != "score" or (SMALL <= critic.returns_std <= LARGE and not is_far):
        return None
    loss = read(run, "value/loss")
    mean, returns = read(run, "value/mean"), read(run, "value/returns_mean")
    seen = (
        f"the returns' standard deviation is {fmt(critic.returns_std)} ({critic.span}), and the value loss grows with "
        "its square" + (f": it is {fmt(loss.late)}" if loss else "")
    )
    if is_far and mean is not None and returns is not None:
        seen = (
            f"the mean value is {fmt(mean.late)} where the mean return is {fmt(returns.late)} ({critic.span}): the "
            "critic's steps are too small for scores of this size"
        )
    return Symptom(
        "serious" if critic.returns_std > LARGE or is_far else "warning",
        seen,
        (set_to(run, "ppo.value_unit", "returns_std", why="to make both independent of the reward's scale"),),
    )


def _constant_batch(run: RunRecord) -> Symptom | None:
    scores, scores_std = read(run, "reward/score_mean"), read(run, "reward/score_std")
    advantages, returns = read(run, "advantage/std"), read(run, "value/returns_mean")
    if not whitens_advantages(run) or scores is None or scores_std is None:
        return None
    if nearly_all_truncated(run):
        return None
    same_scores = scores_are_constant(scores, scores_std)
    same_advantages = (
        advantages is not None
        and returns is not None
        and advantages.late <= NEARLY_CONSTANT * max(abs(returns.late), _reward_spread(run, scores_std))
    )
    if not (same_scores or same_advantages):
        return None
    seen = [f"scores are {fmt(scores.late)} ± {fmt(scores_std.late)} ({scores_std.late_span})"] if same_scores else []
    seen += [f"advantages have a standard deviation of {fmt(advantages.late)} before whitening"] if advantages else []
    return Symptom(
        "serious",
        ", and ".join(seen),
        (set_to(run, "ppo.whiten_advantages", "false"),),
        "find out why the reward does not tell the responses apart",
    )


def _reward_spread(run: RunRecord, scores_std: Series) -> float:
    """Typical spread of the rewards, in the units of values and advantages: whitened rewards have a variance of 1."""
    return 1.0 if run.setting("ppo.whiten_rewards") else scores_std.early


WHITENING_CONSTANT_BATCH = Rule(
    "whitening_constant_batch",
    "All responses of an update score nearly the same, and whitening scales the tiny differences up to unit variance: "
    "the policy trains on rounding errors.",
    ("advantage/std", "reward/score_mean", "reward/score_std", "value/returns_mean", "response/eos_rate"),
    _constant_batch,
    Needs(
        ("reward/score_mean", "reward/score_std"),
        MIN_LEVEL,
        fits=whitens_advantages,
    ),
)

VALUE_SCALE_MISMATCH = Rule(
    "value_scale_mismatch",
    "The critic and the returns are on different scales: either the critic's errors swamp the advantages, or its "
    "gradient swamps the policy's.",
    (*CRITIC_METRICS, "value/loss", "value/outside_support"),
    _scale_mismatch,
    Needs(NEEDED, MIN_TREND, fits=has_critic),
)

VALUE_CLIP_BINDING = Rule(
    "value_clip_binding",
    "The value clip is narrower than the critic's errors and cuts off their gradient, so the values lag behind the "
    "returns.",
    ("value/clip_fraction", *CRITIC_METRICS),
    _clip_binding,
    Needs(
        ("value/clip_fraction", *NEEDED),
        MIN_TREND,
        fits=lambda run: has_critic(run) and (not run.config or run.setting("ppo.value_clip_range") is not None),
    ),
)

DEAD_CRITIC = Rule(
    "dead_critic",
    "The critic predicts hardly better than a constant, or worse. The advantages are then little more than the raw "
    "score, with all its noise, on every token.",
    CRITIC_METRICS,
    _dead,
    Needs(NEEDED, MIN_TREND, fits=has_critic),
)

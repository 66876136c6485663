"""The critic, and the advantages that come from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kedge.inspect.doctor.courses import TREND, course, figure
from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.remedies import change, scale
from kedge.inspect.doctor.responses import all_are_cut
from kedge.inspect.record import RunRecord

__all__ = ["DEAD_CRITIC", "VALUE_CLIP_BINDING", "VALUE_SCALE_MISMATCH", "WHITENING_CONSTANT_BATCH"]

OFF = 1.0
"""Distance of the values' mean from the returns', in standard deviations of the returns, of a critic that has not
learnt even their mean. The demo's is off by 0.6 after three updates, and by 0.1 at its end."""

HARM = -1.0
"""Explained variance of values that spread like the returns and have nothing to do with them. Small runs that came out
well have had down to −0.7."""

STILL = 0.01
"""Spread of the values, in that of the returns, of a head that says the same of every state."""

NOTHING_LEFT = 0.1
"""Spread of the scores, in what it was at first, at which there is nothing left to explain."""

LONG_ENOUGH = 50
"""Updates after which a critic that explains nothing is no longer young: runs of the demo's 16 end at about 0."""

BOUND = 0.5
"""Share of values that their clip holds back: most of the critic's gradient."""

TOO_WIDE = 3.0
"""Spread of the values, in that of the returns: with three times the spread the explained variance is −3 at best."""

LARGE, TINY = 5.0, 0.05
"""Standard deviation of the returns outside of which losses and clips in units of the score are out of proportion: the
squared error is 25 times as large, or 400 times as small, as the policy's losses."""

ALIKE = 1e-3
"""Spread that is none, in the size of what spreads. Whitening makes it 1, and rounding with it."""


LOOKED_AT = (
    "value/explained_variance",
    "value/mean",
    "value/returns_mean",
    "value/returns_std",
    "value/std",
    "reward/score_std",
)


@dataclass(frozen=True)
class _Critic:
    """The late figures of a critic that has something to explain."""

    explained: float
    bias: float
    spread: float | None
    returns_std: float
    updates: int
    when: str


def _look(run: RunRecord) -> _Critic | None:
    explained = course(run, "value/explained_variance", least=TREND)
    mean, wanted = course(run, "value/mean", least=TREND), course(run, "value/returns_mean", least=TREND)
    scale_ = course(run, "value/returns_std", least=TREND) or course(run, "reward/score_std", least=TREND)
    if explained is None or mean is None or wanted is None or scale_ is None or scale_.late <= 0:
        return None
    scores = course(run, "reward/score_std")
    if scores is not None and scores.late <= NOTHING_LEFT * scores.first:
        return None
    spread = course(run, "value/std", least=TREND)
    return _Critic(
        explained.late,
        abs(wanted.late - mean.late) / scale_.late,
        spread.late / scale_.late if spread else None,
        scale_.late,
        explained.updates[-1],
        explained.late_span,
    )


def _dead(run: RunRecord) -> Symptom | None:
    critic = _look(run)
    if critic is None or (critic.explained > 0.0 and critic.bias < OFF):
        return None
    still = critic.spread is not None and critic.spread < STILL
    grave = critic.bias >= OFF or critic.explained < HARM or still
    seen = f"explained variance is {figure(critic.explained)} ({critic.when})"
    if critic.bias >= OFF:
        seen += f", and the values' mean is {figure(critic.bias)} standard deviations of the returns away from theirs"
    if still:
        seen += "; the values hardly differ from each other"
    return Symptom(
        "serious" if grave else "warning" if critic.updates >= LONG_ENOUGH else "note", seen, tuple(_teach(run))
    )


def _teach(run: RunRecord) -> Iterator[Remedy]:
    yield scale(run, "ppo.value_coef", 3.0)
    if run.setting("ppo.critic") == "shared":
        yield scale(run, "ppo.value_head_rate", 3.0)
    if not run.setting("ppo.value_warmup_updates"):
        yield change("ppo.value_warmup_updates", 5, "updates that train the critic alone")


def _clip_binding(run: RunRecord) -> Symptom | None:
    critic, held = _look(run), course(run, "value/clip_fraction", least=TREND)
    if critic is None or held is None or held.late < BOUND:
        return None
    return Symptom(
        "serious" if critic.bias >= OFF else "warning",
        f"{held.late:.0%} of the values are held back by their clip ({held.late_span}); explained variance is "
        f"{figure(critic.explained)}, and the values' mean is {figure(critic.bias)} standard deviations off",
        (scale(run, "ppo.value_clip_range", 5.0),),
    )


def _scale_mismatch(run: RunRecord) -> Symptom | None:
    critic = _look(run)
    if critic is None:
        return None
    if critic.spread is not None and critic.spread > TOO_WIDE:
        return Symptom(
            "serious",
            f"the values spread {figure(critic.spread)} times as far as the returns that they are to predict "
            f"({critic.when})",
            (change("ppo.critic_init", "policy", "with a head that starts at 0"), scale(run, "ppo.value_coef", 3.0)),
        )
    if run.setting("ppo.value_unit") != "score" or TINY <= critic.returns_std <= LARGE:
        return None
    loss = course(run, "value/loss")
    return Symptom(
        "serious" if critic.returns_std > LARGE else "warning",
        f"returns spread by {figure(critic.returns_std)} ({critic.when}), and the value loss is in their square"
        + (f": {figure(loss.late)}" if loss else ""),
        (change("ppo.value_unit", "returns_std", "in which neither depends on the reward's scale"),),
    )


def _constant_batch(run: RunRecord) -> Symptom | None:
    scores, spread = course(run, "reward/score_mean"), course(run, "reward/score_std")
    advantages, returns = course(run, "advantage/std"), course(run, "value/returns_mean")
    if run.setting("ppo.whiten_advantages") is False or scores is None or spread is None or all_are_cut(run):
        return None
    alike = spread.late <= ALIKE * abs(scores.late) and spread.first <= ALIKE * abs(scores.first)
    flat = (
        advantages is not None
        and returns is not None
        and advantages.late <= ALIKE * max(abs(returns.late), spread.early)
    )
    if not (alike or flat):
        return None
    seen = (
        [f"scores spread by {figure(spread.late)} around {figure(scores.late)} ({spread.late_span})"] if alike else []
    )
    seen += [f"advantages spread by {figure(advantages.late)} before they are whitened"] if advantages else []
    return Symptom(
        "serious",
        ", and ".join(seen),
        (change("ppo.whiten_advantages", "false"),),
        "see why the reward does not tell responses apart",
    )


WHITENING_CONSTANT_BATCH = Rule(
    "whitening_constant_batch",
    "Hardly anything tells the responses of an update apart, and whitening blows it up to full size: the policy "
    "learns rounding errors as eagerly as it would learn a difference.",
    ("advantage/std", "reward/score_mean", "reward/score_std", "value/returns_mean", "response/eos_rate"),
    _constant_batch,
)

VALUE_SCALE_MISMATCH = Rule(
    "value_scale_mismatch",
    "Values and returns are of different sizes: the critic's errors swamp the advantages, or its gradient the "
    "policy's.",
    (*LOOKED_AT, "value/loss"),
    _scale_mismatch,
)

VALUE_CLIP_BINDING = Rule(
    "value_clip_binding",
    "The values may move by less than they are wrong, and their gradient stops there: the critic runs behind the "
    "returns.",
    ("value/clip_fraction", *LOOKED_AT),
    _clip_binding,
)

DEAD_CRITIC = Rule(
    "dead_critic",
    "The critic knows no more of a response than what all have in common, or not even that. Whitening takes out "
    "what is the same for all; what is left is the plain score, with all its noise, on every token.",
    LOOKED_AT,
    _dead,
)

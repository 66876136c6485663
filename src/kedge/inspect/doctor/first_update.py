"""The first update: known a minute after the start, and the earliest sign of a learning rate that is too high."""

from __future__ import annotations

from collections.abc import Iterator

from kedge.inspect.doctor.critic import HARMFUL
from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.needs import Needs
from kedge.inspect.doctor.remedies import scale, set_to
from kedge.inspect.doctor.steps import MANY_EPOCHS, STEPS_TOO_LARGE, clips_sequences, smaller_rate
from kedge.inspect.doctor.trends import MIN_LEVEL, Series, fmt, read, span
from kedge.inspect.record import RunRecord
from kedge.inspect.resolved import critic_of

__all__ = ["FIRST_UPDATE_TOO_LARGE", "NUM_FIRST"]

NUM_FIRST = 2
"""Updates that are examined: the first of the policy, and the first in which a trained critic is measured."""

CLIPPED, MOVED = 0.15, 0.05
"""Clip fraction, and KL in nats per token, of one update. N+ stays below 0.07 and 0.008."""

RATIO = 50.0
"""Largest ratio: a token has become 50 times as likely, or its probability was nearly 0, in one update."""

MOST = 0.5
"""Largest factor on the learning rate."""


def _first_update(run: RunRecord) -> Symptom | None:
    if STEPS_TOO_LARGE.check(run) is not None:
        return None  # which says the same of more updates
    seen, remedies = [*_policy(run)], []
    if seen:
        remedies += _smaller_policy_steps(run)
    if values := _values(run):
        seen.append(values)
        remedies.append(_smaller_value_steps(run))
    if not seen:
        return None
    isolated = len(run.series("policy/clip_fraction")[0]) >= MIN_LEVEL
    return Symptom("note" if isolated else "warning", "; ".join(seen), tuple(remedies))


def _policy(run: RunRecord) -> Iterator[str]:
    clipped, moved = _first(run, "policy/clip_fraction"), _first(run, "policy/approx_kl")
    ratio = _first(run, "policy/ratio_max")
    if clipped is None or moved is None:
        return
    far = ratio is not None and ratio.first > RATIO
    if (clipped.first > CLIPPED and not clips_sequences(run)) or moved.first > MOVED or far:
        yield (
            f"{span(clipped.updates[:1])} clips {clipped.first:.0%} of the tokens and moves the policy by "
            f"{fmt(moved.first)} nats per token" + (f", one token by a factor of {fmt(ratio.first)}" if ratio else "")
        )


def _smaller_policy_steps(run: RunRecord) -> Iterator[Remedy]:
    if (run.setting("ppo.num_epochs") or 0) > MANY_EPOCHS:
        yield set_to(run, "ppo.num_epochs", MANY_EPOCHS, "too_high")
    clipped, moved = _first(run, "policy/clip_fraction"), _first(run, "policy/approx_kl")
    yield smaller_rate(run, clipped=clipped.first if clipped else 0.0, moved=moved.first if moved else 0.0, most=MOST)


def _values(run: RunRecord) -> str:
    """What the first update did to the values; empty if they are still better than unrelated ones."""
    explained = read(run, "value/explained_variance", at_least=NUM_FIRST)
    if explained is None or explained.values[1] >= HARMFUL:
        return ""
    return (
        f"explained variance is {fmt(explained.values[1])} in {span(explained.updates[1:2])}, after the critic's first "
        "steps"
    )


def _smaller_value_steps(run: RunRecord) -> Remedy:
    shared = critic_of(run) == "shared" and (run.setting("ppo.value_head_rate") or 0) > 1
    return scale(run, "ppo.value_head_rate" if shared else "ppo.value_coef", 1 / 3)


def _first(run: RunRecord, name: str) -> Series | None:
    """A metric from the first update that trains the policy on."""
    return read(run, name, at_least=1, of_policy=True)


FIRST_UPDATE_TOO_LARGE = Rule(
    "first_update_too_large",
    "The first steps, at the full learning rate, move the policy or the critic further than one batch can justify. "
    "Later updates then repair what the first one broke, far from the reference.",
    ("policy/clip_fraction", "policy/approx_kl", "policy/ratio_max", "value/explained_variance"),
    _first_update,
    Needs(("policy/clip_fraction", "policy/approx_kl"), of_policy=True),
)

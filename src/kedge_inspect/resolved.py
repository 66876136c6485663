"""Resolves settings with an `auto` that depends on others, using only the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from kedge_base.estimators import NEED_GROUPS, UNWHITENED, may_need_critic
from kedge_inspect.record import RunRecord

KL_COSTS = ("reward/total", "reward/kl")
"""Metrics that are redundant if the rewards contain no KL: the score of the responses trained on, and 0."""


ADDS = "_critic"
"""End of the advantages in which a critic adds to a baseline, with a fitted weight."""

KINDS = {
    "detached": "shared",
    "readout": "shared",
    "frozen_attention": "separate",
    "frozen": "separate",
    "privileged": "separate",
}
"""Values of `ppo.critic` that are kinds of another one."""


def critic_of(run: RunRecord) -> str:
    """The kind of critic: `shared`, `separate` or `none`; empty if the run's configuration does not say."""
    critic = _name_of(run.setting("ppo.critic") or "")
    if critic != "auto":
        return KINDS.get(critic, critic)
    if "critic" in run.roles:
        return "separate"
    return "shared" if may_need_critic(_advantage_of(run)) else "none"


def privileged_of(run: RunRecord) -> str:
    """The critic's privileged information: columns, or a text with columns in braces; empty without it."""
    written = run.setting("ppo.critic")
    if _name_of(written) != "privileged":
        return ""
    columns = written["privileged"] if isinstance(written, Mapping) else ["answer"]
    return repr(columns) if isinstance(columns, str) else ", ".join(map(str, columns))


def baseline_of(run: RunRecord) -> str:
    """The advantage without a critic that the critic adds to; empty if it does not add to one."""
    advantage = _advantage_of(run)
    return advantage.removesuffix(ADDS) if advantage.endswith(ADDS) else ""


def _advantage_of(run: RunRecord) -> str:
    return _name_of(run.setting("ppo.advantage") or "gae")


def _name_of(written: object) -> str:
    """A value's name, without its parameter."""
    return "".join(cast("Mapping[str, object]", written)) if isinstance(written, Mapping) else str(written)


def num_readout_batches(run: RunRecord) -> int | None:
    """Number of batches that a read-out is fitted to; None for another critic."""
    written = run.setting("ppo.critic")
    return 8 if written == "readout" else run.setting("ppo.critic.readout")


def is_frozen(run: RunRecord) -> bool:
    """True if the critic is not trained, or was not up to the last update."""
    return run.setting("ppo.critic") == "frozen" and run.series("value/frozen")[1][-1:] != [0.0]


def is_detached(run: RunRecord) -> bool:
    """True if the value loss does not train the trunk that a value head reads."""
    return run.setting("ppo.critic") == "detached" or run.setting("ppo.value_gradient") == "head"


def compares_groups(run: RunRecord) -> bool:
    """True if the advantage compares the responses to a prompt."""
    return _advantage_of(run) in NEED_GROUPS


def charges_kl(run: RunRecord) -> bool:
    """True if the KL is subtracted from the rewards, or if the run's configuration does not say."""
    is_free = run.setting("ppo.kl_coef") == 0 and "ppo.kl_coef" not in (run.setting("schedules") or ())
    return not has_kl_in_loss(run) and not is_free


def has_kl_in_loss(run: RunRecord) -> bool:
    """True if the KL is a term of the loss, separate from the advantages, and not a part of the rewards."""
    return "loss" in (run.setting("ppo.kl_in") or ())  # the setting is a word, or {word: estimator}


def weighs_scores(run: RunRecord) -> bool:
    """True if β weighs the KL against the score, and not against advantages with an independent scale."""
    whitening = run.setting("ppo.whiten_advantages")
    advantage = run.setting("ppo.advantage")
    whitens = advantage not in UNWHITENED if whitening == "auto" else whitening
    divides = whitens or run.setting("ppo.whiten_rewards") or advantage == "grpo"
    return not (has_kl_in_loss(run) and divides)


def value_warmup_of(run: RunRecord) -> int:
    """The last update that trained only the critic; 0 for none.

    With `ppo.value_warmup_updates.until`, it is read from the metrics.
    """
    if run.setting("ppo.value_warmup_updates.until") is None:
        return int(run.setting("ppo.value_warmup_updates.at_most"))
    return max((update for update, alone in zip(*run.series("value/warmup"), strict=True) if alone), default=0)


def learns_from_teacher(run: RunRecord) -> bool:
    """True for a run without a reward, which learns only from the KL to another model."""
    is_scored = run.config.get("reward") or run.setting("environment.source") is not None
    return run.setting("ppo.reference") is not None and not is_scored

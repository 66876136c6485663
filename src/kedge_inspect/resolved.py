"""Settings of a run with an `auto` that depends on others, resolved from its folder alone."""

from __future__ import annotations

from kedge_inspect.record import RunRecord

CRITIC_FREE = ("to_go", "total", "rloo", "grpo", "dr_grpo", "reinforce++", "reinforce++_baseline", "remax", "opo")
"""Advantages that need no values."""

UNWHITENED = ("rloo", "grpo", "dr_grpo", "remax", "opo")
"""Advantages that `ppo.whiten_advantages=auto` leaves as they are."""

IN_GROUPS = ("rloo", "grpo", "dr_grpo", "reinforce++_baseline", "opo")
"""Advantages that compare the responses to a prompt with each other."""

KL_COSTS = ("reward/total", "reward/kl")
"""Metrics without information where the rewards contain no KL: the score itself, of the responses trained on, and 0."""


def critic_of(run: RunRecord) -> str:
    """The kind of critic: `shared`, `separate` or `none`; empty if the run's configuration does not say."""
    critic = str(run.setting("ppo.critic") or "")
    if critic != "auto":
        return {"detached": "shared", "frozen_attention": "separate"}.get(critic, critic)
    if "critic" in run.roles:
        return "separate"
    return "none" if run.setting("ppo.advantage") in CRITIC_FREE else "shared"


def is_detached(run: RunRecord) -> bool:
    """True if the value loss does not train the trunk that a value head reads."""
    return run.setting("ppo.critic") == "detached" or run.setting("ppo.value_gradient") == "head"


def compares_groups(run: RunRecord) -> bool:
    """True if the advantage compares the responses to a prompt."""
    return run.setting("ppo.advantage") in IN_GROUPS


def charges_kl(run: RunRecord) -> bool:
    """True if the KL is subtracted from the rewards, or if the run's configuration does not say."""
    is_free = run.setting("ppo.kl_coef") == 0 and "ppo.kl_coef" not in (run.setting("schedules") or ())
    return not has_kl_in_loss(run) and not is_free


def has_kl_in_loss(run: RunRecord) -> bool:
    """True if the KL is a term of the loss, beside the advantages, and not a part of the rewards."""
    return "loss" in (run.setting("ppo.kl_in") or ())  # a word, or {word: estimator}


def weighs_scores(run: RunRecord) -> bool:
    """True if β compares the KL with the score, and not with advantages whose size does not depend on the score's."""
    whitening = run.setting("ppo.whiten_advantages")
    advantage = run.setting("ppo.advantage")
    whitens = advantage not in UNWHITENED if whitening == "auto" else whitening
    divides = whitens or run.setting("ppo.whiten_rewards") or advantage == "grpo"
    return not (has_kl_in_loss(run) and divides)


def value_warmup_of(run: RunRecord) -> int:
    """The last update that trained the critic alone; 0 for none.

    With `ppo.value_warmup_updates.until` the metrics tell which it was.
    """
    if run.setting("ppo.value_warmup_updates.until") is None:
        return int(run.setting("ppo.value_warmup_updates.at_most"))
    return max((update for update, alone in zip(*run.series("value/warmup"), strict=True) if alone), default=0)


def learns_from_teacher(run: RunRecord) -> bool:
    """True for a run without a reward, that learns from the KL to another model alone."""
    is_scored = run.config.get("reward") or run.setting("environment.source") is not None
    return run.setting("ppo.reference") is not None and not is_scored

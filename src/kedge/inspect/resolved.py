"""Settings of a run with an `auto` that depends on others, resolved from its folder alone."""

from __future__ import annotations

from kedge.inspect.record import RunRecord

CRITIC_FREE = ("to_go", "total", "rloo", "grpo", "dr_grpo", "reinforce++", "reinforce++_baseline", "remax", "opo")
"""Advantages that need no values."""

KL_COSTS = ("reward/total", "reward/kl")
"""Metrics without information where the rewards contain no KL: the score itself, of the responses trained on, and 0."""


def critic_of(run: RunRecord) -> str:
    """The kind of critic: `shared`, `separate` or `none`; empty if the run's configuration does not say."""
    critic = str(run.setting("ppo.critic") or "")
    if critic != "auto":
        return critic
    if "critic" in run.roles:
        return "separate"
    return "none" if run.setting("ppo.advantage") in CRITIC_FREE else "shared"


def charges_kl(run: RunRecord) -> bool:
    """True if the KL is subtracted from the rewards, or if the run's configuration does not say."""
    is_free = run.setting("ppo.kl_coef") == 0 and "ppo.kl_coef" not in (run.setting("schedules") or ())
    return "loss" not in (run.setting("ppo.kl_in") or ()) and not is_free  # a word, or {word: estimator}


def value_warmup_of(run: RunRecord) -> int:
    """The last update that trained the critic alone; 0 for none.

    With `ppo.value_warmup_until` the metrics tell which it was.
    """
    if run.setting("ppo.value_warmup_until") is None:
        return int(run.setting("ppo.value_warmup_updates") or 0)
    return max((update for update, alone in zip(*run.series("value/warmup"), strict=True) if alone), default=0)


def learns_from_teacher(run: RunRecord) -> bool:
    """True for a run without a reward, that learns from the KL to another model alone."""
    is_scored = run.config.get("reward") or run.setting("environment.source") is not None
    return run.setting("ppo.reference") is not None and not is_scored

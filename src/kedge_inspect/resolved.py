"""Resolves settings with an `auto` that depends on others, using only the run's folder."""

from __future__ import annotations

from collections.abc import Mapping

from kedge_base.estimators import CRITICS, Estimator, estimator_of
from kedge_inspect.record import RunRecord

KL_COSTS = ("reward/total", "reward/kl")
"""Metrics that are redundant if the rewards contain no KL: the score of the responses trained on, and 0."""


def critic_of(run: RunRecord) -> str:
    """The kind of critic: `shared`, `separate` or `none`; empty if the run's configuration does not say."""
    critic = run.choice("ppo.critic")
    if critic != "auto":
        return CRITICS.get(critic, "")
    if "critic" in run.roles:
        return "separate"
    return "none" if estimator_facts(run).critic == "unused" else "shared"


def privileged_of(run: RunRecord) -> str:
    """The critic's privileged information: columns, or a text with columns in braces; empty without it."""
    if run.choice("ppo.critic") != "privileged":
        return ""
    written = run.setting("ppo.critic")
    columns = written["privileged"] if isinstance(written, Mapping) else ["answer"]
    return repr(columns) if isinstance(columns, str) else ", ".join(map(str, columns))


def estimator_facts(run: RunRecord) -> Estimator:
    """The properties of the run's advantage estimator."""
    return estimator_of(run.choice("ppo.advantage") or "gae")


def num_readout_batches(run: RunRecord) -> int | None:
    """Number of batches that a read-out is fitted to; None for another critic."""
    return (run.setting("ppo.critic.readout") or 8) if run.choice("ppo.critic") == "readout" else None


def is_frozen(run: RunRecord) -> bool:
    """True if the critic is not trained, or was not up to the last update."""
    return run.choice("ppo.critic") == "frozen" and run.series("value/frozen")[1][-1:] != [0.0]


def is_detached(run: RunRecord) -> bool:
    """True if the value loss does not train the trunk that a value head reads."""
    return run.choice("ppo.critic") == "detached" or run.setting("ppo.value_gradient") == "head"


def compares_groups(run: RunRecord) -> bool:
    """True if the advantage compares the responses to a prompt."""
    return estimator_facts(run).baseline == "group"


def charges_kl(run: RunRecord) -> bool:
    """True if the KL is subtracted from the rewards, or if the run's configuration does not say."""
    is_free = run.setting("ppo.kl_coef") == 0 and "ppo.kl_coef" not in (run.setting("schedules") or ())
    return not has_kl_in_loss(run) and not is_free


def has_kl_in_loss(run: RunRecord) -> bool:
    """True if the KL is a term of the loss, separate from the advantages, and not a part of the rewards."""
    return run.choice("ppo.kl_in") == "loss"


def weighs_scores(run: RunRecord) -> bool:
    """True if β weighs the KL against the score, and not against advantages with an independent scale."""
    whitening = run.setting("ppo.whiten_advantages")
    facts = estimator_facts(run)
    whitens = facts.whitens if whitening == "auto" else whitening
    divides = whitens or run.setting("ppo.whiten_rewards") or facts.divides
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

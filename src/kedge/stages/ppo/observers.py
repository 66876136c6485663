"""The observers of an update: measurements, logs, coefficients, best checkpoint, early end, warm-up, callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from torch import nn

from kedge.algorithm.experience import Rollout
from kedge.config import Config, word
from kedge.logs.incidents import add_incident, describe_row
from kedge.runs.run import Run
from kedge.runs.training import Callback, watched
from kedge.stages.ppo.log import Ended, Event, PpoLog
from kedge.stages.ppo.measurements import Measurements
from kedge.stages.ppo.roles import Roles
from kedge.stages.ppo.trainer import Trainer
from kedge.system.ranks import Ranks
from kedge.training.checkpoint.loop import CheckpointedLoop
from kedge.training.controllers import ValueWarmup
from kedge.training.guard import (
    MAX_K3,
    MAX_RATIO,
    Action,
    Guard,
    GuardOptions,
    Incident,
    SpikeDetector,
    find_bad_weight,
)

SPIKE_HISTORY = 40
"""Optimizer steps of the recent median that spikes are compared with: ten updates of four steps."""


def observers_of(
    trainer: Trainer,
    measurements: Measurements,
    log: PpoLog,
    loop: CheckpointedLoop,
    *,
    callback: Callback | None,
    on_update: Callable[[int, Roles], None],
) -> tuple[list[Callable[[Event], object]], list[Callable[[Ended], object]]]:
    """The observers of updates that were made, and of those that the guard dropped, in the order of their calls.

    Only options that are on add one. Publishing and measurements come first, because the row that the log writes has
    their metrics. The coefficients adapt before the fixed prompts are evaluated. The user's callbacks come last: they
    see a complete update, and may end the run.
    """
    config = trainer.run_settings.config
    ppo = config.ppo
    roles = trainer.roles
    say = log.progress.say
    observers: list[Callable[[Event], object]] = []
    if config.rollout.engine != "builtin":  # an engine in other processes gets the weights of the last update too
        observers.append(lambda event: event.metrics.update(trainer.publish(event.update)))
    observers += [
        measurements.after_update,
        log.after_update,
        partial(_adapt_coefficients, trainer),
        measurements.sample_fixed,
    ]
    loop.register("coefficients", trainer.coefficients)
    judging: list[Callable[[Ended], object]] = []
    if loop.best is not None:
        judging.append(partial(_note_best, trainer, loop))
    if ppo.max_kl is not None or ppo.eval_patience is not None:
        judging.append(EarlyEnd(ppo.eval_patience, ppo.max_kl, loop).after_update)
    observers += judging
    missing_eos = roles.missing_eos
    if missing_eos is not None and not missing_eos.is_known:  # a score that is set is the configuration's
        loop.register("missing EOS", missing_eos, optional=True)
        if loop.done == 0:
            observers.append(_automatic_score(say, subtracts=config.rollout.subtracts_missing_eos))
    if (warmup := trainer.warmup) is not None:
        if warmup.ends_by_result:  # its length is not known from the start
            loop.register("value warm-up", warmup, optional=True)
        observers.append(partial(_end_warmup, warmup, say))
    policy = roles.actor_critic.policy.causal
    watch = watched(callback, trainer.run, loop, ppo.num_updates, model=policy, tokenizer=roles.tokenizer)
    observers += [lambda event: watch(event.update, event.metrics), lambda event: on_update(event.update, roles)]
    return observers, [measurements.after_update, log.after_drop, measurements.sample_fixed, *judging]


def _note_best(trainer: Trainer, loop: CheckpointedLoop, event: Ended) -> None:
    """Note an update's metrics if it trained the policy: until the critic's warm-up ends, they are the start's."""
    if trainer.trains_policy:
        loop.observe(event.update, event.metrics)


def _adapt_coefficients(trainer: Trainer, event: Event) -> None:
    """Adapt the coefficients for the next update, if this one trained the policy."""
    if trainer.trains_policy and not event.result.refused:
        trainer.coefficients.adapt(event.metrics, num_responses=len(event.experience.scores))


def _automatic_score(say: Callable[[str], None], *, subtracts: bool) -> Callable[[Event], object]:
    """Prints once the score that `rollout.missing_eos_score=auto` has become."""
    is_said = False

    def observe(event: Event) -> None:
        nonlocal is_said
        if not is_said:
            score = event.metrics["reward/missing_eos_score"]
            effect = f"loses {-score:.4g}" if subtracts else f"scores {score:.4g}"
            say(f"A response without a stop token {effect} (rollout.missing_eos_score=auto).")
            is_said = True

    return observe


def _end_warmup(warmup: ValueWarmup, say: Callable[[str], None], event: Event) -> None:
    """End the critic's warm-up if the critic is good enough."""
    if line := warmup.observe(event.update, event.metrics):
        say(line)


class EarlyEnd:
    """Ends a run before its last update: the held-out metric has stopped improving, or the KL is too large.

    Args:
        patience: Evaluations without an improvement (`ppo.eval_patience`); None for any number.
        max_kl: Largest KL to the reference, nats per response (`ppo.max_kl`); None for no limit.
        loop: The run's loop, which asks it before every update, and keeps the best one by the held-out metric.
    """

    def __init__(self, patience: int | None, max_kl: float | None, loop: CheckpointedLoop) -> None:
        self._patience = patience
        self._max_kl = max_kl
        self._best = loop.best
        self._kl = 0.0
        loop.until = self.reason
        if max_kl is not None:
            loop.register("early end", self, optional=True)

    def after_update(self, event: Ended) -> None:
        """Record an update's KL."""
        self._kl = event.metrics.get("objective/kl", self._kl)

    def reason(self) -> str | None:
        """Why the run ends here; None if it continues."""
        best = self._best
        if self._max_kl is not None and self._kl > self._max_kl:
            return f"the KL to the reference is {self._kl:.3g} nats per response, above ppo.max_kl={self._max_kl:g}"
        if self._patience is not None and best is not None and best.num_since >= self._patience:
            return (
                f"{best.metric} has not improved in {best.num_since} evaluations (ppo.eval_patience); its best value "
                f"is {best.value:.4g}, after update {best.update}"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """The last KL."""
        return {"kl": self._kl}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._kl = state["kl"]


def new_guard(config: Config, run: Run, roles: Roles, loop: CheckpointedLoop, *, warn: Callable[[str], None]) -> Guard:
    """The configured guard of a run; resumed with it.

    Args:
        config: The configuration.
        run: The run.
        roles: Its models.
        loop: Rolls the weights back.
        warn: Prints a line to the user.
    """
    options = config.ppo
    modules: dict[str, nn.Module | None] = {
        "policy and critic": roles.actor_critic,
        "the reference": roles.reference,
        **{name: each.model for name, each in roles.reward.weighted_models.items()},
    }
    loaded = {name: module for name, module in modules.items() if module is not None}
    sigma = options.spike_sigma
    guard = Guard(
        GuardOptions(
            on_nonfinite=options.on_nonfinite,
            on_spike=cast("Action", word(options.on_spike) or "skip"),
            max_skips=options.max_skips,
            max_ratio=MAX_RATIO[run.precision],
            max_k3=MAX_K3[run.precision],
            strict=config.runtime.strict,
        ),
        spikes=None if sigma is None else SpikeDetector(sigma=sigma, history=SPIKE_HISTORY),
        record=lambda incident: add_incident(run.folder, _row(incident, roles)),
        warn=warn,
        roll_back=partial(loop.roll_back, on_rejected=warn),
        find_bad_weight=lambda: _find_bad_weight(loaded, run.ranks),
        before_step=loop.begin_changes,
    )
    loop.register("guard", guard)
    loop.saves_start = "rollback" in (options.on_nonfinite, word(options.on_spike))
    return guard


def _find_bad_weight(modules: Mapping[str, nn.Module], ranks: Ranks) -> str | None:
    """A description of a non-finite weight, the same on every rank."""
    found = find_bad_weight(modules)
    if not ranks.is_sharded or not ranks.largest(int(found is not None)):
        return found
    return found or "a weight on another rank is not finite"


def _row(incident: Incident, roles: Roles) -> dict[str, object]:
    """An incident as a row of `incidents.jsonl`, with the response concerned."""
    row: dict[str, object] = {
        "update": incident.update,
        "kind": incident.kind,
        "what": incident.what,
        "consequence": incident.consequence,
        "row": incident.row,
        "token": incident.token,
        "figures": incident.figures,
    }
    if incident.row is not None and (evidence := incident.evidence) is not None:
        row |= describe_row(evidence, incident.row, roles.tokenizer)
        if incident.token is not None:  # its place among the tokens listed, which are the actions
            rollout = evidence if isinstance(evidence, Rollout) else evidence.rollout
            row["token"] = int(rollout.action_mask[incident.row, : incident.token].sum())
    return row

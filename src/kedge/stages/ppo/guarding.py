"""Connects the guard to a PPO run: records incidents, rolls weights back, logs dropped updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import nn

from kedge.algorithm.experience import Rollout
from kedge.config import Config
from kedge.logs.incidents import add_incident, describe_row
from kedge.logs.metrics import MetricsLog
from kedge.runs.run import Run
from kedge.stages.ppo.roles import Roles
from kedge.system.ranks import Ranks
from kedge.training.checkpoint.resume import CheckpointedLoop
from kedge.training.guard.guard import MAX_K3, MAX_RATIO, Guard, GuardOptions, Incident, StepCheck
from kedge.training.guard.nonfinite import BadValue, find_bad_weight
from kedge.training.guard.spikes import SpikeDetector
from kedge.training.value_warmup import ValueWarmup

__all__ = ["guarded_update", "marking_changes", "new_guard"]


def new_guard(config: Config, run: Run, roles: Roles, loop: CheckpointedLoop, *, warn: Callable[[str], None]) -> Guard:
    """The configured guard of a run.

    Args:
        config: The configuration.
        run: The run.
        roles: Its models.
        loop: Rolls the weights back.
        warn: Prints a line to the user.
    """
    options, num_steps = config.ppo, config.ppo.num_epochs * config.ppo.num_minibatches
    num_steps *= config.ppo.num_critic_epochs
    sigma = options.spike_sigma
    modules: dict[str, nn.Module | None] = {
        "policy and critic": roles.actor_critic,
        "the reference": roles.reference,
        **{name: each.model for name, each in roles.reward.weighted_models.items()},
    }
    loaded = {name: module for name, module in modules.items() if module is not None}
    return Guard(
        GuardOptions(
            on_nonfinite=options.on_nonfinite,
            on_spike=options.on_spike,
            max_skips=options.max_skips,
            max_ratio=MAX_RATIO[run.precision],
            max_k3=MAX_K3[run.precision],
            strict=config.runtime.strict,
            num_steps=num_steps,
        ),
        spikes=None if sigma is None else SpikeDetector(sigma=sigma, history=options.spike_history),
        record=lambda incident: add_incident(run.folder, _row(incident, roles)),
        warn=warn,
        roll_back=partial(loop.roll_back, on_rejected=warn),
        find_bad_weight=lambda: _find_bad_weight(loaded, run.ranks),
    )


def marking_changes(guard: Guard, loop: CheckpointedLoop) -> StepCheck:
    """The guard's check of each step; one that it allows is the first change of the weights that the loop knows of."""

    def allows(step: int, figures: Mapping[str, float], search: Callable[[], BadValue]) -> bool:
        allowed = guard.allows(step, figures, search)
        if allowed:
            loop.begin_changes()
        return allowed

    return allows


def _find_bad_weight(modules: Mapping[str, nn.Module], ranks: Ranks) -> str | None:
    """A description of a non-finite weight, the same on every rank."""
    found = find_bad_weight(modules)
    if not ranks.is_sharded or not ranks.largest(int(found is not None)):
        return found
    return found or "a weight on another rank is not finite"


@contextmanager
def guarded_update(
    config: Config, update: int, warmup: ValueWarmup, guard: Guard, loop: CheckpointedLoop, log: MetricsLog
) -> Iterator[None]:
    """Context of one update; if the update is dropped, writes a row with only the guard's metrics.

    Raises:
        NumericsError: The run must stop.
    """
    if update == 1 and "rollback" in (config.ppo.on_nonfinite, config.ppo.on_spike):
        loop.save()  # the initial state, so that there is a checkpoint to roll back to
    if update == warmup.num_updates + 1:
        guard.forget_steps()  # the critic's alone; the policy's are larger
    with guard.watching(update):
        yield
    if guard.dropped:
        log.write(update, {**guard.metrics(), "policy/optimizer_steps": 0})


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

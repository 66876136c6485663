"""How a PPO run is guarded: what is kept of an incident, where the weights go back to, what a dropped update leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from kedge.config import Config
from kedge.errors import NumericsError
from kedge.logs.incidents import add_incident, describe_row
from kedge.logs.metrics import MetricsLog
from kedge.pipelines.ppo.roles import Roles
from kedge.rewards.model import ModelReward
from kedge.runs.run import Run
from kedge.training.checkpoint.resume import CHECKPOINTS, Keeper
from kedge.training.checkpoint.state import restore_module, restore_optimizer
from kedge.training.checkpoint.store import newest_valid
from kedge.training.guard.guard import MAX_RATIO, Guard, Incident, Rules
from kedge.training.guard.nonfinite import find_dead_weight
from kedge.training.guard.spikes import SpikeWatch

__all__ = ["ACTOR_CRITIC", "guarded_update", "new_guard"]

ACTOR_CRITIC = "actor_critic"
"""What checkpoints call policy and critic."""


def new_guard(config: Config, run: Run, roles: Roles, keeper: Keeper, *, warn: Callable[[str], None]) -> Guard:
    """The guard of a run, as it is configured.

    Args:
        config: The configuration.
        run: What is running.
        roles: Who takes part.
        keeper: The run's keeper.
        warn: Tells a user a line.
    """
    ppo = config.ppo
    modules: dict[str, nn.Module | None] = {
        "policy and critic": roles.actor_critic,
        "the reference": roles.reference,
        **{source.name: source.model for source in roles.reward.sources if isinstance(source, ModelReward)},
    }

    def record(incident: Incident) -> None:
        add_incident(run.folder, _row(incident, roles))

    def roll_back() -> None:
        keeper.weights_change()
        found = newest_valid(run.folder / CHECKPOINTS, on_rejected=warn)
        if found is None:
            raise NumericsError(f"{run.folder / CHECKPOINTS} has no checkpoint that the weights could go back to")
        restore_module(roles.actor_critic, found.tensors(ACTOR_CRITIC))
        restore_optimizer(roles.optimizer, found.tensors("optimizer"), found.state["optimizer"])

    return Guard(
        Rules(
            on_nonfinite=ppo.guard.on_nonfinite,
            on_spike=ppo.guard.on_spike,
            max_skips=ppo.guard.max_skips,
            max_ratio=MAX_RATIO[run.precision],
            strict=config.runtime.strict,
            num_steps=ppo.loop.num_epochs * ppo.loop.num_minibatches,
        ),
        spikes=None
        if ppo.guard.spike_sigma is None
        else SpikeWatch(sigma=ppo.guard.spike_sigma, history=ppo.guard.spike_history),
        record=record,
        warn=warn,
        roll_back=roll_back,
        find_dead_weight=lambda: find_dead_weight({name: each for name, each in modules.items() if each is not None}),
    )


@contextmanager
def guarded_update(config: Config, update: int, guard: Guard, keeper: Keeper, log: MetricsLog) -> Iterator[None]:
    """One update; where it is dropped before its end, its row of metrics says that alone.

    Raises:
        NumericsError: The run must not go on.
    """
    if update == 1 and "rollback" in (config.ppo.guard.on_nonfinite, config.ppo.guard.on_spike):
        keeper.save()  # the start, so that there is something to go back to
    with guard.watching(update):
        yield
    if guard.dropped:
        log.write(update, {**guard.metrics(), "policy/optimiser_steps": 0})


def _row(incident: Incident, roles: Roles) -> dict[str, object]:
    """An incident as `incidents.jsonl` has it, with the response to blame."""
    row: dict[str, object] = {
        "update": incident.update,
        "kind": incident.kind,
        "what": incident.what,
        "consequence": incident.consequence,
        "row": incident.row,
        "token": incident.token,
        "figures": incident.figures,
    }
    if incident.row is not None and incident.evidence is not None:
        row |= describe_row(incident.evidence, incident.row, roles.tokenizer)
    return row

"""Creates the guard of a run: with its settings, its log of incidents, and its search for bad weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kedge.algorithm.experience import Rollout
from kedge.logs.incidents import add_incident, describe_row
from kedge.runs.run import Run
from kedge.stages.ppo.roles import Roles
from kedge.training.checkpoint.loop import CheckpointedLoop
from kedge.training.guard import (
    MAX_K3,
    Guard,
    Incident,
    SpikeDetector,
    find_bad_weight,
)
from kedge_base.run_folder.record_format import MAX_RATIO

SPIKE_HISTORY = 40
"""Number of recent optimizer steps whose median spikes are compared with: ten updates of four steps."""


def new_guard(run: Run, roles: Roles, loop: CheckpointedLoop, *, warn: Callable[[str], None]) -> Guard:
    """Create the configured guard of a run; it is resumed with the run."""
    options = run.config.ppo
    loaded = {
        "policy and critic": roles.actor_critic,
        **({} if roles.reference is None else {"the reference": roles.reference}),
        **{name: each.model for name, each in roles.reward.weighted_models.items()},
    }

    def find_weight() -> str | None:
        found = find_bad_weight(loaded)
        if run.ranks.is_sharded and run.ranks.largest(int(found is not None)):  # the same result on every rank
            return found or "a weight on another rank is not finite"
        return found

    sigma = options.spike_sigma
    on_spike = "skip" if options.on_spike is None else options.on_spike.name
    guard = Guard(
        on_nonfinite=options.on_nonfinite,
        on_spike=on_spike,
        max_skips=options.max_skips,
        max_ratio=MAX_RATIO[run.precision],
        max_k3=MAX_K3[run.precision],
        strict=run.config.runtime.strict,
        spikes=None if sigma is None else SpikeDetector(sigma=sigma, history=SPIKE_HISTORY),
        record=lambda incident: add_incident(run.folder, _row(incident, roles)),
        warn=warn,
        roll_back=partial(loop.roll_back, on_rejected=warn),
        find_bad_weight=find_weight,
        begin_changes=loop.begin_changes,
    )
    loop.register("guard", guard)
    loop.saves_start = "rollback" in (options.on_nonfinite, on_spike)
    return guard


def _row(incident: Incident, roles: Roles) -> dict[str, object]:
    """Format an incident as a row of `incidents.jsonl`, with the affected response."""
    row = {name: value for name, value in vars(incident).items() if name != "evidence"}
    if incident.row is not None and (evidence := incident.evidence) is not None:
        row |= describe_row(evidence, incident.row, roles.tokenizer)
        if incident.token is not None:  # its index among the tokens of the row, which lists only actions
            rollout = evidence if isinstance(evidence, Rollout) else evidence.rollout
            row["token"] = int(rollout.action_mask[incident.row, : incident.token].sum())
    return row

"""The result of a PPO run, which may have been interrupted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kedge.config.schedules import config_at
from kedge.models import save_policy
from kedge.models.origin import public_name
from kedge.ranks.sharding import gathered_state
from kedge.runs.calls import UpdatesResult
from kedge.runs.ending import leave_stage_report
from kedge.runs.run import Run
from kedge.stages.ppo.roles import Roles
from kedge.training.checkpoint.model_folder import CheckpointModel
from kedge_base.registry import service
from kedge_base.run_folder.record_format import METRICS_FILE, read_metrics

HELD_OUT = {
    "eval/score": "score",
    "eval/win_rate": "win rate against the start",
    "eval/total": "score less KL cost",
    "eval/kl": "KL, nats per response",
    "eval/length": "length, tokens",
    "eval/eos_rate": "share that ends with a stop token",
}
"""The evaluation figures that the model card shows."""


@dataclass(frozen=True, repr=False)
class PpoResult(UpdatesResult):
    """The result of a PPO run.

    Attributes:
        folder: The run's folder.
        model: The policy's folder, in Hugging Face format.
        metrics: The rows of `metrics.jsonl`.
    """


def save_result(run: Run, roles: Roles, *, interrupted: bool | None, model: bool = True) -> None:
    """Save the policy and write the report, also for an interrupted run.

    Args:
        run: The run.
        roles: Its models.
        interrupted: The run did not finish; None if it is still running.
        model: Save the policy; False if memory ran out, possibly in the middle of a step: the checkpoint has a
            consistent one.
    """
    run.sync()
    metrics = read_metrics(run.folder) if (run.folder / METRICS_FILE).exists() else []
    is_sharded = run.ranks.is_sharded
    if model and not (is_sharded and interrupted):  # a rank may be missing, and the checkpoint has the policy
        weights = gathered_state(roles.actor_critic.policy.causal, run.ranks) if is_sharded else None
        if run.ranks.is_first:
            _save(run, roles, metrics, weights)
    leave_stage_report(run.config, run.folder, interrupted=interrupted)


def _save(run: Run, roles: Roles, metrics: Sequence[dict[str, Any]], weights: dict[str, Tensor] | None = None) -> None:
    facts = {**_facts(roles, len(metrics)), "responses": sum(row.get("group/sampled", 0) for row in metrics)}
    last = next((row for row in reversed(metrics) if "objective/kl" in row), {})  # not in the row of a dropped update
    if scored := [row for row in metrics if "reward/score_mean" in row]:
        facts["mean score, first and last update"] = (
            f"{scored[0]['reward/score_mean']:.3f}, {scored[-1]['reward/score_mean']:.3f}"
        )
    if last:
        source = run.config.ppo.reference
        reference = "the start" if source is None else public_name(source)
        facts[f"KL to {reference}, last update"] = f"{last['objective/kl']:.2f} nats per response"
    measured = next((row for row in reversed(metrics) if any(name.startswith("eval/") for name in row)), {})
    facts |= {f"held-out {label}": measured[name] for name, label in HELD_OUT.items() if measured.get(name) is not None}
    _save_policy(run, roles, run.folder / "model", facts, len(metrics), weights, ended=True)


def _facts(roles: Roles, num_updates: int) -> dict[str, object]:
    return {"updates": num_updates, **({} if roles.reward.is_empty else {"reward": roles.reward.name})}


def checkpoint_model(run: Run, roles: Roles) -> CheckpointModel:
    """How every checkpoint saves the policy."""

    def save(folder: Path, update: int, weights: dict[str, Tensor] | None) -> Path:
        return _save_policy(run, roles, folder, _facts(roles, update), update, weights)

    return CheckpointModel(roles.actor_critic.policy.causal, save)


def _save_policy(
    run: Run,
    roles: Roles,
    folder: Path,
    facts: Mapping[str, object],
    num_updates: int,
    weights: dict[str, Tensor] | None,
    *,
    ended: bool = False,
) -> Path:
    prompts = [prompt.text for prompt in roles.prompts.train]
    return save_policy(
        roles.actor_critic.policy,
        roles.tokenizer,
        folder,
        card=service("card")(run, facts, tokenizer=roles.tokenizer, prompts=prompts, ended=ended),
        stop_tokens=roles.stop_tokens.ids,
        temperature=config_at(run.config, max(1, num_updates)).rollout.temperature,
        weights=weights,
        final=ended,
    )

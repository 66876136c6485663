"""The result of a control run, also of an interrupted one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kedge.config import Config
from kedge.gym.saving import ControlPolicy, load_control_policy, save_control_policy
from kedge.logs.metrics import METRICS_FILE, read_metrics
from kedge.runs.ending import leave_stage_report
from kedge.runs.run import Run
from kedge.runs.shown_result import shows_its_run
from kedge.runs.stage_card import recipe_of
from kedge.stages.control.parts import Parts
from kedge.system.texts import markdown
from kedge.training.checkpoint.model_folder import CheckpointModel

__all__ = ["ControlResult", "checkpoint_model", "save_result"]

CARD = """---
library_name: kedge
tags: [reinforcement-learning, {algorithm}, gymnasium]
---
# A policy for {environment}

Trained with {name} by kedge (the package kedge-rl). Act with it:

    import kedge

    policy = kedge.load_control_policy("path/to/this/folder"{network})
    policy.begin_episode()
    action = policy.act(observation)

{results}

Settings that differ from kedge's defaults:

```yaml
{recipe}```
"""


@shows_its_run
@dataclass(frozen=True, repr=False)
class ControlResult:
    """The result of a control run.

    Attributes:
        folder: The run's folder.
        metrics: The rows of `metrics.jsonl`.
    """

    folder: Path
    metrics: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> ControlResult:
        """The result of a run in a folder."""
        return cls(folder, read_metrics(folder))

    @property
    def model(self) -> Path:
        """The policy's folder; `kedge.load_control_policy` reads it."""
        return self.folder / "model"

    def policy(self, *, network: Callable[..., Any] | None = None) -> ControlPolicy:
        """The trained policy, to act with.

        Args:
            network: The function that made its layers, if it has a network of its own.
        """
        return load_control_policy(self.model, network=network)


def save_result(config: Config, run: Run, parts: Parts, *, interrupted: bool, model: bool = True) -> None:
    """Save the policy and write the report, also for an interrupted run.

    Args:
        config: The run's configuration.
        run: The run.
        parts: Its parts.
        interrupted: The run did not reach its end.
        model: Save the policy; False where memory ran out, perhaps between two steps: the checkpoint has a whole one.
    """
    run.sync()
    metrics = read_metrics(run.folder) if (run.folder / METRICS_FILE).exists() else []
    if model:
        _save(config, parts, run.folder / "model", metrics)
    leave_stage_report(config, run.folder, interrupted=interrupted)


def checkpoint_model(config: Config, parts: Parts) -> CheckpointModel:
    """The policy as it is saved in every checkpoint."""

    def save(folder: Path, update: int, weights: dict[str, Tensor] | None) -> Path:
        return _save(config, parts, folder, ())

    return CheckpointModel(parts.policy, save)


def _save(config: Config, parts: Parts, folder: Path, metrics: Sequence[Mapping[str, Any]]) -> Path:
    is_trpo, use = config.control.algorithm == "trpo", config.control
    card = CARD.format(
        algorithm=config.control.algorithm,
        environment=markdown(parts.environments.name),
        name="TRPO" if is_trpo else "PPO",
        network=", network=make" if parts.policy.has_custom_network else "",
        results=_results(metrics),
        recipe=recipe_of(config),
    )
    environment = {"env": parts.environments.name, "options": dict(use.env_options)}
    return save_control_policy(folder, parts.policy, parts.normalization, environment=environment, card=card)


def _results(metrics: Sequence[Mapping[str, Any]]) -> str:
    """The last known returns, in words."""
    known = [row for row in metrics if "episode/return_mean" in row]
    if not known:
        return "No episode has ended yet."
    last = known[-1]
    lines = [
        f"Mean return of the last 100 episodes of training, after {last['control/steps']:,} steps: "
        f"{last['episode/return_mean']:.2f}."
    ]
    if evaluated := [row for row in metrics if "eval/return_mean" in row]:
        lines.append(f"Mean return of the most likely actions: {evaluated[-1]['eval/return_mean']:.2f}.")
    return "\n".join(lines)

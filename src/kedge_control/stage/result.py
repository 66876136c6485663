"""The result of a control run, which may have been interrupted: the policy's folder, its card, and an animation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kedge.runs.calls import UpdatesResult
from kedge.runs.ending import leave_stage_report
from kedge.runs.recipe import recipe_of
from kedge.runs.run import Run
from kedge.training.checkpoint.model_folder import CheckpointModel
from kedge.training.runtime import stream_seed
from kedge_base.errors import ConfigError, EnvError
from kedge_base.run_folder.output import VIDEO_FILE
from kedge_base.run_folder.record_format import METRICS_FILE, read_metrics
from kedge_base.texts import markdown
from kedge_control.recording import record_episode
from kedge_control.saving import ControlPolicy, load_control_policy, save_control_policy
from kedge_control.stage.parts import Parts

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

RECORDED_STEPS = 400


@dataclass(frozen=True, repr=False)
class ControlResult(UpdatesResult):
    """The result of a control run.

    Attributes:
        folder: The run's folder.
        model: The policy's folder; `kedge.load_control_policy` reads it.
        metrics: The rows of `metrics.jsonl`.
    """

    def policy(self, *, network: Callable[..., Any] | None = None) -> ControlPolicy:
        """The trained policy, to act with.

        Args:
            network: The function that made its layers, if it is a custom network.
        """
        return load_control_policy(self.model, network=network)


def save_result(run: Run, parts: Parts, *, interrupted: bool, model: bool = True) -> None:
    """Save the policy and write the report, also for an interrupted run.

    Args:
        run: The run.
        parts: Its parts.
        interrupted: The run did not reach its end.
        model: Save the policy; False where memory ran out, perhaps between two steps: the checkpoint has a whole one.
    """
    run.sync()
    metrics = read_metrics(run.folder) if (run.folder / METRICS_FILE).exists() else []
    if model:
        _save(parts, run.folder / "model", metrics)
    leave_stage_report(parts.config, run.folder, interrupted=interrupted)


def checkpoint_model(parts: Parts) -> CheckpointModel:
    """How every checkpoint saves the policy."""

    def save(folder: Path, update: int, weights: dict[str, Tensor] | None) -> Path:
        return _save(parts, folder, ())

    return CheckpointModel(parts.policy, save)


def _save(parts: Parts, folder: Path, metrics: Sequence[Mapping[str, Any]]) -> Path:
    name = "TRPO" if parts.settings.is_trpo else "PPO"
    card = CARD.format(
        algorithm=name.lower(),
        environment=markdown(parts.environments.name),
        name=name,
        network=", network=make" if parts.policy.has_custom_network else "",
        results=_results(metrics),
        recipe=recipe_of(parts.config),
    )
    environment = {"env": parts.environments.name, "options": dict(parts.spec.settings)}
    return save_control_policy(folder, parts.policy, parts.normalization, environment=environment, card=card)


def _results(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Describe the last known returns."""
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


def check_video(parts: Parts) -> None:
    """Render one image, so that a missing renderer is detected before training.

    Raises:
        ConfigError: The environment cannot be rendered on this machine.
    """
    try:
        record_video(parts, None, max_steps=1)
    except EnvError as error:
        raise ConfigError(f"control.video=true: {error}; leave it out, or install a renderer") from error


def record_video(parts: Parts, folder: Path | None, *, max_steps: int = RECORDED_STEPS) -> None:
    """Record an episode of the policy in the run's folder.

    Raises:
        EnvError: The environment can no longer be rendered.
        OutputError: The file cannot be written.
    """
    seed = stream_seed(parts.config.runtime.seed, "video") % 2**31
    policy = ControlPolicy(parts.policy, parts.normalization)
    path = None if folder is None else folder / VIDEO_FILE
    record_episode(parts.spec, policy, path, seed=seed, max_steps=max_steps)

"""PPO in environments of Gymnasium, as a stage."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

from kedge.errors import ConfigError, install_line
from kedge.stages.stage import Flag, Stage

if TYPE_CHECKING:
    from kedge.config import Config

__all__ = ["CONTROL"]


def _check(config: Config) -> None:
    """Check what only a run in an environment needs, or cannot have."""
    try:
        importlib.metadata.version("gymnasium")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"kedge control needs Gymnasium: {install_line('control')}") from error
    runtime = config.runtime
    refused = {
        "push.repo": config.push.repo,
        "schedules": config.schedules,
        "adapter.kind": None if config.adapter.kind == "none" else config.adapter.kind,
        "runtime.precision": runtime.precision if runtime.precision == "bf16" else None,
        "runtime.parallel": runtime.parallel if runtime.parallel == "shard" else None,
        "runtime.frozen_dtype": runtime.frozen_dtype if runtime.frozen_dtype not in ("auto", "fp32") else None,
        "runtime.offload_frozen": runtime.offload_frozen,
        "runtime.offload_optimizer": runtime.offload_optimizer,
        "runtime.activation_checkpointing": runtime.activation_checkpointing,
    }
    for name, value in refused.items():
        if value:
            raise ConfigError(f"{name} is for language models and has no effect on kedge control; leave it out")


def _remedies(config: Config, phase: str) -> list[tuple[str, Any]]:
    """Settings that need less memory in a phase."""
    found: list[tuple[str, Any]] = []
    if phase in ("experience", "the update") and config.runtime.micro_batch_tokens != "auto":
        found.append(("runtime.micro_batch_tokens", "auto"))
    if phase not in ("loading", "saving"):
        found.append(("control.num_steps", max(1, config.control.num_steps // 2)))
    if config.control.num_envs > 1:
        found.append(("control.num_envs", config.control.num_envs // 2))
    return found


def _stretched(config: Config) -> list[str]:
    """The schedules that a longer run stretches."""
    loop, anneals = config.control, config.control.anneal_clip_range
    decays = loop.schedule != "constant"
    return [
        *([f"the {loop.schedule} decay of the learning rate"] if decays else []),
        *(["that of the clip range"] if decays and anneals else []),
        *(["what control.compile=auto decides by"] if loop.compile == "auto" else []),
    ]


CONTROL = Stage(
    "control",
    help="Train a policy with PPO (or TRPO) in an environment of Gymnasium.",
    title="Training",
    run="kedge.stages.control:run_control",
    sections=(("control",), ("runtime", "checkpoint")),
    needs={"control.env": "--env"},
    flags=(
        Flag(
            ("--env",),
            "control.env",
            "ENV",
            "Environment: an id of Gymnasium, module:Id, or a function (file.py:name).",
        ),
    ),
    inputs=("control.env", "control.network"),
    is_swept=True,
    unit="update",
    length="control.total_steps",
    best_metrics={"eval/return_mean": True, "episode/return_mean": True},
    evaluations="control.eval_every",
    best_by_default=lambda config: "eval/return_mean",
    check=_check,
    stretched=_stretched,
    remedies=_remedies,
    schedule="kedge.config.explain.schedule:control_schedule_in_words",
    adds_sections={"control": "kedge.config.schema.control.section:ControlConfig"},
    presets="kedge.config.presets.control:CONTROL",
    python={
        "control": "kedge.control_api:control",
        "load_control_policy": "kedge.control_api:load_control_policy",
    },
)

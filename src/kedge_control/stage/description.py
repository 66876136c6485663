"""Control as a stage; see `kedge_base.stage` for the meaning of each attribute."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

from kedge_base.errors import ConfigError, install_line
from kedge_base.stage import Flag, Stage, value_of

if TYPE_CHECKING:
    from kedge.config import Config
    from kedge_control.stage.settings import ControlConfig

ENVIRONMENT = Flag(
    ("--env",), "control.env", "ENV", "Environment: an id of Gymnasium, module:Id, or a function (file.py:name)."
)


def _settings(config: Config) -> ControlConfig:
    return value_of(config, "control")


def _check(config: Config) -> None:
    """Check the requirements of a run in an environment, and refuse settings of language models."""
    try:
        importlib.metadata.version("gymnasium")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"kedge control needs Gymnasium: {install_line('control')}") from error
    runtime = config.runtime
    refused = {
        "push.repo": config.push.repo,
        "schedules": config.schedules,
        "adapter.kind": config.adapter.kind != "none",
        "optimization": config.optimization != type(config.optimization)(),
        "runtime.precision": runtime.precision == "bf16",
        "runtime.parallel": runtime.parallel == "shard",
        "runtime.frozen_dtype": runtime.frozen_dtype not in ("auto", "fp32"),
        "runtime.offload": runtime.offload,
        "runtime.activation_checkpointing": runtime.activation_checkpointing,
    }
    for name, is_set in refused.items():
        if is_set:
            raise ConfigError(f"{name} is for language models and has no effect on kedge control; leave it out")


def _remedies(config: Config, phase: str) -> list[tuple[str, Any]]:
    """Settings that need less memory in a phase, without those whose steps are not whole minibatches."""
    found: list[tuple[str, Any]] = []
    if phase in ("experience", "the update") and config.runtime.micro_batch_tokens != "auto":
        found.append(("runtime.micro_batch_tokens", "auto"))
    use = _settings(config)
    sizes = [("num_steps", use.num_envs)] if phase not in ("loading", "saving") else []
    for name, others in [*sizes, ("num_envs", use.num_steps)]:
        half = getattr(use, name) // 2
        if half and half * others % use.num_minibatches == 0:
            found.append((f"control.{name}", half))
    return found


def _stretched(config: Config) -> list[str]:
    """The schedules that a longer run stretches."""
    use = _settings(config)
    decays = use.schedule != "constant"
    return [
        *(["the linear decay of the learning rate"] if decays else []),
        *(["that of the clip range"] if decays and use.anneal_clip_range else []),
        *(["the decision of control.compile=auto"] if use.compile == "auto" else []),
    ]


CONTROL = Stage(
    "control",
    help="Train a policy with PPO (or TRPO) in an environment of Gymnasium.",
    title="Training",
    run="kedge_control.stage.run:run_control",
    sections=(("control",), ("runtime", "checkpoint")),
    needs={"control.env": "--env"},
    flags=(ENVIRONMENT,),
    arguments={"env": "control.env", "network": "control.network"},
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
    adds_sections={"control": "kedge_control.stage.settings:ControlConfig"},
    looks="kedge_control.stage.look:LOOK",
    presets="kedge_control.stage.presets:CONTROL",
    python={
        "control": "kedge_control.stage.api:control",
        "load_control_policy": "kedge_control.saving:load_control_policy",
    },
)

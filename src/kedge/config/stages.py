"""The stages: which sections each reads, and what it cannot start without."""

from dataclasses import dataclass
from pathlib import Path

from kedge.config.schema.root import Config
from kedge.errors import ConfigError
from kedge.output import check_output, first_free_folder

__all__ = ["STAGES", "Stage", "check_stage", "choose_output", "find_stage"]


@dataclass(frozen=True)
class Stage:
    """One subcommand that runs something.

    Attributes:
        name: as on the command line.
        sections: whose fields may be given by their bare names, the foremost group first.
        needs: fields that must be set, with the flag that sets each.
    """

    name: str
    sections: tuple[tuple[str, ...], ...]
    needs: dict[str, str]


_MODEL = {"model": "--model"}
_PROMPTS = {"data.prompts": "--prompts"}
_SHARED = ("data", "runtime")
_SCORED = (*_SHARED, "reward_functions")

STAGES = {
    stage.name: stage
    for stage in (
        Stage("sft", (("sft",), _SHARED), {**_MODEL, "data.demonstrations": "--data"}),
        Stage("reward", (("reward_model",), _SHARED), {**_MODEL, "data.comparisons": "--data"}),
        Stage(
            "ppo",
            (("ppo", "rollout", "runtime"), ("data", "reward_functions")),
            {**_MODEL, **_PROMPTS, "reward": "--reward"},
        ),
        Stage(
            "rlhf",
            (("rlhf", "ppo", "rollout", "sft", "reward_model"), _SCORED),
            {**_MODEL, "data.demonstrations": "--demonstrations", "data.comparisons": "--comparisons", **_PROMPTS},
        ),
        Stage("generate", (("generate",), _SCORED), {**_MODEL, **_PROMPTS}),
        Stage("evaluate", (("evaluate",), ("generate",), _SCORED), {**_MODEL, **_PROMPTS, "evaluate.judge": "--judge"}),
    )
}


def find_stage(name: str) -> Stage:
    """The stage of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in STAGES:
        raise ConfigError(f"stage {name!r} does not exist; there are {', '.join(STAGES)}")
    return STAGES[name]


def check_stage(config: Config, stage: str) -> None:
    """Find what a stage lacks before anything is loaded.

    Raises:
        ConfigError: names the first field that is missing, and the flag that sets it.
    """
    for name, flag in find_stage(stage).needs.items():
        if not _value(config, name) and not (stage == "reward" and name == "model" and config.reward_model.base):
            raise ConfigError(f"kedge {stage} needs {name}: give {flag}, or set it in the configuration")
    if stage in ("ppo", "rlhf") and config.ppo.ptx_coef > 0 and not config.data.pretraining:
        raise ConfigError(f"ppo.ptx_coef={config.ppo.ptx_coef:g} mixes in texts, and data.pretraining names none")
    if stage == "rlhf" and config.rlhf.num_rounds > 1 and config.rlhf.labeller is None:
        raise ConfigError(f"rlhf.num_rounds={config.rlhf.num_rounds} needs rlhf.labeller, which compares new responses")


def choose_output(out: str | Path | None, stage: str) -> Path:
    """The run's folder: the one that was asked for, or the first of runs/STAGE, runs/STAGE-2, … that is free.

    Raises:
        OutputError: the one that was asked for holds something, or the folder cannot be made.
    """
    return check_output(first_free_folder(Path("runs") / stage) if out is None else out)


def _value(config: Config, dotted: str) -> object:
    section, _, field = dotted.partition(".")
    value = getattr(config, section)
    return getattr(value, field) if field else value

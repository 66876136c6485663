"""`kedge plan`: estimates the memory and time of a stage on one machine."""

import shlex
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kedge.cli.options import ConfigFile, PresetName, weighted_rewards
from kedge.config import initial_critic, load_config, preset_conflicts
from kedge_base.command import Command
from kedge_base.errors import ConfigError
from kedge_base.stage import find_stage, stages

PLANNED = ("sft", "reward", "critic", "ppo", "rlhf")
"""The stages that can be planned."""

Data = Annotated[list[str] | None, typer.Option(metavar="DATA", help="As of the stage's own command.")]


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this package."""
    app.command(cls=Command)(plan)


def plan(
    stage: Annotated[str, typer.Argument(metavar="STAGE", help=f"Stage to plan: {', '.join(PLANNED)}.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[FIELD=VALUE]...", help="Fields to set, as of the stage's command.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Policy; only its config.json is read.")] = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    prompts: Data = None,
    reward: Data = None,
    demonstrations: Data = None,
    comparisons: Data = None,
    critic: Annotated[str | None, typer.Option(metavar="MODEL", help="A trained critic, as of kedge ppo.")] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="h100, h200, a100, a100-40, 4090, m3-64, or a memory, gpu:80GiB or cpu:24GiB; by default this "
            "machine.",
        ),
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(metavar="PRICE", min=0, help="Of the device, for the run's cost.")
    ] = None,
) -> None:
    """Estimate a stage's memory and time on one machine, before anything is loaded."""
    flags = {
        "model": model,
        "data.prompts": prompts,
        "data.demonstrations": demonstrations,
        "data.comparisons": comparisons,
        "reward": weighted_rewards(reward),
        **initial_critic(critic),
    }
    if stage not in PLANNED:
        known = "cannot be planned" if stage in stages() else "is no stage"
        raise ConfigError(f"{stage!r} {known}; kedge plan takes {', '.join(PLANNED)}, and then FIELD=VALUE")
    resolved = load_config(config, overrides or (), flags, preset, stage=stage)
    if line := preset_conflicts(resolved, stage):
        typer.echo(line, err=True)
    if find_stage(stage).starting_model(resolved) is None:
        raise ConfigError(f"kedge plan {stage} needs model: pass --model, or set it in the configuration")
    from kedge.runs.names import check_names
    from kedge_plan.plan import plan_machine

    check_names(resolved, stage)
    command = _command(sys.argv[1:])
    typer.echo(plan_machine(resolved, stage, device_name=device, price_per_hour=price_per_hour, command=command))


def _command(words: Sequence[str]) -> str:
    """The command of the run, from that of its plan: without `plan` and the options that only a plan has."""
    own = ("--device", "--price-per-hour")
    pairs = zip(["", *words], words, strict=False)
    kept = [word for before, word in pairs if before not in own and word.split("=")[0] not in (*own, "plan")]
    return shlex.join(["kedge", *kept])

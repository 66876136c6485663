"""`kedge plan`: estimates the memory and time of a stage on one machine."""

import shlex
import sys
from collections.abc import Callable, Sequence
from inspect import Signature
from typing import Annotated, Any

import typer

from kedge.cli.options import parameter
from kedge.cli.stages import add_group, common_parameters, flags_of, settings_parameters
from kedge.config import load_config, preset_conflicts
from kedge_base.command import StageGroup, name_first
from kedge_base.errors import ConfigError
from kedge_base.stage import Stage, stages

PLANNED = ("sft", "reward", "critic", "ppo", "rlhf")
"""The stages that can be planned."""

OPTIONS = (
    parameter(
        "device",
        Annotated[
            str | None,
            typer.Option(
                metavar="NAME",
                help="h100, h200, a100, a100-40, 4090, m3-64, or a memory, gpu:80GiB or cpu:24GiB; by default this "
                "machine.",
            ),
        ],
    ),
    parameter(
        "price_per_hour",
        Annotated[float | None, typer.Option(metavar="PRICE", min=0, help="Of the device, for the run's cost.")],
    ),
)
"""The options that only a plan has."""


def add_commands(app: typer.Typer) -> None:
    """Add the command of this package."""
    about = "Estimate a stage's memory and time on one machine, before anything is loaded."
    planned = [stages()[name] for name in PLANNED]
    told = ((stage, f"Plan `kedge {stage.name}`, whose options it takes.", _plan_of(stage)) for stage in planned)
    add_group(app, StageGroup, "plan", about, told)


def _plan_of(stage: Stage) -> Callable[..., None]:
    def plan(**given: Any) -> None:
        resolved = load_config(
            given["config"], given["overrides"] or (), flags_of(stage, given), given["preset"], stage=stage.name
        )
        if line := preset_conflicts(resolved, stage.name):
            typer.echo(line, err=True)
        if stage.starting_model(resolved) is None:
            raise ConfigError(f"kedge plan {stage.name} needs model: pass --model, or set it in the configuration")
        from kedge.runs.names import check_names
        from kedge_plan.plan import plan_machine

        check_names(resolved, stage.name)
        command = _command(name_first(sys.argv[2:], [stage.name]))
        device, price = given["device"], given["price_per_hour"]
        said = plan_machine(resolved, stage.name, device_name=device, price_per_hour=price, command=command)
        typer.echo(said)

    parameters = [*settings_parameters(stage), *common_parameters(stage), *OPTIONS]
    plan.__signature__ = Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return plan


def _command(words: Sequence[str]) -> str:
    """The command of the run, from that of its plan: without the options that only a plan has."""
    own = ("--device", "--price-per-hour")
    pairs = zip(["", *words], words, strict=False)
    kept = [word for before, word in pairs if before not in own and word.split("=")[0] not in own]
    return shlex.join(["kedge", *kept])

"""`kedge sweep`: runs a stage with many settings and seeds."""

from collections.abc import Callable, Mapping
from inspect import Signature
from typing import Annotated, Any

import typer

from kedge.cli.options import parameter, settings_of
from kedge.cli.stages import add_group, settings_parameters
from kedge.config import Config, check_stage, full_name, load_config
from kedge_base.command import RunGroup
from kedge_base.errors import ConfigError
from kedge_base.run_folder.output import check_creatable
from kedge_base.stage import Stage, stages

OPTIONS = (
    parameter(
        "seeds",
        Annotated[
            str | None,
            typer.Option(
                metavar="N|LIST", help="Number of seeds, or seeds: 3, or 0,7,42; by default that of runtime.seed."
            ),
        ],
    ),
    parameter(
        "random",
        Annotated[
            int | None,
            typer.Option(min=1, metavar="N", help="Draw N settings, from lists and from ranges LOW..HIGH."),
        ],
    ),
    parameter(
        "jobs",
        Annotated[int | None, typer.Option(min=1, help="Runs at a time; by default one per core, or one on a GPU.")],
    ),
    parameter("metric", Annotated[str | None, typer.Option(help="Metric to compare the runs by.")]),
    parameter(
        "goal",
        Annotated[str | None, typer.Option(metavar="max|min", help="Look for the highest or the lowest value.")],
    ),
)
"""The options that only a sweep has."""


def add_sweep(app: typer.Typer) -> None:
    """Add the command."""
    about = "Run a stage with several values per field (FIELD=A,B,C) and several seeds, and compare the results."
    swept = [stage for stage in stages().values() if stage.is_swept]
    told = ((stage, f"Sweep `kedge {stage.name}`, whose options it takes.", _sweep_of(stage)) for stage in swept)
    add_group(app, RunGroup, "sweep", about, told)


def _sweep_of(stage: Stage) -> Callable[..., None]:
    def sweep(**given: Any) -> None:
        if given["goal"] not in (None, "max", "min"):
            raise ConfigError(f"--goal must be max or min; it is {given['goal']}")
        from kedge_lab.sweep import RANGE, plan_trials, run_sweep, split_override

        split = [(override, *split_override(override)) for override in given["overrides"] or ()]
        swept = {field: values for _, field, values in split if len(values) > 1 or RANGE.fullmatch(values[0])}
        fixed = [override for override, field, _ in split if field not in swept]
        flags = settings_of(stage.flags, given)

        def resolve(values: Mapping[str, Any]) -> Config:
            settings = [f"{field}={value}" for field, value in values.items()]
            resolved = load_config(given["config"], [*fixed, *settings], flags, given["preset"], stage=stage.name)
            check_stage(resolved, stage.name)
            return resolved

        folder = check_creatable(f"runs/sweep-{stage.name}" if given["out"] is None else given["out"])
        trials = plan_trials(swept, _seeds(given["seeds"]), resolve, num_random=given["random"])
        set_once = [full_name(field, stage.name) for _, field, _ in split]
        set_once += [field for field, value in flags.items() if value is not None]
        for field in swept:
            if set_once.count(full_name(field, stage.name)) > 1:
                raise ConfigError(f"{field} is swept, and is set once more, by a flag or as a field; keep one")
        result = run_sweep(
            trials, stage.name, folder, num_processes=given["jobs"], metric=given["metric"], goal=given["goal"]
        )
        raise typer.Exit(1 if result.failed else 0)

    parameters = [*settings_parameters(stage), *OPTIONS]
    sweep.__signature__ = Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return sweep


def _seeds(text: str | None) -> list[int] | None:
    """The seeds of `3` (0, 1, 2) or of `0,7,42`; None if none are given."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or (len(parts) == 1 and int(parts[0]) < 1):
        raise ConfigError(f"--seeds must be a number of seeds or a list of them (3, or 0,7,42); it is {text}")
    return list(range(int(parts[0]))) if len(parts) == 1 else [int(part) for part in parts]

"""`kedge sweep`: runs a stage with many settings and seeds."""

from collections.abc import Mapping
from dataclasses import replace
from inspect import Signature, signature
from typing import Annotated, Any

import typer

from kedge.cli.options import ConfigFile, Out, Overrides, PresetName, parameters_of, settings_of
from kedge.config import Config, check_stage, full_name, load_config
from kedge_base.errors import ConfigError
from kedge_base.run_folder.output import check_creatable
from kedge_base.stage import stages

SWEPT = {stage.name: stage for stage in stages().values() if stage.is_swept}
*_FIRST, _LAST = SWEPT
LISTED = f"{', '.join(_FIRST)} or {_LAST}"

FLAGS = [
    replace(flag, names=tuple(name for name in flag.names if name != "--data"))  # two stages differ in its use
    for flag in {
        flag.field: flag for stage in SWEPT.values() for flag in stage.flags if flag.field in stage.needs
    }.values()
]


def sweep(
    *,
    stage: Annotated[str, typer.Argument(metavar="STAGE", help=f"{LISTED}.")],
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    out: Out = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="N|LIST", help="Number of seeds, or seeds: 3, or 0,7,42; by default that of runtime.seed."
        ),
    ] = None,
    random: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Draw N settings, from lists and from ranges LOW..HIGH.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; by default one per core, or one on a GPU.")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="Metric to compare the runs by.")] = None,
    goal: Annotated[
        str | None, typer.Option(metavar="max|min", help="Look for the highest or the lowest value.")
    ] = None,
    **given: Any,
) -> None:
    """Run a stage with several values per field (FIELD=A,B,C) and several seeds, and compare the results."""
    if stage not in SWEPT:
        raise ConfigError(f"kedge sweep runs {', '.join(SWEPT)}, not {stage}")
    if goal not in (None, "max", "min"):
        raise ConfigError(f"--goal must be max or min; it is {goal}")
    from kedge_lab.sweep import plan_trials, run_sweep, split_override

    split = [(override, *split_override(override)) for override in overrides or ()]
    swept = {field: values for _, field, values in split if len(values) > 1 or ".." in values[0]}
    fixed = [override for override, field, _ in split if field not in swept]
    flags = settings_of(FLAGS, given)

    def resolve(values: Mapping[str, Any]) -> Config:
        settings = [f"{field}={value}" for field, value in values.items()]
        resolved = load_config(config, [*fixed, *settings], flags, preset, stage=stage)
        check_stage(resolved, stage)
        return resolved

    folder = check_creatable(f"runs/sweep-{stage}" if out is None else out)
    trials = plan_trials(swept, _seeds(seeds), resolve, num_random=random)
    set_once = [full_name(field, stage) for _, field, _ in split]
    set_once += [field for field, value in flags.items() if value is not None]
    for field in swept:
        if set_once.count(full_name(field, stage)) > 1:
            raise ConfigError(f"{field} is swept, and is set once more, by a flag or as a field; keep one")
    result = run_sweep(trials, stage, folder, num_processes=jobs, metric=metric, goal=goal)
    raise typer.Exit(1 if result.failed else 0)


*OWN, _ = signature(sweep).parameters.values()
BEFORE_OUT = 4
"""Parameters that precede the stages' flags, which replace the last one, `given`, as in the help of stages."""
sweep.__signature__ = Signature(  # pyright: ignore[reportFunctionMemberAccess]
    [*OWN[:BEFORE_OUT], *parameters_of(FLAGS), *OWN[BEFORE_OUT:]]
)


def _seeds(text: str | None) -> list[int] | None:
    """The seeds of `3` (0, 1, 2) or of `0,7,42`; None if none are given."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or (len(parts) == 1 and int(parts[0]) < 1):
        raise ConfigError(f"--seeds must be a number of seeds or a list of them (3, or 0,7,42); it is {text}")
    return list(range(int(parts[0]))) if len(parts) == 1 else [int(part) for part in parts]

"""The commands that train, sample and evaluate: one per stage, built from its description."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

from kedge.cli.command import RunStage, StageCommand
from kedge.cli.options import (
    Anyway,
    Changes,
    ConfigFile,
    Out,
    Overrides,
    Push,
    ResumeFrom,
    Seed,
    Strict,
    announced,
    literal_prompts,
    parameter,
    parameters_of,
    preset_option,
    settings_of,
)
from kedge.config import CHANGED_FIRST, Config, check_stage, load_config, presets_of, with_values
from kedge_base.command import Group
from kedge_base.errors import ConfigError
from kedge_base.run_folder.output import CONFIG_FILE, FINISHED_FILE, check_output, is_run
from kedge_base.run_folder.record_format import read_json_object
from kedge_base.stage import Stage, imported, stages
from kedge_base.texts import IN_MEMORY, printable


def _command_of(stage: Stage) -> Callable[..., None]:
    """Make the function of a stage's command; typer builds the options from its signature."""

    def run(**given: Any) -> None:
        texts: dict[str, Any] = {}
        for flag in stage.flags:
            if flag.takes_text and (prompts := literal_prompts(given[flag.parameter])):
                texts[flag.parameter] = prompts
                given[flag.parameter] = IN_MEMORY
        flags = flags_of(stage, given)
        resume = given.get("resume")
        config = resolve(stage.name, given["config"], given["overrides"], flags, given["preset"], resume)
        arguments: dict[str, Any] = {name: announced(each) for name, each in texts.items()}
        if stage.resumes:
            arguments["resume"] = resume_from(resume, given["allow_changes"], stage.name)
            from kedge.runs.resuming import finished_run

            if resume is not None and (folder := finished_run(config)):
                imported(stage.run)(config, **arguments)  # only rejects changed settings and data
                ended = read_json_object(folder / FINISHED_FILE).get("ended", "")
                limit = next((name for name in stage.bounds if name in ended), stage.length)
                extend = f" To extend it, raise {limit}." if limit else ""
                typer.echo(f"{printable(str(folder))} has finished: there is nothing to resume.{extend}")
                return
        if stage.has_plan:
            from kedge.runs.names import check_names

            if resume is None or not is_run(Path(str(config.out))):  # resuming checks the inputs
                check_names(config, stage.name)
            arguments["planned"] = stage.find_plan()(config, stage.name, anyway=given["anyway"])
        imported(stage.run)(config, **arguments)

    run.__signature__ = Signature(_parameters(stage))  # pyright: ignore[reportFunctionMemberAccess]
    return run


COMMON = {"out": "out", "seed": "runtime.seed", "push": "push.repo", "strict": "runtime.strict"}
"""The parameters that all stages share, or all that train a language model, and their fields."""


def flags_of(stage: Stage, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a stage's own flags and the common ones set, by dotted name; see `settings_of`."""
    return settings_of(stage.flags, given) | {field: given[name] for name, field in COMMON.items() if name in given}


def settings_parameters(stage: Stage) -> list[Parameter]:
    """Make the parameters of a stage's settings, from FIELD=VALUE to the folder of the run."""
    return [
        parameter("overrides", Overrides),
        parameter("config", ConfigFile),
        parameter("preset", Annotated[list[str] | None, preset_option(presets_of(stage.name))]),
        *parameters_of(stage.flags),
        parameter("out", Out),
    ]


def common_parameters(stage: Stage) -> list[Parameter]:
    """Make the parameters that all stages share, or all that train a language model."""
    trains_language = stage.makes_model and stage.starts_from
    return [
        parameter("seed", Seed),
        *([parameter("push", Push), parameter("strict", Strict)] if trains_language else []),
    ]


def _parameters(stage: Stage) -> list[Parameter]:
    return [
        *settings_parameters(stage),
        *common_parameters(stage),
        *([parameter("resume", ResumeFrom), parameter("allow_changes", Changes)] if stage.resumes else []),
        *([parameter("anyway", Anyway, False)] if stage.has_plan else []),
    ]


def add_stages(app: typer.Typer) -> None:
    """Add the commands of all stages."""
    for stage in stages().values():
        app.command(stage.name, cls=RunStage, help=stage.help, epilog=_epilog(stage))(_command_of(stage))


def add_group(
    app: typer.Typer,
    cls: type[Group],
    name: str,
    about: str,
    commands: Iterable[tuple[Stage, str, Callable[..., None]]],
) -> None:
    """Add a group with a command per stage, which takes the options of the stage's own.

    Args:
        app: The command line.
        cls: The class of the group.
        name: The group's name.
        about: Its help.
        commands: The stages, with the help and the function of each command.
    """
    group = typer.Typer(cls=cls, no_args_is_help=True, help=about, subcommand_metavar="STAGE [ARGS]...")
    for stage, said, function in commands:
        group.command(stage.name, cls=StageCommand, help=said, epilog=_epilog(stage))(function)
    app.add_typer(group, name=name)


def _epilog(stage: Stage) -> str:
    """List the sections that a stage reads and, if it trains with PPO, the most commonly changed fields."""
    first = f"Fields that are changed first: {', '.join(CHANGED_FIRST)}. " if "ppo" in stage.trains else ""
    sections = [name for group in (*stage.sections, stage.dotted) for name in group]
    return f"{first}All fields of a section: kedge config explain SECTION, for {', '.join(sections)}."


def resolve(
    stage: str,
    file: Path | None,
    overrides: list[str] | None,
    flags: dict[str, Any],
    preset: list[str] | None,
    resume: str | None = None,
) -> Config:
    """Resolve and check a stage's configuration, with its output folder: a free one, or that of the run to resume."""
    if resume not in (None, "auto"):
        folder = Path(os.path.expanduser(resume))
        if not is_run(folder):
            raise ConfigError(f"--resume: {resume} is not the folder of a run: it has no {CONFIG_FILE}")
        outs = [text for name, _, text in (each.partition("=") for each in overrides or ()) if name.strip() == "out"]
        for out in filter(None, [flags.get("out"), *outs]):
            if os.path.realpath(os.path.expanduser(out)) != os.path.realpath(folder):
                raise ConfigError(f"--resume {resume} continues the run in its folder, not in {out}; leave out --out")
        file = file or folder / CONFIG_FILE
        flags = {**flags, "out": resume}
    config = load_config(file, overrides or (), flags, preset, stage=stage)
    if resume is not None:
        from kedge.runs.resuming import check_same_stage, in_place

        if config.out is None:
            config = with_values(config, {"out": str(Path("runs") / stage)})
        folder = Path(os.path.expanduser(str(config.out)))
        check_same_stage(folder, stage)
        if is_run(folder):
            config = in_place(config, folder)
    check_stage(config, stage)
    if config.out is not None and (resume is None or not is_run(Path(config.out))):
        check_output(config.out)
    return config


def resume_from(resume: str | None, allow_changes: list[str] | None, stage: str) -> Any:
    """Return how to resume; None for a new run."""
    if resume is None:
        if allow_changes:
            raise ConfigError("--allow-changes needs --resume")
        return None
    from kedge.runs.run import Resume, full_change

    return Resume(tuple(full_change(name, stage, f"--allow-changes {name}") for name in allow_changes or ()))

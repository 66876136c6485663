"""The commands that train, sample and evaluate: one per stage, made from its description."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

from kedge.cli.command import Command
from kedge.cli.options import (
    Anyway,
    Changes,
    ConfigFile,
    DryRun,
    Out,
    Overrides,
    Push,
    ResumeFrom,
    Seed,
    Strict,
    parameter,
    parameters_of,
    preset_option,
    settings_of,
)
from kedge.cli.resolving import resolve, resume_from, time_dry_run
from kedge.cli.values import IN_MEMORY, announced, literal_prompts
from kedge.config import presets_of
from kedge.runs.claim import claim_free_folder, claims
from kedge.stages.demo.recipe import DURATION
from kedge.stages.stage import Stage, imported, stages
from kedge.system.output import check_output

__all__ = ["app"]

app = typer.Typer()


def _command_of(stage: Stage) -> Callable[..., None]:
    """The function of a stage's command; its signature is what typer makes options of."""

    def run(**given: Any) -> None:
        texts: dict[str, Any] = {}
        for flag in (flag for flag in stage.flags if flag.takes_text):
            texts[flag.parameter] = literal_prompts(given[flag.parameter])
            given[flag.parameter] = IN_MEMORY if texts[flag.parameter] else given[flag.parameter]
        flags = settings_of(stage.flags, given)
        flags |= {field: given[name] for name, field in COMMON.items() if name in given}
        resume = given.get("resume")
        config = resolve(stage.name, given["config"], given["overrides"], flags, given["preset"], resume)
        if given.get("dry_run"):
            return time_dry_run(config, stage.name, resume)
        arguments: dict[str, Any] = {name: announced(each) for name, each in texts.items()}
        if stage.resumes:
            arguments["resume"] = resume_from(config, stage, resume, given["allow_changes"])
        if stage.plan:
            arguments["planned"] = imported(stage.plan)(config, stage.name, anyway=given["anyway"])
        imported(stage.run)(config, **arguments)

    run.__signature__ = Signature(_parameters(stage))  # pyright: ignore[reportFunctionMemberAccess]
    return run


COMMON = {"out": "out", "seed": "runtime.seed", "push": "push.repo", "strict": "runtime.strict"}
"""The parameters that every stage has, or every one that trains a language model, and their fields."""


def _parameters(stage: Stage) -> list[Parameter]:
    trains_language = stage.makes_model and bool(stage.starts_from)
    return [
        parameter("overrides", Overrides),
        parameter("config", ConfigFile),
        parameter("preset", Annotated[list[str] | None, preset_option(presets_of(stage.name))]),
        *parameters_of(stage.flags),
        parameter("out", Out),
        parameter("seed", Seed),
        *([parameter("push", Push), parameter("strict", Strict)] if trains_language else []),
        *([parameter("resume", ResumeFrom), parameter("allow_changes", Changes)] if stage.resumes else []),
        *([parameter("dry_run", DryRun, False), parameter("anyway", Anyway, False)] if stage.plan else []),
    ]


for _stage in stages().values():
    app.command(_stage.name, cls=Command, help=_stage.help)(_command_of(_stage))


@app.command(
    cls=Command,
    help=f"Train a tiny summarizer from scratch with SFT, reward model and PPO, and evaluate it: {DURATION}.",
)
def demo(out: Out = None, seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0) -> None:
    """Run the demo."""
    with claims():
        folder = claim_free_folder(Path("runs") / "demo") if out is None else check_output(out)
        from kedge.stages.demo.main import run_demo

        run_demo(folder, seed)

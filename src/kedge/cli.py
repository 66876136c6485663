"""The `kedge` command: parse, call a pipeline, print. Pipelines are imported when they run, so that help is instant."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kedge.config import (
    PRESETS,
    Config,
    check_stage,
    choose_output,
    describe_presets,
    explain,
    load_config,
    resolved_yaml,
    schedule_in_words,
    with_values,
)
from kedge.errors import ConfigError, KedgeError
from kedge.output import CONFIG_FILE, is_run
from kedge.version import __version__

__all__ = ["app", "main"]


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
config_app = typer.Typer(no_args_is_help=True, help="Show, check and explain the configuration.")
app.add_typer(config_app, name="config")

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="FIELD=VALUE", help="Fields to set, e.g. ppo.clip_range=0.1")
]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Configuration, in YAML.")]
PresetName = Annotated[str | None, typer.Option("--preset", metavar="NAME", help=f"A recipe: {', '.join(PRESETS)}.")]
Model = Annotated[str | None, typer.Option(metavar="MODEL", help="Folder or hub id of the model to start from.")]
Demonstrations = Annotated[
    list[str] | None, typer.Option(metavar="DATA", help="Demonstrations: .jsonl file, folder or hub id. Repeatable.")
]
Comparisons = Annotated[
    list[str] | None, typer.Option(metavar="DATA", help="Comparisons: .jsonl file, folder or hub id. Repeatable.")
]
DemonstrationData = Annotated[
    list[str] | None, typer.Option("--data", metavar="DATA", help="Demonstrations: .jsonl, folder or id. Repeatable.")
]
ComparisonData = Annotated[
    list[str] | None, typer.Option("--data", metavar="DATA", help="Comparisons: .jsonl, folder or id. Repeatable.")
]
Prompts = Annotated[
    list[str] | None, typer.Option(metavar="DATA", help="Prompts: .jsonl file, folder or hub id. Repeatable.")
]
Reward = Annotated[
    list[str] | None,
    typer.Option(
        metavar="REWARD", help="Reward model (folder, id) or function (file.py:name, module:name). Repeatable."
    ),
]
Out = Annotated[str | None, typer.Option(metavar="DIR", help="New folder for the run; runs/STAGE by default.")]
Seed = Annotated[int | None, typer.Option(help="Seeds every random stream.")]
Strict = Annotated[
    bool | None, typer.Option("--strict", help="Stop where the run would only warn that its numbers are in doubt.")
]
ResumeFrom = Annotated[
    str | None,
    typer.Option(
        "--resume", metavar="DIR|auto", help="Go on with this run; auto: with the one in --out, or begin it there."
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--allow-changes", metavar="FIELD", help="What may differ from the run that is resumed. Repeatable."),
]


@app.command()
def sft(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    model: Model = None,
    data: DemonstrationData = None,
    out: Out = None,
    seed: Seed = None,
    strict: Strict = None,
    resume: ResumeFrom = None,
    allow_changes: Changes = None,
) -> None:
    """Fine-tune a language model on demonstrations."""
    flags = {"model": model, "data.demonstrations": data, "out": out, "runtime.seed": seed, "runtime.strict": strict}
    resolved = _resolve("sft", config, overrides, flags, preset, resume)
    from kedge.pipelines.sft import run_sft

    run_sft(resolved, resume=_resume(resolved, resume, allow_changes))


@app.command()
def reward(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    model: Model = None,
    data: ComparisonData = None,
    demonstrations: Demonstrations = None,
    out: Out = None,
    seed: Seed = None,
    strict: Strict = None,
    resume: ResumeFrom = None,
    allow_changes: Changes = None,
) -> None:
    """Train a reward model on comparisons; its scores average 0 on the demonstrations, if there are any."""
    flags = {
        "model": model,
        "data.comparisons": data,
        "data.demonstrations": demonstrations,
        "out": out,
        "runtime.seed": seed,
        "runtime.strict": strict,
    }
    resolved = _resolve("reward", config, overrides, flags, preset, resume)
    from kedge.pipelines.reward import run_reward

    run_reward(resolved, resume=_resume(resolved, resume, allow_changes))


@app.command()
def ppo(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    model: Model = None,
    prompts: Prompts = None,
    reward: Reward = None,
    out: Out = None,
    seed: Seed = None,
    strict: Strict = None,
    resume: ResumeFrom = None,
    allow_changes: Changes = None,
) -> None:
    """Train a policy with PPO against a reward model, a function, or several."""
    flags = {
        "model": model,
        "data.prompts": prompts,
        "reward": reward,
        "out": out,
        "runtime.seed": seed,
        "runtime.strict": strict,
    }
    resolved = _resolve("ppo", config, overrides, flags, preset, resume)
    from kedge.pipelines.ppo import run_ppo

    run_ppo(resolved, resume=_resume(resolved, resume, allow_changes))


@app.command()
def rlhf(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    model: Model = None,
    demonstrations: Demonstrations = None,
    comparisons: Comparisons = None,
    prompts: Prompts = None,
    reward: Reward = None,
    out: Out = None,
    seed: Seed = None,
    strict: Strict = None,
    resume: ResumeFrom = None,
    allow_changes: Changes = None,
) -> None:
    """Run SFT, reward model and PPO in a chain, once or in rounds; rewards are added to the reward model's."""
    flags = {
        "model": model,
        "data.demonstrations": demonstrations,
        "data.comparisons": comparisons,
        "data.prompts": prompts,
        "reward": reward,
        "out": out,
        "runtime.seed": seed,
        "runtime.strict": strict,
    }
    resolved = _resolve("rlhf", config, overrides, flags, preset, resume)
    from kedge.pipelines.rlhf import run_rlhf

    run_rlhf(resolved, resume=_resume(resolved, resume, allow_changes))


@app.command()
def generate(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    model: Model = None,
    prompts: Prompts = None,
    reward: Reward = None,
    out: Out = None,
    seed: Seed = None,
) -> None:
    """Write a model's responses to prompts, with their scores where a reward is given."""
    flags = {"model": model, "data.prompts": prompts, "reward": reward, "out": out, "runtime.seed": seed}
    resolved = _resolve("generate", config, overrides, flags, preset)
    from kedge.pipelines.generate import run_generate

    run_generate(resolved)


@app.command()
def evaluate(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    model: Model = None,
    prompts: Prompts = None,
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The other policy; the data's references by default.")
    ] = None,
    judge: Annotated[
        str | None, typer.Option(metavar="JUDGE", help="Reward model (folder or id) or function that judges.")
    ] = None,
    out: Out = None,
    seed: Seed = None,
) -> None:
    """Measure a policy's win rate against another policy or the references."""
    flags = {
        "model": model,
        "data.prompts": prompts,
        "evaluate.against": against,
        "evaluate.judge": judge,
        "out": out,
        "runtime.seed": seed,
    }
    resolved = _resolve("evaluate", config, overrides, flags, preset)
    from kedge.pipelines.evaluate import run_evaluate

    run_evaluate(resolved)


@app.command()
def demo(out: Out = None, seed: Annotated[int, typer.Option(min=0, help="Seeds every random stream.")] = 0) -> None:
    """Train a small summariser from nothing, by SFT, reward model and PPO, and judge it: five minutes on two cores."""
    folder = choose_output(out, "demo")
    from kedge.pipelines.demo import run_demo

    run_demo(folder, seed)


@config_app.command()
def show(overrides: Overrides = None, config: ConfigFile = None, preset: PresetName = None) -> None:
    """Print the resolved configuration, as YAML that --config reads."""
    typer.echo(resolved_yaml(load_config(config, overrides or (), preset=preset)), nl=False)


@config_app.command()
def validate(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    stage: Annotated[str | None, typer.Option(metavar="STAGE", help="Also check what this stage needs.")] = None,
) -> None:
    """Check a configuration without loading anything."""
    resolved = load_config(config, overrides or (), preset=preset)
    if stage is not None:
        check_stage(resolved, stage)
    typer.echo("The configuration is valid.")


@config_app.command("explain")
def explain_field(
    field: Annotated[str, typer.Argument(help="A field or section, e.g. ppo.clip_range; nothing lists all.")] = "",
) -> None:
    """Say what a field means, where its default comes from, and what too high and too low values do."""
    typer.echo(explain(field))


@config_app.command()
def schedule(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Prompts in the data, to tell the passes.")] = None,
) -> None:
    """Say in plain words what PPO will do: prompts, responses, tokens, minibatches, optimiser steps."""
    typer.echo(schedule_in_words(load_config(config, overrides or (), preset=preset), num_prompts))


@config_app.command()
def presets(
    name: Annotated[str | None, typer.Argument(help="A preset; nothing lists all.")] = None,
) -> None:
    """List the presets, or one preset's values with their sources."""
    typer.echo(describe_presets(name))


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """PPO for language models: supervised fine-tuning, reward model, PPO."""
    if version:
        typer.echo(f"kedge {__version__}")
        raise typer.Exit


def _resolve(
    stage: str,
    file: Path | None,
    overrides: list[str] | None,
    flags: dict[str, Any],
    preset: str | None,
    resume: str | None = None,
) -> Config:
    """The stage's configuration, complete and with a folder to write to: a free one, or the run's that is resumed."""
    if resume not in (None, "auto"):
        folder = Path(resume)
        if not is_run(folder):
            raise ConfigError(f"--resume: {resume} is not the folder of a run: it has no {CONFIG_FILE}")
        config = load_config(file or folder / CONFIG_FILE, overrides or (), {**flags, "out": resume}, preset)
    else:
        config = load_config(file, overrides or (), flags, preset)
    check_stage(config, stage)
    if resume == "auto" and config.out is None:
        config = with_values(config, {"out": str(Path("runs") / stage)})
    resumed = resume is not None and is_run(Path(str(config.out)))
    return config if resumed else with_values(config, {"out": str(choose_output(config.out, stage))})


def _resume(config: Config, resume: str | None, allow_changes: list[str] | None) -> Any:
    """What a pipeline is told about going on; exits where the run has come to its end."""
    if resume is None:
        if allow_changes:
            raise ConfigError("--allow-changes is about a run that is resumed: give --resume, too")
        return None
    from kedge.pipelines.run import Resume, finished_run

    if folder := finished_run(config):
        typer.echo(f"{folder} has come to its end: there is nothing to resume.")
        raise typer.Exit
    return Resume(tuple(allow_changes or ()))


def main() -> None:
    """Run the command line. A user's mistake is one line and exit code 2; Ctrl-C is 130, which typer sees to."""
    try:
        app()
    except KedgeError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)

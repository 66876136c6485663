"""`kedge config`: the configuration, shown, checked and explained; nothing is loaded for it."""

from typing import Annotated

import typer

from kedge.cli.options import ConfigFile, Overrides, PresetName
from kedge.config import check_stage, describe_presets, explain, load_config, resolved_yaml, schedule_in_words

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Show, check and explain the configuration.")


@app.command()
def show(overrides: Overrides = None, config: ConfigFile = None, preset: PresetName = None) -> None:
    """Print the resolved configuration, as YAML that --config reads."""
    typer.echo(resolved_yaml(load_config(config, overrides or (), preset=preset)), nl=False)


@app.command()
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


@app.command("explain")
def explain_field(
    field: Annotated[str, typer.Argument(help="A field or section, e.g. ppo.clip_range; nothing lists all.")] = "",
) -> None:
    """Say what a field means, where its default comes from, and what too high and too low values do."""
    typer.echo(explain(field))


@app.command()
def schedule(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Prompts in the data, to tell the passes.")] = None,
) -> None:
    """Say in plain words what PPO will do: prompts, responses, tokens, minibatches, optimiser steps."""
    typer.echo(schedule_in_words(load_config(config, overrides or (), preset=preset), num_prompts))


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(help="A preset; nothing lists all.")] = None,
) -> None:
    """List the presets, or one preset's values with their sources."""
    typer.echo(describe_presets(name))

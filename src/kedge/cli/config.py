"""`kedge config`: shows, checks and explains the configuration, without loading models or data."""

import os
from pathlib import Path
from typing import Annotated

import typer

from kedge.cli.command import Root
from kedge.cli.options import AnyPreset, ConfigFile, Overrides
from kedge.config import (
    Config,
    check_stage,
    describe_presets,
    explain,
    load_config,
    preset_conflicts,
    resolved_yaml,
    schedule_in_words,
    stage_of,
)
from kedge.config.translation import as_yaml, read_settings, translate
from kedge_base.command import Command
from kedge_base.errors import ConfigError
from kedge_base.run_folder.output import replace_file
from kedge_base.stage import find_stage, registered_stages, value_of
from kedge_base.texts import printable

app = typer.Typer(cls=Root, no_args_is_help=True, help="Show, check and explain the configuration.")


@app.command(cls=Command)
def show(overrides: Overrides = None, config: ConfigFile = None, preset: AnyPreset = None) -> None:
    """Print the resolved configuration as YAML, which --config can read."""
    typer.echo(resolved_yaml(_resolved(config, overrides, preset)), nl=False)


@app.command(cls=Command)
def validate(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: AnyPreset = None,
    stage: Annotated[
        str | None, typer.Option(metavar="STAGE", help="Also check the fields that this stage requires.")
    ] = None,
) -> None:
    """Check a configuration, without loading models or data."""
    resolved = _resolved(config, overrides, preset, stage)
    if stage is not None:
        check_stage(resolved, stage)
    typer.echo("The configuration is valid.")


@app.command("explain", cls=Command)
def explain_field(
    field: Annotated[
        str,
        typer.Argument(
            help="A field or section, e.g. ppo.clip_range; an argument of TRL, OpenRLHF, verl, verl-agent or "
            "AgileRL; or a word. Lists the sections if omitted."
        ),
    ] = "",
) -> None:
    """Show a field's meaning, default, source, and the effects of values that are too high or too low."""
    typer.echo(explain(field))


@app.command(cls=Command)
def schedule(
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: AnyPreset = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Number of prompts in the data, to compute the passes over them.")
    ] = None,
) -> None:
    """Describe what PPO will do: prompts, responses, tokens, minibatches, optimizer steps."""
    found = _resolved(config, overrides, preset, "ppo")
    for other in registered_stages():
        own = other.needs.keys() - find_stage("ppo").needs.keys() if other.makes_model else ()
        if other.name in map(stage_of, found.preset) or any(value_of(found, name) for name in own):
            raise ConfigError(f"kedge config schedule is for PPO on language models, not for kedge {other.name}")
    typer.echo(schedule_in_words(found, num_prompts))


@app.command(cls=Command)
def presets(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Presets. Lists all if omitted.")] = None,
) -> None:
    """List the presets, or show the values of some with their sources."""
    typer.echo("\n\n".join(map(describe_presets, names or [None])))


Source = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="YAML; of verl also overrides, or a script that starts it; of TRL also a script."
    ),
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting by the library's name. Repeatable.")
]
NumPrompts = Annotated[int | None, typer.Option(min=1, help="Prompts in the data, which turn passes into updates.")]
Target = Annotated[Path | None, typer.Option("-o", "--out", metavar="OUT", help="New file; by default printed.")]


@app.command(cls=Command)
def from_verl(file: Source, changes: Changes = None, num_prompts: NumPrompts = None, out: Target = None) -> None:
    """Translate a configuration of verl's PPO or GRPO, and list what has no counterpart."""
    _translate("verl", file, changes, num_prompts, out)


@app.command(cls=Command)
def from_trl(file: Source, changes: Changes = None, num_prompts: NumPrompts = None, out: Target = None) -> None:
    """Translate a configuration of TRL's PPO or GRPO, and list what has no counterpart."""
    _translate("TRL", file, changes, num_prompts, out)


def _translate(library: str, file: Path, changes: list[str] | None, num_prompts: int | None, out: Path | None) -> None:
    read = read_settings(file, changes or [])
    if read.library not in ("", library):
        raise ConfigError(f"{file} is a script for {read.library}: kedge config from-{read.library.lower()}")
    settings, lines = translate(library, read.settings, num_prompts, read.trainer)
    text = as_yaml(settings, [f"Translated from {library}'s {printable(file.name)}.", *lines])
    if out is None:
        typer.echo(text, nl=False)
        return
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists; name a new file")
    replace_file(out, [text.encode()])
    typer.echo("\n".join([*lines, f"kedge ppo --config {out}"]))


def _resolved(
    file: Path | None, overrides: list[str] | None, preset: list[str] | None, stage: str | None = None
) -> Config:
    config = load_config(file, overrides or (), preset=preset, stage=stage)
    if line := preset_conflicts(config, stage):
        typer.echo(line, err=True)
    return config

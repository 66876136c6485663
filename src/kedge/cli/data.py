"""`kedge data`: previews data as a stage would read it."""

from typing import Annotated

import typer

from kedge.cli.options import ConfigFile, Overrides, PresetName


def data(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=".jsonl file, dataset folder or id.")],
    overrides: Overrides = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Folder or id whose tokenizer reads the rows; without it, characters count."
        ),
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE", help="sft, reward, critic, ppo, generate or evaluate; guessed from the columns if omitted."
        ),
    ] = None,
    examples: Annotated[int, typer.Option(min=0, metavar="N", help="Rows to show.")] = 2,
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="Rows to read.")] = 10_000,
) -> None:
    """Preview rows as a stage reads them: columns, lengths, dropped rows with reasons, and examples in tokens."""
    from kedge.config import load_config

    resolved = load_config(config, overrides or (), {"model": model}, preset)
    from kedge.runs.preview import preview_data

    typer.echo(str(preview_data(resolved, source, stage=stage, num_examples=examples, num_rows=rows)))

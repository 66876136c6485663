"""`kedge merge`: saves an adapter and its base as one model."""

from pathlib import Path
from typing import Annotated

import typer


def merge(
    adapter: Annotated[
        str, typer.Argument(metavar="ADAPTER", help="A folder saved by PEFT, or a checkpoint in shards, such as RUN@8.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The new model's folder.")],
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code from the base model's folder.")
    ] = False,
) -> None:
    """Save an adapter and its base, or the shards of a checkpoint, as one model."""
    from kedge.models.saving import merge as merged

    typer.echo(f"Model:  {merged(adapter, out, trust_remote_code=trust_remote_code)}")

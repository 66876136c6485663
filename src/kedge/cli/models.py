"""`kedge push` and `kedge merge`: publish a trained model, or merge its adapter."""

from pathlib import Path
from typing import Annotated

import typer


def push(
    model: Annotated[
        str, typer.Argument(metavar="RUN|MODEL", help="A run, a checkpoint (RUN@8), or a model's folder.")
    ],
    repo: Annotated[
        str, typer.Argument(metavar="ORG/NAME", help="Repository on the hub; created if it does not exist.")
    ],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    existing: Annotated[
        bool, typer.Option("--existing", help="Allow a commit to a repository with content that kedge did not push.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the push, and show what would go.")] = False,
) -> None:
    """Push a trained model to the Hugging Face hub. Exits with 1 if the hub refuses halfway."""
    from kedge_base.machine.progress import say
    from kedge_hub.pushing import push_model

    typer.echo(push_model(model, repo, private=private, existing=existing, dry_run=dry_run, say=say))


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

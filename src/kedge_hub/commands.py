"""`kedge push`: publishes a trained model."""

from typing import Annotated

import typer

from kedge_base.command import Command


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this package."""
    app.command(cls=Command)(push)


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

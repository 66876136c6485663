"""The command `kedge label`."""

import typer


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this package."""

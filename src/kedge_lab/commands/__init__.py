"""The commands `kedge demo`, `kedge chat` and `kedge sweep`."""

import typer

from kedge_base.command import Command, RunCommand
from kedge_lab.commands.chat import chat
from kedge_lab.commands.demo import ABOUT, demo
from kedge_lab.commands.sweep import add_sweep


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this package; those of its stages come from their descriptions."""
    app.command(cls=RunCommand, help=ABOUT)(demo)
    app.command(cls=Command)(chat)
    add_sweep(app)

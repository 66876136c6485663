"""The `kedge` command. Pipelines are imported only when they run, so that `--help` is instant."""

import sys
from typing import Annotated

import typer

from kedge.cli import chat, config, data, inspect, stages, sweep
from kedge.errors import KedgeError
from kedge.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(stages.app)
app.add_typer(chat.app)
app.add_typer(sweep.app)
app.add_typer(inspect.app)
app.add_typer(data.app)
app.add_typer(config.app, name="config")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """PPO for language models: supervised fine-tuning, reward modeling, PPO."""
    if version:
        typer.echo(f"kedge {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line. A user error prints one line and exits with 2; typer exits with 130 on Ctrl-C."""
    try:
        app()
    except KedgeError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)

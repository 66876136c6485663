"""The `kedge` command. Pipelines are imported only when they run, so that `--help` is instant."""

import atexit
import errno
import gc
import os
import sys
from typing import Annotated, Any, cast

import typer

from kedge.cli import config, data, launch, merging, stages
from kedge.cli.command import Root
from kedge_base.command import Command, add_registered, new_app
from kedge_base.errors import ConfigError, KedgeError, OutputError, PushError, is_panic
from kedge_base.machine.invocation import mark_command_line, num_ranks
from kedge_base.machine.memory import Exhaustion, is_out_of_memory
from kedge_base.machine.streams import lasting_streams, refused_output
from kedge_base.texts import error_text, printable
from kedge_base.version import __version__

__all__ = ["app", "main"]

REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO}
"""Errors of a full or failing disk."""

app = new_app(Root)
stages.add_stages(app)
for _function in (merging.merge, data.data):
    app.command(cls=Command)(_function)
app.command(cls=launch.Launch)(launch.launch)
app.add_typer(config.app, name="config")
add_registered(app)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """PPO for language models: supervised fine-tuning, reward modeling, PPO."""
    if version:
        typer.echo(f"kedge {__version__}")
        raise typer.Exit
    try:
        os.getcwd()
    except FileNotFoundError:  # checked first, because torch would abort the process
        raise ConfigError("the current folder has been removed; change to another one") from None
    if num_ranks() > 1 and context.invoked_subcommand not in launch.RANKED:
        raise ConfigError(
            f"kedge {context.invoked_subcommand} runs as a single process; {', '.join(launch.RANKED)} can have several "
            "ranks"
        )
    if not cast("Any", context.command).get_command(context, context.invoked_subcommand).starts_run:
        context.call_on_close(_check_shown)


def _check_shown() -> None:
    if error := refused_output():
        raise OutputError(f"standard output cannot be written: {error.strerror}")


def main() -> None:
    """Run the command line. A user error prints one line and exits with 2; typer exits with 130 on Ctrl-C."""
    with lasting_streams():
        try:
            several = num_ranks() > 1
        except ConfigError as error:
            typer.echo(f"error: {error}", err=True)
            sys.exit(2)
        if several:
            from kedge.cli.ranks import run_as_rank

            return run_as_rank(_run)
        _run()


def _run() -> None:
    mark_command_line()
    # At its exit, Python collects garbage several times. With torch and transformers loaded, that takes a second, and
    # many when memory is short, although the process ends anyway. Frozen objects are not collected.
    atexit.register(gc.freeze)
    try:
        app()
    except KedgeError as error:
        if num_ranks() > 1:
            raise
        typer.echo(f"error: {error}", err=True)
        sys.exit(1 if isinstance(error, PushError) else 2)
    except BaseException as error:
        line = _line_of(error)
        if num_ranks() > 1 or line is None:
            raise
        typer.echo(f"error: {line}", err=True)
        sys.exit(2)


def _line_of(error: BaseException) -> str | None:
    """Describe an error of the machine, or of a library reading a model's files, in one line; None for a bug or an
    exit.
    """
    if is_panic(error):
        return f"a library failed, such as on the regular expressions of a tokenizer.json: {error_text(error)}"
    if is_out_of_memory(error):
        return str(Exhaustion.of(error, "the command"))
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):  # raised by the module tempfile
        return "no folder for temporary files can be written; set TMPDIR to one"
    if isinstance(error, OSError) and error.errno in REFUSED:
        place = "" if error.filename is None else f"{printable(str(error.filename))} "
        return f"{place}cannot be written: {error.strerror}"
    return None

"""The `kedge` command line: its command classes, and the commands that packages register."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from kedge_base.errors import ConfigError, KedgeError
from kedge_base.registry import loaded, registered
from kedge_base.version import __version__


class Command(TyperCommand):
    """A command that prints its result. Help shows flags without a type; a single value can only be given once.

    Attributes:
        starts_run: It writes its results to a folder instead.
    """

    starts_run = False

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, without Python types such as `<bool>` on flags and arguments."""
        return _without_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            ConfigError: An option or argument does not exist, lacks its value or has a wrong one; or a single-valued
                option is given twice, or an option under two names.
        """
        for option in self.params:
            _check_given_once(option, args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            option = str(getattr(error, "option_name", ""))
            missing = not any(option in param.opts for param in self.params)  # otherwise its value is missing
            if missing and (advice := self.advice_on(option, str(ctx.info_name))):
                raise ConfigError(advice) from None
            _raise_in_one_line(error, ctx)
            raise

    def advice_on(self, option: str, command: str) -> str | None:
        """Suggest a replacement for an unknown option; None without a suggestion."""
        return None


class RunCommand(Command):
    """A command that starts a run and writes its results to a folder."""

    starts_run = True


class Group(TyperGroup):
    """A group of commands.

    Attributes:
        starts_run: As in `Command`.
    """

    starts_run = False

    def get_params(self, ctx: Any) -> Any:
        """As in `Command`."""
        return _without_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As in `Command`."""
        if not args:
            return super().parse_args(ctx, args)  # shows the help
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            _raise_in_one_line(error, ctx)
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Look up the command named by the first argument.

        Raises:
            ConfigError: There is no such command; the message has advice, or lists the commands.
        """
        if (
            self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing
        ):  # True while a shell completes the line
            close = get_close_matches(args[0], self.commands, 1)
            advice = self.advice_on(args[0]) or (
                f"did you mean {close[0]}?" if close else f"its commands are {', '.join(self.list_commands(ctx))}"
            )
            raise ConfigError(f"{_name_of(ctx)} has no command {args[0]!r:.40}; {advice}")
        return super().resolve_command(ctx, args)

    def advice_on(self, command: str) -> str | None:
        """Suggest a replacement for an unknown command; None without a suggestion."""
        return None


class StageGroup(Group):
    """A group with a command per stage, whose options may also stand before the stage."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As in `Command`."""
        return super().parse_args(ctx, name_first(args, self.commands))


def name_first(words: Sequence[str], names: Container[str]) -> list[str]:
    """Put the first word that is one of the names before the options that precede it.

    A name right after an option may be the option's value, so any other name takes precedence.
    """
    found = [at for at, word in enumerate(words) if word in names]
    at = min(found, key=lambda at: at > 0 and words[at - 1].startswith("-"), default=0)
    if not at or words[0] == "--help" or not words[0].startswith("--"):
        return list(words)
    return [words[at], *words[:at], *words[at + 1 :]]


class RunGroup(StageGroup):
    """A group whose commands start runs."""

    starts_run = True


def _raise_in_one_line(error: Exception, ctx: Any) -> None:
    """Raise a usage error of click as a `ConfigError` of one line; return for any other error."""
    if hasattr(error, "format_message"):  # typer versions import click's classes from different places
        message = " ".join(cast("Any", error).format_message().removesuffix(".").split())
        raise ConfigError(f"{message[:1].lower()}{message[1:]}; see {_name_of(ctx)} -h") from None


def _name_of(ctx: Any) -> str:
    return f"{_name_of(ctx.parent)} {ctx.info_name}" if ctx.parent else "kedge"


def _without_types(params: Any) -> Any:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None  # typer would show `<list[str]>` behind FIELD=VALUE
    return params


def _check_given_once(option: Any, args: list[str]) -> None:
    names = [name for name in option.opts for arg in args if arg == name or arg.startswith(f"{name}=")]
    if len(set(names)) > 1:
        raise ConfigError(f"{' and '.join(dict.fromkeys(names))} are the same option; give one of them")
    if len(names) > 1 and not (option.multiple or option.is_flag):
        raise ConfigError(f"{names[0]} is given twice; give it once")


def new_app(group: type[Group]) -> typer.Typer:
    """Create a command line without commands; those added to it accept -h and --help."""
    return typer.Typer(
        cls=group,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def add_registered(app: typer.Typer) -> None:
    """Add the commands that installed packages register."""
    for entry in registered("kedge.commands").values():
        entry.load()(app)


def main() -> None:
    """Run the command line of the training package, or, without it, the commands that other packages register."""
    (loaded("kedge.command_line", "kedge") or _run)()


def _run() -> None:
    app = new_app(Group)
    add_registered(app)
    app.callback(invoke_without_command=True)(_root)
    try:
        app()
    except KedgeError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """PPO for language models: tools that inspect runs. `pip install kedge-rl` adds training."""
    if version:
        typer.echo(f"kedge {__version__}")
        raise typer.Exit

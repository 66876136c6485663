"""The classes of kedge's commands: flags without a type in the help, and one line for an option that does not exist."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from typer.core import TyperCommand, TyperGroup

from kedge.config import advice_for, full_name
from kedge_base.errors import ConfigError
from kedge_base.stage import stages


class Command(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> Any:
        """The parameters; flags and arguments are shown without a Python type such as `<bool>`."""
        return _without_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            ConfigError: An option that takes one value is given twice, or under two names; or a field or another
                library's argument is written as an option.
        """
        for option in self.params:
            _check_given_once(option, args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # The class is click's NoSuchOption, which typer imports from different places in different versions.
            option = str(getattr(error, "option_name", ""))
            missing = not any(option in param.opts for param in self.params)  # otherwise its value is
            if missing and (hint := _hint(option, str(ctx.info_name))):
                raise ConfigError(hint) from None
            raise


class Group(TyperGroup):
    """A group of commands."""

    def get_params(self, ctx: Any) -> Any:
        """As in `Command`."""
        return _without_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments start with.

        Raises:
            ConfigError: There is no such command; the line says if it is an algorithm, and else which ones there are.
        """
        if self.get_command(ctx, args[0]) is None and (advice := advice_for(args[0])):
            raise ConfigError(f"kedge has no command {args[0]}; {advice}")
        is_complete = not ctx.resilient_parsing  # otherwise a shell completes it
        if is_complete and self.get_command(ctx, args[0]) is None and not get_close_matches(args[0], self.commands):
            group = f"kedge {ctx.info_name}" if ctx.parent else "kedge"
            commands = ", ".join(self.list_commands(ctx))
            raise ConfigError(f"{group} has no command {args[0]!r:.40}; its commands are {commands}")
        return super().resolve_command(ctx, args)


def _without_types(params: Any) -> Any:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None  # typer would show `<list[str]>` behind FIELD=VALUE
    return params


def _check_given_once(option: Any, args: list[str]) -> None:
    given = [name for name in option.opts for arg in args if arg == name or arg.startswith(f"{name}=")]
    if len(set(given)) > 1:
        raise ConfigError(f"{' and '.join(dict.fromkeys(given))} are the same option; give one of them")
    if len(given) > 1 and not (option.multiple or option.is_flag):
        raise ConfigError(f"{given[0]} is given twice; give it once")


def _hint(option: str, command: str) -> str | None:
    """The correct spelling of `--num_updates 3` or `--eps_clip 0.1`; None if kedge has no such name."""
    name = option.lstrip("-").replace("-", "_")
    if command not in stages() or not name:
        return None
    if name == "dry_run":
        return f"{option} is not an option; kedge plan {command} says what a run will hold and how long it will take"
    try:
        field = full_name(name, command)
    except ConfigError as error:
        return str(error) if "; " in str(error) else None  # it has an advice
    return f"{option} is not an option; fields are set without dashes: {name}=VALUE (see kedge config explain {field})"

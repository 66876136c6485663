"""Commands that read the configuration: one line for an option or a command that does not exist."""

from __future__ import annotations

from kedge.config import advice_for, full_name
from kedge_base import command
from kedge_base.errors import ConfigError
from kedge_base.registry import registered
from kedge_base.stage import stages


class StageCommand(command.RunCommand):
    """A stage's command: a field, or another library's argument, that is written as an option gets its spelling."""

    def advice_on(self, option: str, command: str) -> str | None:
        """As in `Command`."""
        return _hint(option, command)


class Root(command.Group):
    """The commands of `kedge`: the name of an algorithm gets its preset."""

    def advice_on(self, command: str) -> str | None:
        """As in `Group`."""
        known = registered("kedge.commands")
        return advice_for(command) or (None if known else "kedge is installed in part: install it again, with pip")


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

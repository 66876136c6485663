"""Commands that read the configuration: an option or command that does not exist gets a one-line error."""

from __future__ import annotations

from kedge.config import advice_for, full_name
from kedge_base import command
from kedge_base.errors import ConfigError
from kedge_base.registry import registered
from kedge_base.stage import find_stage, stages


class StageCommand(command.Command):
    """A command about a stage: if a field or another library's argument is given as an option, the error shows the
    right spelling.
    """

    def advice_on(self, option: str, command: str) -> str | None:
        """The correct spelling of `--num_updates 3` or `--eps_clip 0.1`; None if kedge has no such name."""
        name = option.lstrip("-").replace("-", "_")
        if command not in stages() or not name:
            return None
        begin = f"{option} is not an option;"
        if name == "dry_run":
            return f"{begin} kedge plan {command} says what a run will hold and how long it will take"
        try:
            field = full_name(name, command)
        except ConfigError as error:
            return str(error) if "; " in str(error) else None  # only a message with advice is worth showing
        if "." in field:
            return f"{begin} fields are set without dashes: {name}=VALUE (see kedge config explain {field})"
        options = ", ".join(flag.names[0] for flag in find_stage(command).flags)
        return f"{begin} kedge {command} has {options} (fields: kedge config explain {field})"


class RunStage(StageCommand, command.RunCommand):
    """A stage's own command."""


class Root(command.Group):
    """The commands of `kedge`: if an algorithm's name is given as a command, the error shows its preset."""

    def advice_on(self, command: str) -> str | None:
        """As in `Group`."""
        known = registered("kedge.commands")
        return advice_for(command) or (None if known else "kedge is installed in part: install it again, with pip")

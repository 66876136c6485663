"""What installed packages add to kedge: entry points of their distributions, by group.

    [project.entry-points."kedge.commands"]
    inspect = "kedge_inspect.commands:add_commands"

- `kedge.stages`: a `Stage`, or several.
- `kedge.commands`: a function that adds commands to the `typer.Typer` of `kedge`.
- `kedge.names`: an attribute of `kedge`, such as `kedge.evaluate`.
- `kedge.plans`: what checks the memory of a stage before it starts, by the stage's name; see `Stage.plan`.
- `kedge.command_line`: what runs instead of a command line with the added commands alone.
- `kedge.advice`: `(field, direction) -> text`, the effect of a value that is `too_high` or `too_low`.
- `kedge.services`: what a run asks other packages for, such as its report or the card of its model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kedge_base.errors import ConfigError
from kedge_base.packages import is_own_module


@cache
def registered(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name; those of kedge's own packages come first, sorted by package."""
    found = sorted(entry_points(group=group), key=lambda entry: (not is_own_module(entry.module), entry.module))
    return {entry.name: entry for entry in found}


def loaded(group: str, name: str) -> Any:
    """The object that a name in a group stands for; None if no installed package has registered it."""
    entry = registered(group).get(name)
    return None if entry is None else entry.load()


def service(name: str) -> Any:
    """The function that another package has registered for runs.

    Raises:
        ConfigError: No installed package has: the entry points are those of an earlier version.
    """
    found = loaded("kedge.services", name)
    if found is None:
        raise ConfigError(f"kedge is installed in part: nothing provides its {name}; install it again, with pip")
    return found

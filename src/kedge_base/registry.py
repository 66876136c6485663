"""Finds the additions of installed packages to kedge: entry points of their distributions, by group.

    [project.entry-points."kedge.commands"]
    inspect = "kedge_inspect.commands:add_commands"

- `kedge.stages`: a `Stage`, or several.
- `kedge.commands`: a function that adds commands to the `typer.Typer` of `kedge`.
- `kedge.names`: an attribute of `kedge`, such as `kedge.evaluate`.
- `kedge.plans`: a function that checks a stage's memory before it starts, by the stage's name; see `Stage.plan`.
- `kedge.command_line`: a command line that replaces the default one, which only has the registered commands.
- `kedge.advice`: `(field, direction) -> text`, the effect of a value that is `too_high` or `too_low`.
- `kedge.services`: a function that a run calls, such as to write its report or its model card.
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
    """Return the entry points of a group by name; those of kedge's own packages come first, sorted by package."""
    found = sorted(entry_points(group=group), key=lambda entry: (not is_own_module(entry.module), entry.module))
    return {entry.name: entry for entry in found}


def loaded(group: str, name: str) -> Any:
    """Load the object registered under a name in a group; None if no installed package registers it."""
    entry = registered(group).get(name)
    return None if entry is None else entry.load()


def service(name: str) -> Any:
    """Load a function of `kedge.services`.

    Raises:
        ConfigError: No installed package registers it, because its entry points are from an earlier version.
    """
    found = loaded("kedge.services", name)
    if found is None:
        raise ConfigError(f"kedge is installed in part: nothing provides its {name}; install it again, with pip")
    return found

"""The packages of kedge, and names that have moved between them: old names work for one release."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from kedge_base.machine.invocation import is_command_line
from kedge_base.texts import read_table

PACKAGES = {
    "kedge",
    "kedge_base",
    "kedge_control",
    "kedge_hub",
    "kedge_inspect",
    "kedge_lab",
    "kedge_people",
    "kedge_plan",
    "kedge_tasks",
}

MOVED = dict(read_table(Path(__file__).with_name("moved.tsv")))
"""New names of modules and packages by old name; the contents of a package have moved with it."""

_MODULES = "|".join(re.escape(name) for name in sorted(MOVED, key=len, reverse=True))
_OLD = re.compile(rf"({_MODULES})(\.\w+)*(:\w+(\.\w+)*)?")


def is_own_module(name: str) -> bool:
    """True for the dotted name of a module of one of kedge's packages."""
    return name.partition(".")[0] in PACKAGES


def current_name(name: str) -> str:
    """Return the current name of a module, class or function, such as `kedge_tasks.verify:gsm8k`; warn if it moved."""
    old = _OLD.fullmatch(name)
    if old is None:
        return name
    new = MOVED[old[1]] + name[old.end(1) :]
    warn_of_old(name, new)
    return new


def warn_of_old(name: str, new: str) -> None:
    """Say once that something has another name now."""
    line = f"{name} is now {new}; the old name works until the next release"
    if is_command_line():
        _say_once(line)
    else:
        warnings.warn(line, FutureWarning, stacklevel=4)


@cache
def _say_once(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def current_names(value: Any) -> Any:
    """Replace the old names of moved functions and classes, written as `module:name`, anywhere in some settings."""
    if isinstance(value, str):
        return current_name(value) if ":" in value else value
    if isinstance(value, dict):
        return {current_names(key): current_names(entry) for key, entry in value.items()}
    return [current_names(entry) for entry in value] if isinstance(value, list) else value


class _MovedModules(MetaPathFinder, Loader):
    """Imports a module under its old name as the same object.

    It must come first: other finders would find the file in its parent's folder, and import it twice.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if _OLD.fullmatch(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(current_name(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def accept_old_names() -> None:
    """Let imports find modules under the names that they had before they moved to another package."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedModules())

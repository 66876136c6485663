"""Stubs of packages and objects that the functions under test need only by name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Blank:
    """An object with the given attributes; all others are None, as the settings of a library that are not set.

    They cannot be listed, as each version of a library reads others. A renamed attribute therefore counts as not set;
    the checks vary every option, and so show where that changes a result.
    """

    def __init__(self, **known: Any) -> None:
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        return None


class _StandIn(ModuleType):
    """A module whose every name is an empty class; a call returns its only argument, as a decorator does."""

    __path__: Sequence[str] = ()  # pyright: ignore

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__new__": lambda _, *given, **__: given[0] if len(given) == 1 else None})


class _Finder(MetaPathFinder, Loader):
    """Finds the packages and their submodules where no other finder does."""

    def __init__(self, names: Sequence[str], without: Sequence[str]) -> None:
        self._names = names
        self._without = without

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        is_given = fullname.partition(".")[0] in self._names and fullname not in self._without
        return ModuleSpec(fullname, self) if is_given else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in(*names: str, without: Sequence[str] = ()) -> None:
    """Import stubs for packages that are not installed, except modules that the library can do without."""
    sys.meta_path.append(_Finder(names, without))

"""Imports a function by name: `path/to/file.py:function` or `package.module:function`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from kedge.errors import RewardError
from kedge.rewards.function import FunctionReward, error_text
from kedge.texts import names_function

__all__ = ["find_function", "load_function", "names_function"]

_DOTTED_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_EXPECTED = "path/to/file.py:function or package.module:function"
_MODULE_NUMBERS = itertools.count(1)


def load_function(spec: str) -> Callable[..., Any]:
    """The reward function of a given name; see `find_function`.

    Raises:
        RewardError: No such function, or it does not take `completions`.
    """
    function = find_function(spec)
    FunctionReward(function)  # checks its signature now, not after the first rollout
    return function


def find_function(spec: str) -> Callable[..., Any]:
    """The function of a given name, with any signature.

    A file runs as a module with a unique name each time it is loaded. It can import modules in its folder, relatively
    or by plain name, and modules in the working directory.

    Args:
        spec: `path/to/file.py:function` (the path may contain colons) or `package.module:function`.

    Raises:
        RewardError: No such file, module or function; the import raised; it is not callable.
    """
    source, _, attribute = spec.rpartition(":")
    if not source or not _DOTTED_NAME.fullmatch(attribute):
        raise RewardError(f"reward {spec!r} is not the name of a function; expected {_EXPECTED}")
    module = _run_file(Path(os.path.expanduser(source))) if source.endswith(".py") else _import_module(source)
    function = _attribute(module, attribute, spec)
    if not callable(function):
        raise RewardError(f"reward {spec!r} is a {type(function).__name__}, not a function")
    return function


def _run_file(path: Path) -> ModuleType:
    """Execute a file as a module of a new package that contains the files in its folder."""
    if not path.is_file():
        raise RewardError(f"reward file {str(path)!r} does not exist; expected {_EXPECTED}")
    folder = path.resolve().parent
    package = ModuleType(f"kedge_reward_{next(_MODULE_NUMBERS)}")
    package.__path__ = [str(folder)]
    name = f"{package.__name__}.{re.sub(r'[^0-9a-zA-Z_]', '_', path.stem)}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.update({package.__name__: package, name: module})
    _make_importable(folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _failed(f"reward file {str(path)!r}", error) from error
    return module


def _import_module(name: str) -> ModuleType:
    if not _DOTTED_NAME.fullmatch(name):
        raise RewardError(f"reward module {name!r} is neither a dotted module name nor a .py file")
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only the module itself or one of its parents is a wrong name; any other is an import inside the module.
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise RewardError(f"reward module {name!r} not found: there is no module {error.name!r}") from error
        raise _failed(f"reward module {name!r}", error) from error
    except (Exception, SystemExit) as error:
        raise _failed(f"reward module {name!r}", error) from error


def _make_importable(folder: Path) -> None:
    """Let plain imports find a folder's modules, after installed ones so that none is shadowed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()


def _attribute(module: ModuleType, attribute: str, spec: str) -> object:
    owner: object = module
    for part in attribute.split("."):
        try:
            owner = getattr(owner, part)
        except AttributeError as error:
            names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            near = difflib.get_close_matches(attribute, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(names)) or 'no functions'}"
            raise RewardError(f"reward {spec!r}: the module has no {attribute!r}; {hint}") from error
    return owner


def _failed(what: str, error: BaseException) -> RewardError:
    """One line for an error raised by a module while it was imported."""
    if isinstance(error, SyntaxError):
        return RewardError(f"{what}, line {error.lineno}: {error.msg}")
    line = traceback.extract_tb(error.__traceback__)[-1].lineno
    return RewardError(f"{what} raised {type(error).__name__}, line {line}: {error_text(error)}")

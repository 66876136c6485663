"""Imports functions named by the user: `path/to/file.py:function` or `package.module:function`."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kedge_base.errors import KedgeError, RunEnded
from kedge_base.machine.invocation import importing_user_code
from kedge_base.packages import current_name, is_own_module
from kedge_base.texts import DOTTED_NAME, place_of, typed_error_text

_MODULE_NUMBERS = itertools.count(1)
_LOADED_HERE = "__kedge_loaded__"


@dataclass(frozen=True)
class _Kind:
    """Kind of object that the user names, such as a reward, and the error to raise if it does not exist."""

    word: str
    error: type[KedgeError]

    @property
    def named(self) -> str:
        """Return the Python object of this kind."""
        return "class" if self.word == "environment" else "function"

    @property
    def expected(self) -> str:
        """The form of its name."""
        name = "Class" if self.named == "class" else "function"
        return f"path/to/file.py:{name} or package.module:{name}"


def find_named(spec: str, *, word: str, error: type[KedgeError]) -> Callable[..., Any]:
    """Import the function or class with a given name and any signature.

    A file runs each time it is loaded, as a module with the file's name, so that processes that it starts can import
    it. It can import modules in its folder, relatively or by plain name, and modules in the working directory.

    Args:
        spec: `path/to/file.py:function` (the path may contain colons) or `package.module:function`.
        word: Its kind in messages, such as "reward".
        error: Raised if there is no such file, module or function, the import raised, or it is not callable.
    """
    kind = _Kind(word, error)
    if spec.startswith("python:"):
        raise error(f"{word} {spec} is a {kind.named} that was passed from Python; pass it again, or name its file")
    source, _, attribute = current_name(spec).rpartition(":")
    if not source or not DOTTED_NAME.fullmatch(attribute):
        raise error(f"{word} {spec!r} is not the name of a {kind.named}; expected {kind.expected}")
    from_file = source.endswith(".py")
    module = _run_file(Path(os.path.expanduser(source)), kind) if from_file else _import_module(source, kind)
    function = _attribute(module, attribute, spec, kind)
    if not callable(function):
        raise error(f"{word} {spec!r} is of type {type(function).__name__}, not a {kind.named}")
    return function


def check_named(spec: str, *, word: str, error: type[KedgeError]) -> None:
    """Raise `find_named`'s error for a name that is certainly wrong, without running any user code.

    Names that a file may define dynamically, and names in modules other than kedge's, are left to `find_named`.
    """
    source, _, attribute = current_name(spec).rpartition(":")
    path = Path(os.path.expanduser(source))
    if source.endswith(".py") and path.is_file():
        text = path.read_text(encoding="utf-8", errors="replace")
        if not re.search(rf"\b({attribute.partition('.')[0]}|{_DEFINES})\b|import \*", text):
            raise _missing(_Kind(word, error), spec, re.findall(r"^(?:async def|def|class) (\w+)", text, re.MULTILINE))
    elif source.endswith(".py") or is_own_module(source) or not _is_module(source.partition(".")[0]):
        find_named(spec, word=word, error=error)


_DEFINES = "__getattr__|__dict__|globals|locals|vars|exec|setattr|modules"
"""Words in a file that may define names, in addition to a star import."""


def _is_module(name: str) -> bool:
    _make_importable(Path.cwd())
    return name in sys.modules or (bool(name) and importlib.util.find_spec(name) is not None)


def _run_file(file: Path, kind: _Kind) -> ModuleType:
    """Execute a file as a module."""
    if not file.is_file():
        raise kind.error(f"{kind.word} file {str(file)!r} does not exist; expected {kind.expected}")
    path = file.resolve()
    _make_importable(path.parent)
    name = path.stem if _is_found_by_name(path) else _unique_name(path, kind)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__[_LOADED_HERE] = True
    sys.modules[name] = module
    try:
        with importing_user_code():
            spec.loader.exec_module(module)
    except RunEnded:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(f"{kind.word} file {str(file)!r}", error, kind) from error
    return module


def _is_found_by_name(path: Path) -> bool:
    """True if `import NAME` finds this file, also in another process such as a pool's worker."""
    loaded = sys.modules.get(path.stem)
    if loaded is not None:  # the name is in use, as by `math`, or by the user's script, which imported the file
        return getattr(loaded, "__file__", None) == str(path) and hasattr(loaded, _LOADED_HERE)
    if "." in path.stem or _imports_relatively(path):
        return False
    found = importlib.util.find_spec(path.stem)
    return found is not None and found.origin == str(path)


def _imports_relatively(path: Path) -> bool:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # reported when the file runs
        return False
    return any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))


def _unique_name(path: Path, kind: _Kind) -> str:
    """Create a package over the file's folder, and return the file's name as a module of it."""
    package = ModuleType(f"kedge_{kind.word}_{next(_MODULE_NUMBERS)}")
    package.__path__ = [str(path.parent)]
    sys.modules[package.__name__] = package
    return f"{package.__name__}.{re.sub(r'[^0-9a-zA-Z_]', '_', path.stem)}"


def _import_module(name: str, kind: _Kind) -> ModuleType:
    if not DOTTED_NAME.fullmatch(name):
        raise kind.error(f"{kind.word} module {name!r} is neither a dotted module name nor a .py file")
    _make_importable(Path.cwd())
    try:
        with importing_user_code():
            return importlib.import_module(name)
    except RunEnded:
        raise
    except (Exception, SystemExit) as error:
        # Only the module itself or one of its parents is a wrong name; any other is an import inside the module.
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise kind.error(f"{kind.word} module {name!r} not found: there is no module {error.name!r}") from error
        raise _failed(f"{kind.word} module {name!r}", error, kind) from error


def _make_importable(folder: Path) -> None:
    """Let plain imports find a folder's modules, after installed ones so that none is shadowed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()


def _attribute(module: ModuleType, attribute: str, spec: str, kind: _Kind) -> object:
    owner: object = module
    for part in attribute.split("."):
        try:
            owner = getattr(owner, part)
        except AttributeError as error:
            raise _missing(kind, spec, [name for name, value in vars(module).items() if callable(value)]) from error
    return owner


def _missing(kind: _Kind, spec: str, known: list[str]) -> KedgeError:
    attribute = spec.rpartition(":")[2]
    names = sorted(name for name in known if not name.startswith("_"))
    near = difflib.get_close_matches(attribute, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names) or 'no functions'}"
    return kind.error(f"{kind.word} {spec!r}: the module has no {attribute!r}; {hint}")


def _failed(what: str, error: BaseException, kind: _Kind) -> KedgeError:
    """Describe in one line an error that a module raised during import."""
    if isinstance(error, SyntaxError):
        return kind.error(f"{what}, line {error.lineno}: {error.msg}")
    return kind.error(f"{what} raised {typed_error_text(error)} ({place_of(error)})")

"""The files of a Python function: its own, and the modules that it imports from its folder or the working directory."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["code_files"]


def code_files(source: str) -> list[Path]:
    """The files of a function named `path/to/file.py:function` or `package.module:function`, its own first.

    Imports are followed as they are written, without running anything; installed packages are left out. Empty if there
    is no such file.
    """
    name = source if source.endswith(".py") else source.rpartition(":")[0]
    here = Path.cwd()
    path = Path(os.path.expanduser(name))
    first = [path] if name.endswith(".py") else list(_modules(name.split("."), here))
    found = dict.fromkeys(path for path in first if os.path.isfile(path))
    waiting = list(found)
    roots = [*(path.resolve().parent for path in waiting[:1] if name.endswith(".py")), here]
    while waiting:
        for path in _imported(waiting.pop(), roots):
            if path not in found:
                found[path] = None
                waiting.append(path)
    return list(found)


def _imported(path: Path, roots: list[Path]) -> Iterator[Path]:
    """The files that a file imports from some folders, or from its own."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # reported by whoever imports it
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from _found([alias.name.split(".") for alias in node.names], roots)
        elif isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            names = [[*module, *more] for more in ([], *([alias.name] for alias in node.names))]
            folders = path.resolve().parents
            yield from _found(names, [folders[node.level - 1]] if 0 < node.level <= len(folders) else roots)


def _found(names: list[list[str]], roots: list[Path]) -> Iterator[Path]:
    for name in names:
        if name and name[0] not in sys.stdlib_module_names:
            for root in roots:
                yield from _modules(name, root)


def _modules(name: list[str], root: Path) -> Iterator[Path]:
    """The files that importing a dotted name from a folder runs: those of its packages, and its own."""
    for depth in range(1, len(name) + 1):
        place = root.joinpath(*name[:depth])
        for path in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if os.path.isfile(path):
                yield path

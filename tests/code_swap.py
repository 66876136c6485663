"""Gives the functions of an imported module the code of a changed source, without importing anything again."""

from __future__ import annotations

import gc
import os
import sys
from collections import defaultdict
from importlib.machinery import SourceFileLoader
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FunctionType

LiveFunctions = dict[str, list[FunctionType]]
"""Function objects by the file of their code."""


def live_functions(folder: Path) -> LiveFunctions:
    """Every function object whose code is in a file of the folder: decorators may have made several of one."""
    found: LiveFunctions = defaultdict(list)
    for each in gc.get_objects():
        # Not `isinstance`, which asks objects for their `__class__`, and some of torch's warn then.
        if type(each) is FunctionType and each.__code__.co_filename.startswith(f"{folder}{os.sep}"):
            found[each.__code__.co_filename].append(each)
    return found


def changed_functions(old: CodeType, new: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    """The functions that differ between two versions of a module, old and new; positions of lines do not count.

    Returns:
        Pairs of the outermost functions; None if anything else differs, such as a constant or a default.
    """
    olds, news = _nested(old), _nested(new)
    if _without_nested(old) != _without_nested(new) or len(olds) != len(news):
        return None
    pairs: list[tuple[CodeType, CodeType]] = []
    for before, after in zip(olds, news, strict=True):
        if _without_positions(before) == _without_positions(after):
            continue
        inner = [(before, after)] if before.co_flags & CO_OPTIMIZED else changed_functions(before, after)
        if inner is None:
            return None
        pairs += inner
    return pairs


def swap_code(module: str, source: str, live: LiveFunctions) -> bool:
    """Make the functions of an imported module those of another source; whoever has imported them runs the new code.

    Args:
        module: Its name.
        source: Its changed source.
        live: The function objects of its package.

    Returns:
        False, with nothing swapped, if the module is not imported, if more than the code of functions differs, or if
        such a function does not exist, as is true of a comprehension that ran when the module was imported.
    """
    if module not in sys.modules:
        return False
    loader = sys.modules[module].__loader__
    assert isinstance(loader, SourceFileLoader)
    # The loader's, since that of checked modules adds the checks.
    new = loader.source_to_code(source.encode(), loader.path)
    old = loader.source_to_code(loader.get_data(loader.path), loader.path)
    if (pairs := changed_functions(old, new)) is None:
        return False
    swapped = [[each for each in live[old.co_filename] if each.__code__ == before] for before, _ in pairs]
    if not all(swapped) or any(before.co_freevars != after.co_freevars for before, after in pairs):
        return False
    for (_, after), functions in zip(pairs, swapped, strict=True):
        for function in functions:
            function.__code__ = after
    return True


def _nested(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _without_positions(code: CodeType) -> CodeType:
    constants = (_without_positions(held) if isinstance(held, CodeType) else held for held in code.co_consts)
    return code.replace(co_firstlineno=1, co_linetable=b"", co_consts=tuple(constants))


def _without_nested(code: CodeType) -> CodeType:
    constants = (None if isinstance(held, CodeType) else held for held in code.co_consts)
    return code.replace(co_firstlineno=1, co_linetable=b"", co_consts=tuple(constants))

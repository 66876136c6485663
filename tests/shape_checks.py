"""Checks the shapes and types of the algorithm's calls, once for all calls that look the same to the checks.

What jaxtyping and beartype say about a call depends on the types, dtypes and shapes of its arguments and of its result,
not on the numbers in the tensors. Most calls of a test look like earlier ones, and to check one takes longer than most
functions of the algorithm do.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import random
import sys
from collections.abc import Callable, Collection, Iterator
from threading import get_ident
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

import jaxtyping
import torch

# beartype draws which entry of a list it checks. Taken from the generator of `random`, those draws would change what a
# test draws after a checked call.
with mock.patch("random.getrandbits", random.Random(0).getrandbits):
    from beartype import BeartypeConf, beartype

_checked_by_jaxtyping = inspect.unwrap(jaxtyping.jaxtyped)  # trials import this module again


def install_checks(package: str) -> None:
    """Check the calls of a package that is not imported yet."""
    typechecker = ModuleType("kedge_typechecker")
    # An int is a float, as PEP 484 has it and every caller expects.
    typechecker.check = beartype(conf=BeartypeConf(is_pep484_tower=True))
    sys.modules[typechecker.__name__] = typechecker
    jaxtyping.jaxtyped = _jaxtyped  # the decorator that the hook adds
    jaxtyping.install_import_hook(package, "kedge_typechecker.check")


@functools.wraps(_checked_by_jaxtyping)
def _jaxtyped(*, typechecker: Any) -> Callable[[Any], Any]:
    def decorate(target: Any) -> Any:
        if not isinstance(target, type):
            return checked_once(target, typechecker)
        # As in jaxtyping: of the classes, the dataclasses, unless they have inherited a constructor that is checked.
        if dataclasses.is_dataclass(target) and target.__init__.__globals__ is not globals():
            target.__init__ = checked_once(target.__init__, typechecker)
        return target

    return decorate


def checked_once(plain: FunctionType, typechecker: Any) -> Callable[..., Any]:
    """The function with checks that are left out of calls like one that has passed them."""
    passed: dict[object, set[object]] = {}
    results: dict[int, Any] = {}  # by thread: a result to check, for which the function is not called again
    thread = get_ident

    def result_of(*args: Any, **kwargs: Any) -> Any:
        return results.pop(thread()) if thread() in results else plain(*args, **kwargs)

    # jaxtyping looks up annotations in the globals of the function, so it has those of the plain one.
    source = FunctionType(result_of.__code__, plain.__globals__, closure=result_of.__closure__)
    checked = _checked_by_jaxtyping(functools.update_wrapper(source, plain), typechecker=typechecker)

    @functools.wraps(plain)
    def called(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return plain(*args, **kwargs)
        given = _kind((args, kwargs))
        if given is None or given not in passed:
            result = checked(*args, **kwargs)
            if given is not None:
                passed[given] = {_kind((result,))}
            return result
        result = plain(*args, **kwargs)
        kind = _kind((result,))
        if kind is None or kind not in passed[given]:
            results[thread()] = result
            checked(*args, **kwargs)
            passed[given].add(kind)
        return result

    return called


def _kind(value: Any) -> object:
    """What the checks can see of a value; None if they see more of it than this function does."""
    kind = type(value)
    if kind is torch.Tensor:
        return value.dtype, value.shape
    if kind in (int, bool, str):  # sizes and literals
        return kind, value
    if kind not in _HOLDS_VALUES:
        _HOLDS_VALUES[kind] = issubclass(kind, Collection | Iterator) and not issubclass(kind, torch.Tensor)
    if not _HOLDS_VALUES[kind]:
        return (kind, value.dtype, value.shape) if isinstance(value, torch.Tensor) else kind
    if kind is dict:
        value = tuple(value.items())
    if not isinstance(value, tuple | list):
        return None
    held = tuple(map(_kind, value))
    return None if None in held else (kind, held)


_HOLDS_VALUES: dict[type, bool] = {}

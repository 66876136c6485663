"""Tasks of the package reasoning-gym: `reasoning-gym:NAME,size=…,seed=…` names one, and `NAME…#3` an entry of it."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import fields
from functools import lru_cache
from typing import Any

from kedge_base.errors import DataError, install_line
from kedge_base.texts import error_text

PREFIX = "reasoning-gym:"

APART = 1_000_000
"""Distance between seeds passed to the package, which makes row i from seed s + i, so that adjacent seeds would share
all rows but one.
"""


def find_entry(reference: str) -> tuple[str, Any, dict[str, Any]]:
    """Resolve a row's `entry` to the name of its task, the task, and the entry itself.

    Raises:
        DataError: There is no such entry.
    """
    source, _, index = reference.rpartition("#")
    if not source.startswith(PREFIX) or not index.isdecimal():
        raise DataError(f"{reference!r} is not the entry of a row of {PREFIX}NAME")
    task = open_task(source)
    if int(index) >= len(task):
        raise DataError(f"{reference!r}: the task has {len(task):,} entries")
    return _split(source)[0], task, open_entry(source, int(index))


@lru_cache(maxsize=32)
def open_task(source: str) -> Any:
    """Open the task that a source names: a sequence of entries, by default 500 with seed 0.

    Tasks with different seeds share rows only by coincidence.

    Raises:
        DataError: The package is not installed, or has no such task; a parameter is unknown, or its value is wrong.
    """
    try:
        from reasoning_gym.factory import DATASETS  # type: ignore[import-not-found]
    except ImportError as error:
        raise DataError(f"{source} needs the package reasoning-gym: {install_line('reasoning-gym')}") from error
    name, parameters = _split(source)
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the package has {len(DATASETS)} tasks"
        raise DataError(f"{source}: reasoning-gym has no task {name!r}; {hint}")
    kind, settings = DATASETS[name]
    known = {field.name: field.default for field in fields(settings)} | {"size": 500, "seed": 0}
    for key, value in parameters.items():
        if key not in known:
            raise DataError(f"{source}: {name} has no parameter {key!r}; it has {', '.join(known)}")
        wanted = type(known[key])
        if wanted in (bool, int, float, str) and type(value) not in ((float, int) if wanted is float else (wanted,)):
            raise DataError(f"{source}: {key}={value}: expected a value such as {known[key]}")
    if not 0 < (size := parameters.setdefault("size", 500)) <= APART:
        raise DataError(f"{source}: size={size}: expected 1 to {APART:,}")
    try:
        chosen = settings(**{**parameters, "seed": APART * parameters.get("seed", 0)})
        getattr(chosen, "validate", lambda: None)()  # a few settings have no `validate`
        return kind(config=chosen)
    except Exception as error:  # the package asserts, and a value of the wrong type can raise anything
        raise DataError(f"{source}: {error_text(error)}") from error


@lru_cache(maxsize=4096)
def open_entry(source: str, index: int) -> dict[str, Any]:
    """Return one entry of a task; raises the errors of `open_task`."""
    try:
        return open_task(source)[index]
    except DataError:
        raise
    except Exception as error:  # such as a seed that the task's generator rejects
        raise DataError(f"{source}: row {index}: {error_text(error)}") from error


def _split(source: str) -> tuple[str, dict[str, Any]]:
    """Split a source into the name of a task and its parameters; values are JSON or texts."""
    name, *parts = re.split(r",(?=[^,=]*=)", source.removeprefix(PREFIX))
    parameters = dict(part.split("=", 1) for part in parts)
    return name.strip(), {key.strip(): _value(text.strip()) for key, text in parameters.items()}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)

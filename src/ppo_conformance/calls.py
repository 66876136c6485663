"""Calls a method of an adapter with a case, and compares results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from ppo_conformance.protocol import CHOICES, METHODS, Array, Deviation, NotOffered, offered

TOLERANCES = {"float64": 1e-6, "float32": 1e-4}
"""Largest relative error by precision; in float64 it leaves room for an ε in a divisor."""

SMALL = 1e-3
"""Numbers below this share of the largest one, or of 1, are compared as if they had that size."""

_TYPES = {"mask": np.bool_, "valid": np.bool_, "tokens": np.int64, "groups": np.int64}


def require(adapter, values: Mapping[str, Any]) -> None:
    """Raise `NotOffered` unless the profile claims the value of every choice among these settings."""
    for name, value in values.items():
        # `micro_batches` and `ranks` are features, and lists in settings.
        if name in CHOICES and isinstance(value, str) and value not in offered(adapter, name):
            raise NotOffered(f"the profile does not claim {name}={value}")


def alternatives(
    adapter, case: Mapping[str, Any], needs: Mapping[str, str] | None = None
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The expectations of a case that the profile claims, each with the settings that it is for."""
    for expected in case["expected"]:
        settings = {**case["settings"], **expected["choices"]}
        with suppress(NotOffered):
            require(adapter, {**settings, **case.get("needs", {}), **(needs or {})})
            yield expected, settings


def call(adapter, method: str, inputs: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Array]:
    """Call a method, with the profile's default for every choice that is not in the settings.

    Returns:
        The outputs by name.

    Raises:
        NotOffered: the library or its profile lacks something.
        Deviation: there is another number of outputs, or one has another shape.
    """
    require(adapter, settings)
    described = METHODS[method]
    defaults = {name: offered(adapter, name)[0] for name in described.choices}
    arrays = [np.array(inputs[name], _TYPES.get(name, np.float64)) for name in described.inputs]
    axes = {
        letter: size
        for letters, array in zip(described.inputs.values(), arrays, strict=True)
        for letter, size in zip(letters, array.shape, strict=True)
    }
    found = adapter.call(method, arrays, {**defaults, **settings})
    found = found if isinstance(found, tuple) else (found,)
    if len(found) != len(described.outputs):
        raise Deviation(f"{method} returned {len(found)} outputs instead of {', '.join(described.outputs)}")
    outputs = {name: np.asarray(x, np.float64) for name, x in zip(described.outputs, found, strict=True)}
    for (name, array), letters in zip(outputs.items(), described.outputs.values(), strict=True):
        if array.shape != (shape := tuple(axes[letter] for letter in letters)):
            raise Deviation(f"{name} of {method} has the shape {array.shape} instead of {shape}")
    return outputs


def table(numbers) -> Array:
    """Nested lists as an array; None becomes NaN, which is not compared."""
    return np.array(numbers, dtype=np.float64)


def tolerance_of(adapter, topic: Mapping[str, Any]) -> float:
    """Largest relative error that is allowed in a topic."""
    return max(topic.get("tolerance", 0.0), TOLERANCES[offered(adapter, "precision")[0]])


def compare(
    expected: Mapping[str, Array], got: Mapping[str, Array], tolerance: float, message: str, unit: float | None = None
) -> float:
    """Return the largest error of all outputs: relative, or in a unit.

    Raises:
        Deviation: it is above the tolerance; at the place where it is largest.
    """
    worst = 0.0
    for name, numbers in expected.items():
        size = np.nan_to_num(np.abs(numbers))
        scale = np.maximum(size, SMALL * max(size.max(), 1.0)) if unit is None else unit
        errors = np.abs(got[name] - numbers) / scale
        errors = np.where(np.isnan(numbers), 0.0, np.where(np.isfinite(got[name]), errors, np.inf))
        place = np.unravel_index(int(errors.argmax()), errors.shape)
        error = float(errors[place])
        if error > tolerance:
            where = f"{name}[{', '.join(map(str, place))}]" if place else name
            largest_error = error if np.isfinite(error) else None  # JSON has no infinity
            raise Deviation(message, where, float(numbers[place]), float(got[name][place]), largest_error)
        worst = max(worst, error)
    return worst

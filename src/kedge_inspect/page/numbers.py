"""Prepares numbers and texts for the page: selects finite ones, rounds, thins, bins and shortens them."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

from kedge_inspect.record import is_number

Item = TypeVar("Item")
Reduce = Callable[[Sequence[float]], float]


def as_number(value: Any) -> float | None:
    """A finite number; None for null, booleans, text, NaN and infinity."""
    return float(value) if is_number(value) and math.isfinite(value) else None


def numbers_of(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """The finite values of one metric."""
    return [number for row in rows if (number := as_number(row.get(name))) is not None]


def rounded(value: Any, digits: int = 5) -> Any:
    """A nested value with all its floats rounded to significant digits, which halves the size of the page."""
    if isinstance(value, float):
        short = float(f"{value:.{digits}g}") if math.isfinite(value) else None
        return int(short) if short is not None and short.is_integer() and abs(short) < 1e15 else short
    if isinstance(value, dict):
        return {name: rounded(entry, digits) for name, entry in value.items()}
    return [rounded(entry, digits) for entry in value] if isinstance(value, (list, tuple)) else value


def evenly_spaced(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` of the items, evenly spaced, including the first and the last."""
    last = len(items) - 1
    if last < most:
        return list(items)
    if most == 1:
        return [items[last]]
    return [items[at] for at in sorted({round(place * last / (most - 1)) for place in range(most)})]


def blocks(items: Sequence[Item], most: int) -> list[Sequence[Item]]:
    """The items in at most `most` consecutive blocks, all but the last of equal length."""
    length = max(1, math.ceil(len(items) / most))
    return [items[start : start + length] for start in range(0, len(items), length)]


def histogram(quantiles: Sequence[float], edges: Sequence[float]) -> list[float]:
    """The share of a distribution in each bin, interpolated linearly between its quantiles.

    Args:
        quantiles: Equally spaced quantiles from the minimum to the maximum.
        edges: Edges of the bins, ascending.

    Returns:
        One share per bin; they sum to 1 if the edges cover the distribution.
    """
    shares = [_share_up_to(edge, quantiles) for edge in edges]
    if edges[0] <= quantiles[0]:
        shares[0] = 0.0
    return [after - before for before, after in pairwise(shares)]


def _share_up_to(place: float, quantiles: Sequence[float]) -> float:
    # Equal quantiles are a point mass, which counts starting at its value.
    above = bisect_right(quantiles, place)
    if above in (0, len(quantiles)):
        return float(above > 0)
    start, end = quantiles[above - 1 : above + 1]
    return (above - 1 + (place - start) / (end - start)) / (len(quantiles) - 1)


MOST_CHARACTERS = 6000


def fitting(rows: Sequence[dict[str, Any]], most_bytes: int) -> list[dict[str, Any]]:
    """Return all rows, or as many evenly spaced ones as fit.

    Args:
        rows: Rows in JSON types.
        most_bytes: Size limit of their JSON.
    """
    size = sum(len(json.dumps(row)) for row in rows)
    most = len(rows) if size <= most_bytes else max(1, len(rows) * most_bytes // size)
    return evenly_spaced(rows, most)


def shortened(text: str) -> str:
    """The text, or the end of one that is too long for the page."""
    return text if len(text) <= MOST_CHARACTERS else f"…{text[-MOST_CHARACTERS:]}"


def shares(values: Sequence[float], edges: Sequence[float]) -> list[float]:
    """The share of the values in each bin; a value on an edge belongs to the upper bin."""
    places = [bisect_right(edges, value) for value in values]
    return [places.count(place) / len(values) for place in range(1, len(edges))]


def distributions(
    named: Mapping[str, Sequence[float | None] | None],
    *,
    in_bins: Callable[[Sequence[float], Sequence[float]], list[float]] = shares,
    num_bins: int = 24,
) -> dict[str, Any] | None:
    """The share of each series in shared bins, with its median; None without values.

    Args:
        named: Values by the name of their series; None is ignored, and series without values are left out.
        in_bins: The share in each bin between some edges: `shares` of values, `histogram` of quantiles.
        num_bins: Number of bins.
    """
    every = {name: [value for value in values or () if value is not None] for name, values in named.items()}
    known = {name: values for name, values in every.items() if values}
    if not known:
        return None
    low = min(min(values) for values in known.values())
    high = max(max(values) for values in known.values())
    margin = (high - low) / num_bins or 0.5
    start = low - margin / 2
    end = high + margin / 2
    edges = [*(start + place * ((end - start) / num_bins) for place in range(num_bins)), end]
    drawn = {
        name: {"shares": in_bins(values, edges), "median": float(median(values))} for name, values in known.items()
    }
    return rounded({"edges": edges, "named": [{"name": name, **each} for name, each in drawn.items()]})

"""Histograms of values over shared bins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from kedge.inspect.page.numbers import rounded

__all__ = ["distributions"]

NUM_BINS = 24


def distributions(named: Mapping[str, Sequence[float]]) -> dict[str, Any] | None:
    """The share of each series in shared bins, with its median; None if there are no values.

    Args:
        named: Values by the name of their series; series without values are left out.
    """
    known = {name: values for name, values in named.items() if values}
    if not known:
        return None
    low = min(min(values) for values in known.values())
    high = max(max(values) for values in known.values())
    margin = (high - low) / NUM_BINS or 0.5
    edges = np.linspace(low - margin / 2, high + margin / 2, NUM_BINS + 1)
    return {
        "edges": rounded(edges.tolist()),
        "named": [
            {
                "name": name,
                "shares": rounded((np.histogram(values, edges)[0] / len(values)).tolist()),
                "median": rounded(float(median(values))),
            }
            for name, values in known.items()
        ],
    }

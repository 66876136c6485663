"""Tables from Python: of `datasets`, pandas, polars and Arrow, without importing any of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kedge.errors import DataError

__all__ = ["is_missing", "plain_value", "table_rows"]

_DEEPEST = 16
"""Levels of a value that are searched for arrays: in contents of messages they are four levels deep."""


def table_rows(data: Any, name: str) -> Iterable[Any]:
    """The rows of a table that was passed from Python; any other iterable is its own rows.

    Args:
        data: a list of rows, a `Dataset`, an `IterableDataset`, a `DatasetDict` (its split `train`, or its only one) or
            a DataFrame or Arrow table; of a pandas DataFrame, missing values are left out of their rows.
        name: what it is, for errors.

    Raises:
        DataError: It is no table, or has several splits and none is called `train`.
    """
    if isinstance(data, Mapping) and type(data).__name__ in ("DatasetDict", "IterableDatasetDict"):
        splits = list(data)
        if "train" in data or len(splits) == 1:
            return data["train" if "train" in data else splits[0]]
        raise DataError(f"{name} has several splits ({', '.join(map(str, splits))}); pass one of them")
    to_dict: Any = getattr(data, "to_dict", None)
    if type(data).__module__.partition(".")[0] == "pandas" and hasattr(data, "columns"):
        rows: list[dict[str, Any]] = to_dict("records")
        # A missing value is NaN, the only value that differs from itself.
        return [{key: value for key, value in row.items() if not is_missing(value)} for row in rows]
    for method in ("to_dicts", "to_pylist"):  # polars, Arrow
        if hasattr(data, method) and hasattr(data, "columns"):
            return getattr(data, method)()
    if isinstance(data, (Mapping, str)) or not isinstance(data, Iterable):
        raise DataError(
            f"{name} must be a file, a hub id, a list of rows, a Dataset or a DataFrame, not a {type(data).__name__}"
        )
    return data


def plain_value(value: Any, deepest: int = _DEEPEST) -> Any:
    """A value with its arrays and tensors as lists, and their scalars as numbers.

    Rows of a DataFrame that was read from Parquet hold lists as arrays, and so do formatted data sets.
    """
    if not deepest:
        return value
    if hasattr(value, "tolist"):
        return plain_value(value.tolist(), deepest - 1)
    if isinstance(value, dict):
        return {key: plain_value(entry, deepest - 1) for key, entry in value.items()}
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], (str, int, float)):
        return [plain_value(entry, deepest - 1) for entry in value]
    return value


def is_missing(value: object) -> bool:
    """Tell a missing value: null, and what tables write in its place (NaN, NaT, NA)."""
    return (
        value is None or (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")
    )

"""Tables from Python: rows of a `DatasetDict` or of a pandas DataFrame, without importing either library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kedge.errors import DataError

__all__ = ["table_rows"]


def table_rows(data: Any, name: str) -> Iterable[Any]:
    """The rows of a table that was passed from Python; any other iterable is its own rows.

    Args:
        data: a list of rows, a `Dataset`, an `IterableDataset`, a `DatasetDict` (its split `train`, or its only one) or
            a DataFrame, whose missing values are left out of their rows.
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
        return [{key: value for key, value in row.items() if not _is_missing(value)} for row in rows]
    if isinstance(data, (Mapping, str)) or not isinstance(data, Iterable):
        raise DataError(
            f"{name} must be a file, a hub id, a list of rows, a Dataset or a DataFrame, not a {type(data).__name__}"
        )
    return data


def _is_missing(value: Any) -> bool:
    return (
        value is None or (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")
    )

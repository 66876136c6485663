"""The names of a reward's terms in metrics and messages, for scoring, for checks of a configuration and for reports."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from kedge_base.texts import JUDGE, names_function, names_judge


def is_function(source: str) -> bool:
    """True if a term's source is a Python function, by its name, and no model's folder has that name."""
    return names_function(source) and not os.path.isdir(source)


def source_name(source: str) -> str:
    """The default name of a term: that of its function or judge, or of its model's folder."""
    if names_judge(source):
        return source.removeprefix(JUDGE).partition("@http")[0].rpartition("/")[2]
    return source.rpartition(":")[2] if is_function(source) else Path(source).name


def distinct_names(names: Sequence[str]) -> list[str]:
    """The names of all terms, in their order; repeated ones get a number that makes them distinct."""
    distinct: list[str] = []
    for name in names:
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        used = {*distinct, *names}
        distinct.append(name if name not in distinct else next(each for each in numbered if each not in used))
    return distinct

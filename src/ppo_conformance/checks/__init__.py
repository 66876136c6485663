"""The checks. Every module of this package has a function `checks()` that returns its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One check on one case.

    Attributes:
        id: of the check, such as `vector/gae`.
        case: name of the case, unique within the check.
        purpose: what it is for, in one line.
        run: calls the adapter; raises `Deviation`, or `NotOffered` where the library lacks something or its profile
            does not claim it. It may return the largest relative error that it saw.
    """

    id: str
    case: str
    purpose: str
    run: Callable[[Any], float | None]

    @property
    def name(self) -> str:
        """The check and its case, such as `vector/gae:truncated`, as `--only` and the reports name it."""
        return f"{self.id}:{self.case}"


def all_checks() -> list[Check]:
    """Collect the checks of every module."""
    from ppo_conformance.checks import metamorphic, tokens, update, vectors  # which import this module

    return [check for module in (metamorphic, tokens, update, vectors) for check in module.checks()]

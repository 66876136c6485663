"""A mutation of the source that kedge's tests must detect."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Mutation"]


@dataclass(frozen=True)
class Mutation:
    """One mistake.

    Attributes:
        name: What goes wrong, in kebab case.
        file: Where, under `src/kedge`.
        original: The text to be replaced; it occurs exactly once in the file.
        mutated: What stands there instead.
        test: The pytest node id of the test that fails then.
    """

    name: str
    file: str
    original: str
    mutated: str
    test: str

"""Known bugs of public trainers, as patches of the reference trainer: each shows which checks would have found it.

A bug is a function that takes the place of one method of the reference adapter. It gets that method and its arguments;
its docstring says what was wrong. Bugs that are not re-made are listed in `not_remade.tsv`, with the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ppo_conformance.adapters.reference import Adapter
from ppo_conformance.checks import Check, all_checks
from ppo_conformance.protocol import Deviation, NotOffered

NOT_REMADE = Path(__file__).parent / "not_remade.tsv"


@dataclass(frozen=True)
class Bug:
    """A bug of a public trainer.

    Attributes:
        number: of the bug.
        thread: where it was reported or mended.
        what: what was wrong.
        method: of the reference adapter, whose place it takes.
        patch: the function in its place.
        found_by: the checks that should find it.
    """

    number: int
    thread: str
    what: str
    method: Callable[..., Any]
    patch: Callable[..., Any]
    found_by: tuple[str, ...]

    def red(self, checks: Iterable[Check]) -> Iterator[tuple[Check, Deviation]]:
        """The checks that find it in the reference adapter, with the deviation."""

        def replaced(adapter: Adapter, *given: Any) -> Any:
            return self.patch(partial(self.method, adapter), *given)

        adapter = type("Adapter", (Adapter,), {self.method.__name__: replaced})()
        for check in checks:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    check.run(adapter)
            except NotOffered:
                pass
            except Deviation as deviation:
                yield check, deviation


BUGS: list[Bug] = []


def bug(method: Callable[..., Any], found_by: str, *threads: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as a bug.

    Args:
        method: the method whose place it takes.
        found_by: the checks that are meant for it, separated by spaces.
        threads: of every trainer that had it: the bug's number, and the address below github.com.
    """

    def register(patch: Callable[..., Any]) -> Callable[..., Any]:
        for thread in threads:
            number, address = thread.split()
            link, what = f"https://github.com/{address}", str(patch.__doc__)
            BUGS.append(Bug(int(number), link, what, method, patch, tuple(found_by.split())))
        return patch

    return register


def all_bugs() -> list[Bug]:
    """Every bug that is re-made."""
    from ppo_conformance.bugs import remade  # noqa: F401  # which registers them

    return sorted(BUGS, key=lambda each: each.number)


def main(_: object) -> int:
    """Print each bug with the checks that find it, and the first deviation; 1 if one is not found by those meant."""
    findings: dict[Any, list[tuple[Check, Deviation]]] = {}
    checks, missed = all_checks(), False
    for each in all_bugs():
        if each.patch not in findings:  # some bugs occurred in several trainers
            of_tokens = each.method.__qualname__.startswith("Conversations")  # these share no code with the others
            findings[each.patch] = list(each.red(c for c in checks if c.id.startswith("tokens/") == of_tokens))
        ids = dict.fromkeys(check.id for check, _ in findings[each.patch])
        print(f"{each.number} {each.thread}\n    {each.what}\n    found by {', '.join(ids) or 'no check'}")
        if missing := sorted({*each.found_by} - ids.keys()):
            print(f"    MISSED by {', '.join(missing)}")
            missed = True
        for check, deviation in findings[each.patch][:1]:
            print(f"    {check.name}: {deviation}")
    for line in NOT_REMADE.read_text("utf-8").splitlines():
        print("{} {}\n    not re-made: {}".format(*line.split("\t")))
    return int(missed)

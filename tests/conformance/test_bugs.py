"""Every known bug that is re-made turns the checks red that are meant for it."""

import pytest

from ppo_conformance.bugs import NOT_REMADE, Bug, all_bugs
from ppo_conformance.checks import Check, all_checks
from ppo_conformance.reference.trainer import Trainer

BUGS = all_bugs()
PATCHES = {bug.patch.__name__: bug for bug in BUGS}  # some bugs occurred in several trainers
CHECKS = all_checks()


def is_red(bug: Bug, id: str) -> bool:
    """True if the check finds the bug in any of its cases."""
    return any(list(bug.red([check])) for check in CHECKS if check.id == id)


@pytest.mark.parametrize("name", PATCHES)
def test_a_known_bug_is_found_by_the_checks_that_are_meant_for_it(name):
    bug = PATCHES[name]
    assert {id: is_red(bug, id) for id in bug.found_by} == dict.fromkeys(bug.found_by, True)


def test_every_known_bug_is_remade_or_says_why_not():
    left_out = [line.split("\t") for line in NOT_REMADE.read_text("utf-8").splitlines()]
    assert sorted([bug.number for bug in BUGS] + [int(number) for number, _, _ in left_out]) == list(range(1, 52))
    assert all(bug.what.endswith(".") and "\n" not in bug.what for bug in BUGS)


def test_an_error_is_no_finding():
    def broken(self: object, *_: object) -> object:
        raise ZeroDivisionError

    check = Check("update/ppo", "whole", "", lambda adapter: adapter.update({}))
    with pytest.raises(ZeroDivisionError):
        list(Bug(0, "", "", Trainer.update, broken, ()).red([check]))

"""Whole updates of kedge in the conformance suite: all that it offers conforms."""

from __future__ import annotations

import pytest

from ppo_conformance.adapters.kedge import Adapter
from ppo_conformance.checks import Check, update
from ppo_conformance.protocol import NotOffered

KEDGE = Adapter()
NOT_OFFERED = {"update/ppo_cut_off:whole", "update/padding:ppo_cut_off", "update/padding:grpo"}
IN_MAKE_TEST = {
    *("update/ppo:whole", "update/grpo:whole", "update/reward_model:whole", "update/sft:whole"),
    *("update/split:ppo", "update/padding:rloo", "update/shared_prompts:ppo", "update/ranks:grpo", "update/resume:ppo"),
}


def marked(check: Check) -> object:
    return pytest.param(check, id=check.name, marks=() if check.name in IN_MAKE_TEST else pytest.mark.slow)


@pytest.mark.parametrize("check", [marked(check) for check in update.checks()])
def test_an_update_of_kedge_conforms(check: Check) -> None:
    if check.name in NOT_OFFERED:
        with pytest.raises(NotOffered):
            check.run(KEDGE)
    else:
        error = check.run(KEDGE)
        assert error is not None
        assert error < 1e-10

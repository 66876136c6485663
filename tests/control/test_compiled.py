"""The compiled update against the update that it stands for, which other tests compare with slow loops."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from kedge.training.update import UpdateResult
from kedge_base.errors import NumericsError
from kedge_control.compiled import CompiledUpdate
from kedge_control.stage.parts import has_compiler
from tests.control.two_sides import LOSSES, Side, eager, maker, play, take

# A compiled step's settings are tensors, where the signatures that tests check say numbers.
pytestmark = pytest.mark.usefixtures("unchecked")

# Rounding of one step, which Adam's division can turn into a larger part of a weight's first changes.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def compiled(side: Side, make: Any) -> CompiledUpdate:
    """An update with steps that are the function that is compiled in a run, as Python runs it."""
    return CompiledUpdate(side.learner, side.optimizer, make, lambda step: step)


def assert_equal_results(one: UpdateResult, other: UpdateResult) -> None:
    assert (one.num_steps, one.num_gradients, one.reductions) == (
        other.num_steps,
        other.num_gradients,
        other.reductions,
    )
    for ours, theirs in zip(one.steps, other.steps, strict=True):
        assert list(ours) == list(theirs)
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    assert one.metrics() == pytest.approx(other.metrics(), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("share_trunk", [False, True])
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_the_step_is_the_updates_own(name: str, share_trunk: bool, loss: str) -> None:
    ours, experience = play(name, share_trunk=share_trunk)
    theirs, make = ours.copy(), maker(loss, value_clip_range=0.2)
    update = compiled(ours, make)
    for number in range(2):
        one = take(update, ours, experience, {}, number)
        assert not update.failed
        assert_equal_results(one, take(eager(theirs), theirs, experience, make(), number))
    for tensor, expected in zip(ours.tensors(), theirs.tensors(), strict=True):
        torch.testing.assert_close(tensor, expected, **CLOSE)


def compile_in_earnest(backend: str, *kinds: str) -> None:
    words = [sys.executable, "-m", "tests.control.two_sides", backend, *kinds]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=900, stdin=subprocess.DEVNULL)
    for kind, found in json.loads(done.stdout.splitlines()[-1]).items():
        assert (found["graphs"], found["failed"]) == (1, False), kind
        assert found["away"] < 1e-4, kind


def test_one_graph_serves_all_rates_and_coefficients() -> None:
    compile_in_earnest("eager", "a number within bounds", "several choices")


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler is installed")
def test_machine_code_does_what_the_graph_says_for_every_kind_of_action() -> None:
    compile_in_earnest("inductor")


def test_a_value_that_is_not_finite_is_found_by_the_repeated_update() -> None:
    ours, experience = play("CartPole-v1")
    make = maker(whitens_minibatches=False)
    update = compiled(ours, make)
    take(update, ours, experience, {}, 0)
    theirs = ours.copy()
    experience.advantages[17] = torch.nan
    with pytest.raises(NumericsError) as found:
        take(update, ours, experience, {}, 1)
    with pytest.raises(NumericsError) as expected:
        take(eager(theirs), theirs, experience, make(), 1)
    assert str(found.value) == str(expected.value)
    assert "response 17" in str(found.value)
    for tensor, old in zip(ours.tensors(), theirs.tensors(), strict=True):
        assert torch.equal(tensor, old)


def test_a_failed_compilation_is_one_line_and_costs_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    ours, experience = play("CartPole-v1")
    theirs, make = ours.copy(), maker()

    def no_compiler(step: Any) -> Any:
        raise RuntimeError("no C++ compiler\nand a long story")

    update = CompiledUpdate(ours.learner, ours.optimizer, make, no_compiler)
    for number in range(2):
        take(update, ours, experience, {}, number)
        take(eager(theirs), theirs, experience, make(), number)
    assert capsys.readouterr().err.count("could not be compiled and runs without: no C++ compiler\n") == 1
    for tensor, expected in zip(ours.tensors(), theirs.tensors(), strict=True):
        assert torch.equal(tensor, expected)


def test_an_optimizers_state_goes_from_one_to_the_other_and_back() -> None:
    ours, experience = play("Pendulum-v1")
    theirs, make = ours.copy(), maker()
    for number in range(4):
        # Every update in another process, so to speak: the state is restored into new tensors.
        ours, theirs = ours.copy(), theirs.copy()
        if number % 2:
            take(compiled(ours, make), ours, experience, {}, number)
        else:
            take(eager(ours), ours, experience, make(), number)
        take(eager(theirs), theirs, experience, make(), number)
    for tensor, expected in zip(ours.tensors(), theirs.tensors(), strict=True):
        torch.testing.assert_close(tensor, expected, **CLOSE)

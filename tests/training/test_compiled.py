"""The compiled update against the update that it stands for, which other tests compare with slow loops."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from kedge.errors import NumericsError
from kedge.gym.experience import ControlExperience
from kedge.stages.control.compiling import has_compiler
from kedge.training.compiled import CompiledUpdate
from kedge.training.compiled_step import Step
from kedge.training.update import UpdateResult
from tests.training.two_sides import LOSSES, Side, eager, objective_of, play, take

# A compiled step's settings are tensors, where the signatures that tests check say numbers.
pytestmark = pytest.mark.usefixtures("unchecked")

# Rounding of one step, which Adam's division can turn into a larger part of a weight's first changes.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def compiled(side: Side) -> CompiledUpdate[ControlExperience]:
    """An update whose steps are the function that is compiled in a run, as Python runs it."""
    return CompiledUpdate(side.learner, side.policy, side.optimizer, pytest.fail, lambda step: step)


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
    for ours, theirs in zip(one.passes, other.passes, strict=True):
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, **CLOSE)
        torch.testing.assert_close(ours.entropies, theirs.entropies, **CLOSE)
        assert bool(ours.visited.all())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("share_trunk", [False, True])
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_the_step_is_the_updates_own(name: str, share_trunk: bool, loss: str) -> None:
    ours, experience = play(name, share_trunk=share_trunk)
    theirs, objective = ours.copy(), objective_of(LOSSES[loss], value_clip_range=0.2)
    update = compiled(ours)
    for number in range(2):
        one = take(update, ours, experience, objective, number)
        assert_equal_results(one, take(eager(theirs), theirs, experience, objective, number))
    for tensor, expected in zip(ours.tensors(), theirs.tensors(), strict=True):
        torch.testing.assert_close(tensor, expected, **CLOSE)


def compile_in_earnest(backend: str) -> None:
    words = [sys.executable, "-m", "tests.training.two_sides", backend]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=900, stdin=subprocess.DEVNULL)
    for kind, found in json.loads(done.stdout.splitlines()[-1]).items():
        assert (found["graphs"], found["said"]) == (1, []), kind
        assert found["away"] < 1e-4, kind


def test_one_graph_serves_all_rates_and_coefficients() -> None:
    compile_in_earnest("eager")


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler is installed")
def test_machine_code_does_what_the_graph_says() -> None:
    compile_in_earnest("inductor")


def test_a_value_that_is_not_finite_is_found_by_the_repeated_update() -> None:
    ours, experience = play("CartPole-v1")
    objective = objective_of(whitens_minibatches=False)
    update = compiled(ours)
    take(update, ours, experience, objective, 0)
    theirs = ours.copy()
    experience.advantages[17] = torch.nan
    with pytest.raises(NumericsError) as found:
        take(update, ours, experience, objective, 1)
    with pytest.raises(NumericsError) as expected:
        take(eager(theirs), theirs, experience, objective, 1)
    assert str(found.value) == str(expected.value)
    assert "response 17" in str(found.value)
    for tensor, old in zip(ours.tensors(), theirs.tensors(), strict=True):
        assert torch.equal(tensor, old)


def test_what_cannot_be_compiled_is_said_once_and_done_without() -> None:
    ours, experience = play("CartPole-v1")
    theirs, objective, said = ours.copy(), objective_of(), []

    def no_compiler(step: Step) -> Step:
        raise RuntimeError("no C++ compiler\nand a long story")

    update = CompiledUpdate(ours.learner, ours.policy, ours.optimizer, said.append, no_compiler)
    for number in range(2):
        take(update, ours, experience, objective, number)
        take(eager(theirs), theirs, experience, objective, number)
    assert said == ["the update could not be compiled and runs without: no C++ compiler"]
    for tensor, expected in zip(ours.tensors(), theirs.tensors(), strict=True):
        assert torch.equal(tensor, expected)


def test_an_optimizers_state_goes_from_one_to_the_other_and_back() -> None:
    ours, experience = play("Pendulum-v1")
    theirs, objective = ours.copy(), objective_of()
    for number in range(4):
        # Every update in another process, so to speak: the state is restored into new tensors.
        ours, theirs = ours.copy(), theirs.copy()
        take(compiled(ours) if number % 2 else eager(ours), ours, experience, objective, number)
        take(eager(theirs), theirs, experience, objective, number)
    for tensor, expected in zip(ours.tensors(), theirs.tensors(), strict=True):
        torch.testing.assert_close(tensor, expected, **CLOSE)

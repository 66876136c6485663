"""An optimizer whose state is in the host's memory takes the same steps to the bit, a few parameters at a time."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from kedge.training.checkpoint.state import optimizer_state, restore_optimizer
from kedge.training.host_state import HostState, unwrapped
from kedge.training.optimizer import build_optimizer
from kedge.training.optimizer_kinds import OptimizerKind, state_bytes

has_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="muon needs torch 2.9")
KINDS = [pytest.param(kind, marks=has_muon if kind == "muon" else ()) for kind in get_args(OptimizerKind)]
SIZES = ((70, 70), (16, 300), (70,), (3, 5), (4500,))


def parameters_of_its_own() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]


def built(parameters: list[nn.Parameter], kind: OptimizerKind = "adamw", **settings: Any) -> Any:
    inner = [each for each in parameters if each.ndim == 2]
    return build_optimizer(parameters, kind=kind, learning_rate=0.01, inner_matrices=inner, **settings)


def take_steps(optimizer: Any, parameters: list[nn.Parameter], first: int, last: int) -> None:
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        for index, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if index == 3 and step == 2 else gradient  # a critic's, while it is not trained
        optimizer.step()


class Memory:
    """Stands for the host's memory: what was copied there last of each tensor, and the bytes that are elsewhere."""

    def __init__(self) -> None:
        self.copies: list[Tensor] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        if not any(tensor is each for each in self.copies):
            tensor = tensor.clone()
            self.copies.append(tensor)
        return tensor

    def holds(self, optimizer: HostState) -> bool:
        entries = [each for state in optimizer.state.values() for key, each in state.items() if "qmap" not in key]
        large = [each for each in entries if isinstance(each, Tensor) and each.numel() > 1]
        assert large
        return all(any(each is copy for copy in self.copies) for each in large)


@pytest.mark.parametrize("at_a_time", [1, 30_000, 2**28])
@pytest.mark.parametrize(
    ("kind", "mode"), [*(pytest.param(*each.values, "torch", marks=each.marks) for each in KINDS), ("adamw", "tf1")]
)
def test_steps_are_the_same_to_the_bit(kind: OptimizerKind, mode: Any, at_a_time: int) -> None:
    plain, ours = parameters_of_its_own(), parameters_of_its_own()
    memory = Memory()
    one = built(plain, kind, adam_eps_mode=mode)
    other = HostState(built(ours, kind, adam_eps_mode=mode), at_a_time=at_a_time, to_host=memory)
    take_steps(one, plain, 1, 4)
    take_steps(other, ours, 1, 4)
    assert all(torch.equal(first, second) for first, second in zip(plain, ours, strict=True))
    assert memory.holds(other)
    tensors, groups = optimizer_state(other)
    expected, expected_groups = optimizer_state(one)
    assert groups == expected_groups
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_is_restored_into_either(kind: OptimizerKind) -> None:
    plain = parameters_of_its_own()
    one = built(plain, kind)
    take_steps(one, plain, 1, 2)
    tensors, groups = optimizer_state(one)
    ours = [nn.Parameter(each.detach().clone()) for each in plain]
    memory = Memory()
    other = HostState(built(ours, kind), at_a_time=30_000, to_host=memory)
    restore_optimizer(other, {name: each.clone() for name, each in tensors.items()}, groups)
    assert memory.holds(other)
    take_steps(one, plain, 3, 4)
    take_steps(other, ours, 3, 4)
    assert all(torch.equal(first, second) for first, second in zip(plain, ours, strict=True))
    assert list(state_bytes(unwrapped(other)).values()) == list(state_bytes(one).values())


def test_the_state_of_a_few_parameters_is_on_the_device_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = parameters_of_its_own()
    optimizer, most = HostState(built(ours), at_a_time=20_000), []
    step = optimizer.inner.step
    monkeypatch.setattr(
        optimizer.inner, "step", lambda: (most.append([each for each in ours if each.grad is not None]), step())
    )
    take_steps(optimizer, ours, 1, 1)
    # Matrices come first: 70 × 70; 16 × 300 and 3 × 5, then the vector of 70; the one of 4,500.
    assert [sum(each.nbytes for each in part) for part in most] == [19_600, 19_540, 18_000]
    assert sorted(id(each) for part in most for each in part) == sorted(map(id, ours))


def test_gradients_are_there_after_a_step_and_after_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = parameters_of_its_own()
    optimizer = HostState(built(ours), at_a_time=20_000)
    take_steps(optimizer, ours, 1, 1)
    gradients = [each.grad for each in ours]
    assert all(each is not None for each in gradients)

    def fail() -> None:
        raise MemoryError

    monkeypatch.setattr(optimizer.inner, "step", fail)
    with pytest.raises(MemoryError):
        optimizer.step()
    assert all(each.grad is gradient for each, gradient in zip(ours, gradients, strict=True))
    optimizer.zero_grad()
    assert all(each.grad is None for each in ours)


def test_it_is_what_is_built_for_offloading() -> None:
    assert isinstance(built(parameters_of_its_own(), offload=True), HostState)

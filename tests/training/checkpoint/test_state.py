"""A run resumed from a checkpoint is bit-identical to an uninterrupted one."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import AdamW

from kedge.training.checkpoint.state import (
    module_tensors,
    optimizer_state,
    restore_module,
    restore_optimizer,
)
from kedge.training.checkpoint.store import newest_valid, save_checkpoint
from kedge.training.optimizer import AdamEpsMode, build_optimizer, clip_gradients, set_learning_rate
from kedge.training.optimizer_kinds import OptimizerKind, state_bytes
from kedge_base.errors import ModelError
from kedge_base.generators import random_state, restore_random_state

AVAILABLE = [kind for kind in get_args(OptimizerKind) if kind != "muon" or hasattr(torch.optim, "Muon")]


class Tied(nn.Module):
    """Shaped like a language model: tied embedding and output, a norm, a head, a changing buffer."""

    def __init__(self, seed: int, dtype: torch.dtype, width: int = 6) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Embedding(11, width)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, 11, bias=False)
        self.output.weight = self.embedding.weight
        self.head = nn.Linear(width, 1)
        self.late = nn.Linear(width, width)
        self.inner = nn.Linear(width, width)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.to(dtype)

    def forward(self, ids: torch.Tensor, *, with_late: bool) -> torch.Tensor:
        hidden = self.norm(self.embedding(ids))
        self.steps.add_(1)
        hidden = self.inner(self.late(hidden) if with_late else hidden)
        return self.output(hidden).float().logsumexp(-1).mean() + self.head(hidden).float().pow(2).mean()


class Run:
    """Model, optimizer and random stream, created deterministically."""

    def __init__(
        self,
        seed: int,
        mode: AdamEpsMode,
        dtype: torch.dtype = torch.float32,
        kind: OptimizerKind = "adamw",
        width: int = 6,
        **settings: float,
    ) -> None:
        self.model = Tied(seed, dtype, width)
        self.generator = torch.Generator().manual_seed(seed)
        head = list(self.model.head.parameters())
        self.optimizer = build_optimizer(
            self.model.parameters(), head_parameters=head, head_rate=10.0, learning_rate=0.01, adam_eps_mode=mode,
            kind=kind, inner_matrices=[self.model.late.weight, self.model.inner.weight],
            **{"weight_decay": 0.1, "adam_eps": 1e-3, **settings},
        )  # fmt: skip

    def train(self, first: int, last: int) -> list[float]:
        """Run updates `first` to `last`; some parameters get no gradient, hence no moments, before the fifth."""
        losses = []
        for update in range(first, last + 1):
            set_learning_rate(self.optimizer, 0.02 / update)
            self.optimizer.zero_grad()
            ids = torch.randint(0, 11, (4, 5), generator=self.generator)
            loss = self.model(ids, with_late=update >= 5)
            loss.backward()
            clip_gradients(self.model.parameters(), 1.0)
            self.optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [each for group in self.optimizer.param_groups for each in group["params"]]

    def save(self, folder: Path, update: int) -> None:
        moments, groups = optimizer_state(self.optimizer)
        tensors = {
            "model": module_tensors(self.model),
            "optimizer": moments,
            "random": {"ids": self.generator.get_state()},
        }
        save_checkpoint(
            folder, update=update, kind="sft", fingerprint={}, tensors=tensors, state={"optimizer": groups}, keep=1
        )

    def load(self, folder: Path) -> int:
        found = newest_valid(folder, on_rejected=print)
        assert found is not None
        restore_module(self.model, found.tensors("model"))
        restore_optimizer(self.optimizer, found.tensors("optimizer"), found.state["optimizer"])
        self.generator.set_state(found.tensors("random")["ids"])
        return found.update


def assert_same_bits(one: Run, other: Run) -> None:
    weights, others = module_tensors(one.model), module_tensors(other.model)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    state, other_state = one.optimizer.state_dict(), other.optimizer.state_dict()
    assert state["param_groups"] == other_state["param_groups"]
    assert state["state"].keys() == other_state["state"].keys()
    assert [one.optimizer.state[each].keys() for each in one.parameters] == [
        other.optimizer.state[each].keys() for each in other.parameters
    ]
    for weight, twin in zip(one.parameters, other.parameters, strict=True):
        for key, tensor in one.optimizer.state[weight].items():
            again = other.optimizer.state[twin][key]
            if not isinstance(tensor, torch.Tensor):
                assert (type(tensor), tensor) == (type(again), again)
                continue
            assert (tensor.dtype, tensor.device) == (again.dtype, again.device)
            assert torch.equal(tensor, again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["torch", "tf1"])
@pytest.mark.parametrize(("before", "after"), [(1, 6), (4, 4), (7, 3)])
def test_two_parts_are_the_whole(tmp_path, mode, dtype, before, after):
    whole, first, second = Run(0, mode, dtype), Run(0, mode, dtype), Run(1, mode, dtype)
    losses = whole.train(1, before + after)
    begun = first.train(1, before)
    first.save(tmp_path, before)
    assert second.train(1, 6) != losses[:6]  # loading must discard all this, including the moments of `late`
    assert second.load(tmp_path) == before
    assert begun + second.train(before + 1, before + after) == losses
    assert_same_bits(whole, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", AVAILABLE)
@pytest.mark.parametrize(("before", "after"), [(4, 4), (7, 3)])
def test_two_parts_are_the_whole_with_every_optimizer(tmp_path, kind, dtype, before, after):
    # A width of 70 makes matrices that are large enough for moments in 8 bits, in blocks of which the last is smaller.
    whole, first, second = (Run(seed, "torch", dtype, kind, width=70) for seed in (0, 0, 1))
    losses = whole.train(1, before + after)
    begun = first.train(1, before)
    first.save(tmp_path, before)
    second.train(1, 6)
    assert second.load(tmp_path) == before
    assert begun + second.train(before + 1, before + after) == losses
    assert_same_bits(whole, second)
    kept = sum(path.stat().st_size for path in tmp_path.rglob("optimizer.safetensors"))
    if before > 4 and kind != "adafactor":  # of whose file the header is the largest part
        assert kept == pytest.approx(sum(state_bytes(second.optimizer).values()), rel=0.2)


@pytest.mark.skipif("muon" not in AVAILABLE, reason="muon needs torch 2.9")
def test_two_optimizers_as_one_have_one_state_dict():
    run, other = Run(0, "torch", kind="muon"), Run(1, "torch", kind="muon")
    run.train(1, 6)
    state = run.optimizer.state_dict()
    assert [number for group in state["param_groups"] for number in group["params"]] == list(range(len(run.parameters)))
    assert sorted(state["state"]) == list(range(len(run.parameters)))
    other.optimizer.load_state_dict(copy.deepcopy(state))
    restore_module(other.model, module_tensors(run.model))
    assert_same_bits(run, other)


def test_saving_changes_nothing(tmp_path):
    whole, saved = Run(0, "tf1"), Run(0, "tf1")
    losses = whole.train(1, 6)
    start = saved.train(1, 3)
    saved.save(tmp_path, 3)
    assert start + saved.train(4, 6) == losses
    assert_same_bits(whole, saved)


def test_a_tied_weight_is_saved_once_and_stays_tied(tmp_path):
    run = Run(0, "torch")
    assert [name for name in module_tensors(run.model) if name.split(".")[0] in ("embedding", "output")] == [
        "embedding.weight"
    ]
    run.save(tmp_path, 1)
    other = Run(1, "torch")
    other.load(tmp_path)
    assert other.model.output.weight is other.model.embedding.weight
    assert torch.equal(other.model.output.weight, run.model.output.weight)


def test_what_is_configured_stays_as_configured(tmp_path):
    run, other = Run(0, "tf1"), Run(0, "tf1", weight_decay=0.5, adam_eps=0.25)
    run.train(1, 3)
    run.save(tmp_path, 3)
    other.load(tmp_path)
    group = other.optimizer.param_groups[0]
    assert (group["weight_decay"], group["tf1_eps"], group["tf1_step"]) == (0.5, 0.25, 3)


def test_mismatched_weights_are_named_and_nothing_is_overwritten():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = [parameter.clone() for parameter in model.parameters()]
    zeros = {name: torch.zeros_like(tensor) for name, tensor in module_tensors(model).items()}
    for tensors, words in (
        ({**zeros, "2.weight": torch.zeros(2)}, "2.weight is only in one of them"),
        ({**zeros, "1.bias": torch.zeros(3)}, r"1.bias is \[3\] torch.float32, expected \[2\] torch.float32"),
        ({**zeros, "1.bias": zeros["1.bias"].double()}, r"1.bias is \[2\] torch.float64, expected"),
    ):
        with pytest.raises(ModelError, match=words):
            restore_module(model, tensors)
    assert all(torch.equal(parameter, old) for parameter, old in zip(model.parameters(), before, strict=True))


def test_an_optimizer_of_other_parameters_is_refused():
    def stepped(*sizes: int) -> AdamW:
        parameters = [nn.Parameter(torch.ones(size)) for size in sizes]
        optimizer = build_optimizer(parameters, learning_rate=0.1)
        sum(parameter.sum() for parameter in parameters).backward()
        optimizer.step()
        return optimizer

    saved = optimizer_state(stepped(2, 3))
    with pytest.raises(ModelError, match=r"its groups have \[2\] parameters, expected \[3\]"):
        restore_optimizer(stepped(2, 3, 4), *saved)
    with pytest.raises(ModelError, match=r"0.exp_avg is \[2\], expected \[3\]"):
        restore_optimizer(stepped(3, 2), *saved)
    # The same parameters in other groups.
    policy, critic = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    apart = build_optimizer([policy, critic], learning_rate=0.1, critic_parameters=[critic])
    with pytest.raises(ModelError, match=r"\[2\] parameters, expected \[1, 1\]$"):
        restore_optimizer(apart, *saved)


@pytest.mark.parametrize(
    ("mode", "kind", "name"),
    [("torch", "adafactor", "Adafactor"), ("torch", "muon", "Muon and AdamW"), ("tf1", "adamw", "AdamW with tf1")],
)
def test_another_kind_of_optimizer_is_refused_before_anything_is_restored(mode, kind, name):
    saved = Run(0, "torch")
    saved.train(1, 1)
    other = Run(0, mode, kind=kind)
    with pytest.raises(ModelError, match=rf"is AdamW, expected {name}; .* optimization\.optimizer or"):
        restore_optimizer(other.optimizer, *optimizer_state(saved.optimizer))
    assert not other.optimizer.state


def test_the_global_generators_are_restored(tmp_path):
    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), float(np.random.normal()), float(torch.randn(()))]

    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        draw()  # both Gaussian generators now hold a cached draw
        tensors, state = random_state()
        folder = tmp_path / "checkpoints"
        save_checkpoint(folder, update=1, kind="sft", fingerprint={}, tensors={"random": tensors}, state=state, keep=1)
        expected = draw()
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)
        found = newest_valid(folder, on_rejected=print)
        assert found is not None
        restore_random_state(found.tensors("random"), found.state)
        assert draw() == expected
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])

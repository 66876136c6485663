"""Optimizers with small states, against their equations in NumPy; what they keep, and what they refuse."""

from __future__ import annotations

import logging
import sys
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn

from kedge.config import config_from_settings
from kedge.data import Demonstration
from kedge.models import load_language_model, load_scalar_model, load_tokenizer
from kedge.models.pretrained import inner_matrices
from kedge.stages.sft import train_sft
from kedge.training.optimizer import build_optimizer, clip_gradients, set_learning_rate
from kedge.training.optimizer_kinds import Optimizer, OptimizerKind, check_optimizer, state_bytes, state_shape
from kedge_base.errors import ConfigError
from tests.tiny import save_tiny_policy, save_tiny_reward_model

RATE, EPS, DECAY = 0.01, 1e-5, 0.1
has_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="muon needs torch 2.9")
KINDS: list[Any] = [pytest.param(kind, marks=has_muon if kind == "muon" else ()) for kind in get_args(OptimizerKind)]


def matrix(*shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


def build(kind: OptimizerKind, parameters: list[nn.Parameter], **settings: Any) -> Optimizer:
    inner = [each for each in parameters if each.ndim == 2]
    settings = {"learning_rate": RATE, "adam_eps": EPS, "inner_matrices": inner, **settings}
    return build_optimizer(parameters, kind=kind, **settings)


def take_step(optimizer: Optimizer, parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
    optimizer.step()


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def test_each_step_in_8_bits_is_adams_from_the_moments_that_were_kept() -> None:
    weight = matrix(70, 70)
    optimizer = build("adamw8bit", [weight], weight_decay=DECAY)

    def kept(number: int) -> np.ndarray:
        state = optimizer.state.get(weight)
        if not state:
            return np.zeros(weight.numel())
        codes = numbers(state[f"qmap{number}"])[state[f"state{number}"].flatten().numpy()]
        return codes * np.repeat(numbers(state[f"absmax{number}"]), 256)[: weight.numel()]

    for step in range(1, 5):
        before, m, v = numbers(weight).ravel(), kept(1), kept(2)
        take_step(optimizer, [weight], seed=step)
        gradient = numbers(weight.grad).ravel()  # type: ignore[arg-type]
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        moved = (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + EPS)
        np.testing.assert_allclose(
            numbers(weight).ravel(), before * (1 - RATE * DECAY) - RATE * moved, rtol=0, atol=1e-6
        )
        # 256 codes, dense around 0: an error of at most 1.6 % of the largest number of a block, less for small ones.
        for number, moment in ((1, m), (2, v)):
            largest = np.repeat(numbers(optimizer.state[weight][f"absmax{number}"]), 256)[: weight.numel()]
            assert (np.abs(kept(number) - moment) <= 0.016 * largest).all()
            assert np.median(np.abs(kept(number) - moment) / np.abs(moment)) < 0.03


def test_adafactor_is_its_equations_with_adams_rate() -> None:
    weight, bias = matrix(5, 7), matrix(6)
    before, by_hand = numbers(weight), numbers(bias)
    optimizer = build("adafactor", [weight, bias], weight_decay=DECAY)
    rows, columns, vector = np.zeros(5), np.zeros(7), np.zeros(6)
    for step in range(1, 4):
        take_step(optimizer, [weight, bias], seed=step)
        g, b = numbers(weight.grad), numbers(bias.grad)  # type: ignore[arg-type]
        beta = 1 - step**-0.8
        rows = beta * rows + (1 - beta) * (g**2).mean(axis=1)
        columns = beta * columns + (1 - beta) * (g**2).mean(axis=0)
        vector = beta * vector + (1 - beta) * b**2
        u, w = g / np.sqrt(np.outer(rows, columns) / rows.mean()), b / np.sqrt(vector)
        u, w = (each / max(1.0, np.sqrt((each**2).mean())) for each in (u, w))
        before, by_hand = before * (1 - RATE * DECAY) - RATE * u, by_hand - RATE * w
        np.testing.assert_allclose(numbers(weight), before, rtol=0, atol=1e-6)
        np.testing.assert_allclose(numbers(bias), by_hand, rtol=0, atol=1e-6)


@has_muon
@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_muon_orthogonalizes_what_is_inside_and_leaves_the_rest_to_adam(shape: tuple[int, int]) -> None:
    weight, embedding, bias = matrix(*shape), matrix(4, 3, seed=1), matrix(3, seed=2)
    others = [nn.Parameter(each.detach().clone()) for each in (embedding, bias)]
    optimizer = build("muon", [weight, embedding, bias], inner_matrices=[weight], weight_decay=DECAY)
    adam = build_optimizer(others, learning_rate=RATE, adam_eps=EPS, weight_decay=DECAY)
    momentum = np.zeros(shape)
    for step in range(1, 4):
        before = numbers(weight).copy()
        take_step(optimizer, [weight, embedding, bias], seed=step)
        for each, twin in zip((embedding, bias), others, strict=True):
            twin.grad = each.grad
        adam.step()
        gradient = numbers(weight.grad)  # type: ignore[arg-type]
        momentum = 0.95 * momentum + 0.05 * gradient
        left, values, right = np.linalg.svd(0.05 * gradient + 0.95 * momentum, full_matrices=False)
        values = values / np.sqrt((values**2).sum())
        for _ in range(5):
            values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
        moved = 0.2 * np.sqrt(max(shape)) * (left * values) @ right
        # The library iterates in bf16, with 8 significant bits.
        np.testing.assert_allclose(numbers(weight), before * (1 - RATE * DECAY) - RATE * moved, rtol=0, atol=3e-4)
        assert 0.1 < np.sqrt((moved**2).mean()) < 0.3  # the size of Adam's steps
    assert all(torch.equal(each, twin) for each, twin in zip((embedding, bias), others, strict=True))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_matrices_inside_a_model_are_those_of_its_layers(tmp_path: Any, family: Any) -> None:
    policy, reward = save_tiny_policy(tmp_path / "policy", family), save_tiny_reward_model(tmp_path / "reward", family)
    tokenizer = load_tokenizer(str(policy))
    for model in (
        load_language_model(str(policy), tokenizer=tokenizer, value_head=True),
        load_scalar_model(str(reward), tokenizer=tokenizer),
    ):
        names = {id(weight): name for name, weight in model.named_parameters()}
        found = [names[id(each)].split(".")[-2] for each in inner_matrices(model)]
        llama = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        assert found == 2 * (llama if family == "llama" else ["c_attn", "c_proj", "c_fc", "c_proj"])


@pytest.mark.parametrize("kind", KINDS)
def test_groups_mean_the_same_in_every_kind(kind: OptimizerKind) -> None:
    body, head, critic, frozen, unused = (matrix(70, 70, seed=3) for _ in range(5))
    bias = matrix(4, seed=5)
    frozen.requires_grad_(False)
    everything = [body, head, critic, frozen, unused, bias]
    optimizer = build(
        kind, everything, head_parameters=[head], head_rate=3.0, critic_parameters=[critic], weight_decay=1.0
    )
    set_learning_rate(optimizer, 1e-3, critic=2e-3)
    optimizer.zero_grad()
    gradient = torch.randn(70, 70, generator=torch.Generator().manual_seed(4))
    for each in (body, head, critic):
        each.grad = gradient.clone()
    bias.grad = torch.zeros_like(bias)
    before = {each: each.detach().clone() for each in everything}
    optimizer.step()
    moved = {each: each.detach() - before[each] for each in everything}
    assert float(moved[body].abs().max()) > 0
    torch.testing.assert_close(moved[head], 3 * moved[body], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(moved[critic], 2 * moved[body], rtol=1e-3, atol=1e-6)
    assert not any(moved[each].any() for each in (frozen, unused, bias))  # a bias does not decay
    optimizer.zero_grad()
    assert all(each.grad is None for each in everything)


@pytest.mark.parametrize(("kind", "least", "most"), [
    ("adamw", 8, 8), ("adamw8bit", 2, 2.1), ("adafactor", 0, 0.15), pytest.param("muon", 4, 4.1, marks=has_muon)
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_is_what_was_announced(kind: OptimizerKind, least: float, most: float, dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(matrix(*shape).detach().to(dtype)) for shape in ((70, 70), (90, 60), (8, 4), (9,))]
    optimizer = build(kind, parameters)
    announced = state_bytes(optimizer)
    take_step(optimizer, parameters, seed=1)
    scalars = {"step", "RMS", "qmap1", "qmap2"}
    for each in parameters:
        kept = {key: value for key, value in optimizer.state[each].items() if key not in scalars}
        assert all(tuple(value.shape) == state_shape(key, tuple(each.shape)) for key, value in kept.items())
        if dtype == torch.float32:
            assert announced[each] == sum(value.nbytes for value in kept.values())
    if dtype == torch.float32:
        assert least <= announced[parameters[0]] / parameters[0].numel() <= most


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_learns_as_well_at_the_same_rate(tmp_path: Any, kind: OptimizerKind) -> None:
    policy = save_tiny_policy(tmp_path / "policy")
    tokenizer = load_tokenizer(str(policy))
    model = load_language_model(str(policy), tokenizer=tokenizer)
    records = [Demonstration(f"Deck {number}:", " Aye, captain.") for number in range(8)]
    settings: Any = {"learning_rate": 0.01, "batch_size": 8, "schedule": "constant", "num_evaluations": 1}
    losses: list[float] = []
    train_sft(
        model, tokenizer, records, num_epochs=25, optimizer=kind, adam_eps=1e-8,
        on_step=lambda step, metrics: losses.append(metrics["loss"]), **settings,
    )  # fmt: skip
    assert losses[0] > 5
    assert losses[-1] < 1.0  # adamw: 0.4


def test_what_cannot_be_had_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for kind in get_args(OptimizerKind)[1:]:
        with pytest.raises(
            ConfigError,
            match=f"optimization.optimizer={kind} needs whole matrices; .* use optimization.optimizer=adamw",
        ):
            check_optimizer(kind, cpu, named="optimization.optimizer", is_sharded=True)
        with pytest.raises(ConfigError, match=f"TensorFlow's Adam, and optimization.optimizer={kind} has no such form"):
            config_from_settings("ppo", {"optimizer": kind, "adam_eps": {"tf1": 1e-5}})
        with pytest.raises(ConfigError, match="nothing to train"):
            build(kind, [])
    with pytest.raises(ConfigError, match="adamw8bit runs on a CPU or an NVIDIA GPU, not on mps"):
        check_optimizer("adamw8bit", torch.device("mps"), named="optimization.optimizer")
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ConfigError, match=r"optimization.optimizer=muon needs torch 2.9 or newer"):
        check_optimizer("muon", cpu, named="optimization.optimizer")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"optimization.optimizer=adamw8bit needs bitsandbytes: pip install -e '\.\["):
        check_optimizer("adamw8bit", cpu, named="optimization.optimizer")


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_is_seen_before_the_step(kind: OptimizerKind) -> None:
    weight = matrix(70, 70)
    optimizer = build(kind, [weight])
    weight.grad = torch.full_like(weight, float("nan"))
    assert np.isnan(clip_gradients([weight], 1.0))
    assert not optimizer.state


def test_bitsandbytes_does_not_warn_about_kernels_that_are_not_used():
    logger = logging.getLogger("bitsandbytes")  # imported with PEFT, by transformers' Adafactor too
    assert not logger.isEnabledFor(logging.WARNING)

"""Adapters on a base in fewer bits: equal to the same base in fp32, shared by the roles, merged into the original."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import kedge
from kedge.models import (
    AdapterSettings,
    LanguageModel,
    PolicyWeights,
    autocast,
    load_language_model,
    load_scalar_model,
    load_tokenizer,
)
from kedge.models.adapters import is_frozen
from kedge.models.frozen import QuantizedLinear, hold_bases
from kedge.models.loading import Bases
from kedge.models.packing.rows import TokenRows
from kedge.rollout.background import frozen_copy
from kedge_base.errors import ConfigError
from tests.models.test_adapters import adapt
from tests.stages.ppo.test_ppo import copies_at
from tests.stages.test_adapters import LORA, PPO, vowels, weights_of
from tests.stages.test_one_base import randomize
from tests.tiny import save_tiny_policy, save_tiny_reward_model

ROWS = TokenRows.of([[5, 9, 20, 31], [7, 8]], torch.device("cpu"))


def adapted(base: Path, bases: Bases | None = None) -> LanguageModel:
    tokenizer = load_tokenizer(base)
    torch.manual_seed(0)
    model = load_language_model(base, tokenizer=tokenizer, adapter=AdapterSettings(rank=4), bases=bases)
    assert model.adapter is not None
    randomize(model.adapter.weights(), 1)
    return model


def states_and_gradients(model: LanguageModel, precision: Any = "fp32") -> list[Tensor]:
    with autocast(precision, "cpu"):
        logits = model.logits(model.hidden(ROWS))[:, ~model.forbidden]
    logits.log_softmax(-1).square().mean().backward()
    assert model.adapter is not None
    return [logits.detach(), *(weight.grad for weight in model.adapter.weights().values() if weight.grad is not None)]


@pytest.mark.parametrize("dtype", ["bf16", "int8", "nf4"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients_are_those_of_the_same_numbers_in_fp32(tmp_path: Path, family: Any, dtype: Any) -> None:
    base = save_tiny_policy(tmp_path / "base", family)
    held, whole = adapted(base), adapted(base)
    hold_bases([held], dtype)
    rounded = {name: layer for name, layer in held.named_modules() if isinstance(layer, QuantizedLinear)}
    assert len(rounded) == (14 if family == "llama" else 8)
    with torch.no_grad():
        for name, layer in rounded.items():
            plain = whole.get_submodule(name)
            assert isinstance(plain, nn.Linear | Conv1D)
            assert not torch.equal(plain.weight, layer.saved_weight())
            plain.weight.copy_(layer.saved_weight())
    found, expected = states_and_gradients(held), states_and_gradients(whole)
    assert len(found) == len(expected) == 1 + 2 * len(rounded)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    # What an engine gets is what is trained: the rounded base with the adapter.
    ours, theirs = dict(PolicyWeights(held)), dict(PolicyWeights(whole))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-5, atol=1e-6)
    # A copy for sampling ahead shares the base.
    copied = {id(each) for each in frozen_copy(held).parameters()}
    assert {id(layer.packed) for layer in rounded.values()} <= copied


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_auto_is_half_the_bytes_and_the_same_bits(tmp_path: Path, precision: Any) -> None:
    base = save_tiny_policy(tmp_path / "base")
    unchanged = adapted(base)
    hold_bases([unchanged], "auto")
    assert not [each for each in unchanged.modules() if isinstance(each, QuantizedLinear)], "its numbers need fp32"
    published = AutoModelForCausalLM.from_pretrained(base).bfloat16()
    published.save_pretrained(base)
    plain, held = adapted(base), adapted(base)
    hold_bases([held], "auto")
    assert len([each for each in held.modules() if isinstance(each, QuantizedLinear)]) == 14
    found, expected = states_and_gradients(held, precision), states_and_gradients(plain, precision)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_roles_share_the_rounded_base(tmp_path: Path) -> None:
    base = save_tiny_policy(tmp_path / "base")
    bases, tokenizer = Bases(), load_tokenizer(base)
    policy = adapted(base, bases)
    critic = load_scalar_model(base, tokenizer=tokenizer, adapter=AdapterSettings(rank=4), bases=bases, init="fresh")
    reference = load_language_model(base, tokenizer=tokenizer, bases=bases)
    hold_bases([policy, critic, reference], "nf4")
    packed = [
        {id(each.packed) for each in role.modules() if isinstance(each, QuantizedLinear)}
        for role in (policy, critic, reference)
    ]
    assert packed[0] == packed[1] == packed[2]
    assert len(packed[0]) == 14
    trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert trained == {name for name, _ in policy.named_parameters() if ".lora_" in name}


@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_a_run_is_resumed_and_its_adapter_merged_into_the_original(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    base, reward = save_tiny_policy(tmp_path / "base"), save_tiny_reward_model(tmp_path / "reward", seed=2)
    adapter = {**LORA, "base_dtype": dtype}
    settings: Any = {**PPO, "critic": "separate", "critic_init": "policy", "optimizer": "adamw8bit"}
    settings["value_unit"] = "score"  # else a new critic's first update does not reuse the pass, and rounds
    settings["checkpoint.every"] = 1
    run = partial(kedge.ppo, model=base, reward=vowels, adapter=adapter, **settings)
    whole = run(out=tmp_path / "whole", on_update=copies_at(2, tmp_path / "whole", tmp_path / "cut"))
    resumed = run(out=tmp_path / "cut", resume=True)
    one, other = weights_of(whole.model), weights_of(resumed.model)
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())
    assert whole.metrics[0]["objective/reference_error"] == 0.0, "policy and reference are on the same base"
    assert abs(whole.metrics[-1]["objective/kl"]) > 0.01, "a mean of log ratios, which few responses can make negative"
    roles = json.loads((tmp_path / "whole" / "roles.json").read_text())
    assert roles["base"]["weights_bytes"] < 4 * roles["base"]["parameters"]

    folders = (base, kedge.merge(whole.model, tmp_path / "merged"))
    original, merged = (load_file(folder / "model.safetensors") for folder in folders)
    name = "model.layers.1.mlp.up_proj"
    inside = f"base_model.model.{name}.lora_"
    delta = one[f"{inside}B.weight"] @ one[f"{inside}A.weight"] * (32 / 4)
    torch.testing.assert_close(merged[f"{name}.weight"], original[f"{name}.weight"] + delta, rtol=1e-5, atol=1e-6)
    assert torch.equal(merged["model.norm.weight"], original["model.norm.weight"])
    if dtype == "int8":  # a reward model on the same base, and one on weights of its own
        adapt(base, tmp_path / "judge", scalar=True)
        kedge.ppo(
            model=base, reward={tmp_path / "judge": 1.0, reward: 1.0}, out=tmp_path / "scored", adapter=adapter,
            **{**PPO, "num_updates": 1},
        )  # fmt: skip
        roles = json.loads((tmp_path / "scored" / "roles.json").read_text())
        assert roles["reward: judge"]["rounding_error"] > roles["reward: reward"]["rounding_error"] == 0
        assert "".join(capsys.readouterr()).count("prompts differently by") == 1


def test_what_cannot_work_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"adapter.kind=dora needs the whole matrices .*adapter.base_dtype=nf4 saves"):
        kedge.ppo(model="m", reward="r", prompts="p", adapter={"kind": "dora", "base_dtype": "nf4"})


@pytest.mark.parametrize("dtype", ["auto", "bf16", "int8"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_layers_with_dora_stay_whole(tmp_path: Path, family: Any, dtype: Any) -> None:
    base = save_tiny_policy(tmp_path / "base", family)
    adapt(base, tmp_path / "adapter", use_dora=True, fan_in_fan_out=family == "gpt2")
    tokenizer = load_tokenizer(base)
    frozen = load_language_model(tmp_path / "adapter", tokenizer=tokenizer, bases=Bases())
    trained = load_language_model(tmp_path / "adapter", tokenizer=tokenizer, adapter=AdapterSettings(), bases=Bases())
    with torch.no_grad():
        expected = frozen.hidden(ROWS)
        hold_bases([frozen], dtype)
        assert torch.equal(frozen.hidden(ROWS), expected)
    if dtype != "auto":
        with pytest.raises(ConfigError, match=f"adapter.base_dtype={dtype} does not work with .*: it has DoRA"):
            hold_bases([trained], dtype)


def test_roles_that_move_still_share_the_base(tmp_path: Path) -> None:
    """What a run on a GPU does: bases are loaded on the host, rounded on the device, and the roles follow."""
    base = save_tiny_policy(tmp_path / "base")
    bases, tokenizer = Bases(on_host=True), load_tokenizer(base)
    policy = load_language_model(base, tokenizer=tokenizer, device="cuda", adapter=AdapterSettings(rank=4), bases=bases)
    reference = load_language_model(base, tokenizer=tokenizer, device="cuda", bases=bases)
    assert policy.device == reference.device == torch.device("cpu")
    hold_bases([policy, reference], "bf16", torch.device("cpu"))
    for role in (policy, reference):  # another number format moves tensors as another device does
        role.to(torch.float64)
    own, shared = dict(policy.named_parameters()), list(reference.parameters())
    frozen = {id(each) for each in own.values() if is_frozen(each)}
    assert frozen == {id(each) for each in shared}
    assert all(each.dtype == torch.float64 for each in own.values())

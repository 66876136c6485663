"""A checkpoint contains a model that loads; its weights are stored once, and restored to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kedge.models import ActorCritic, ModelCard, load_language_model, load_tokenizer, save_policy
from kedge.training.checkpoint.model_folder import CheckpointModel
from kedge.training.checkpoint.state import module_tensors
from kedge.training.checkpoint.store import Checkpoint, newest_valid, open_checkpoint, save_checkpoint
from tests.tiny import save_tiny_policy


@pytest.fixture(scope="module")
def actor_critic(tmp_path_factory) -> tuple[ActorCritic, CheckpointModel]:
    folder = save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")
    tokenizer = load_tokenizer(folder)
    policy = load_language_model(folder, tokenizer=tokenizer, value_head=True)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.0 + 1e-7)  # no longer the bits of the folder it came from
        policy.causal.model.norm.weight[0] = -0.0
    card = ModelCard("ppo", "policy")
    return ActorCritic(policy), CheckpointModel(
        policy.causal, lambda path, _, weights: save_policy(policy, tokenizer, path, card=card, weights=weights)
    )


def save(folder: Path, tensors: Mapping[str, Tensor], model: CheckpointModel | None) -> Checkpoint:
    path = save_checkpoint(
        folder, update=7, kind="ppo", fingerprint={}, tensors={"actor_critic": tensors}, state={}, keep=1, model=model
    )
    return open_checkpoint(path)


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].detach().numpy().tobytes() == tensor.detach().numpy().tobytes(), name


@pytest.mark.parametrize("saves", [1, 2])
def test_plain_transformers_loads_it_and_no_weight_is_stored_twice(tmp_path, actor_critic, saves):
    module, model = actor_critic
    tensors, model = module_tensors(module), CheckpointModel(model.module, model.save)
    found = [save(tmp_path / str(number), tensors, model) for number in range(saves)][-1]
    assert_equal(found.tensors("actor_critic"), tensors)
    loaded = AutoModelForCausalLM.from_pretrained(found.folder / "model")
    assert_equal(dict(loaded.named_parameters()), dict(module.policy.causal.named_parameters()))
    rest = load_file(found.folder / "actor_critic.safetensors")
    assert sum(tensor.nbytes for tensor in rest.values() if tensor.requires_grad or tensor.is_floating_point()) < 200
    assert {name for name in rest if name.startswith("policy.value_head")} == {
        "policy.value_head.weight", "policy.value_head.bias",
    }  # fmt: skip


def test_a_weight_that_saving_converts_is_kept_beside_the_model(tmp_path, actor_critic):
    module, model = actor_critic

    def rounded(folder: Path, update: int, weights: dict[str, Tensor] | None) -> None:
        model.save(folder, update, weights)
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"] = weights["model.norm.weight"] + 0.0  # only −0 becomes 0: equal, but other bits
        weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].half()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    tensors = module_tensors(module)
    converting = CheckpointModel(model.module, rounded)
    for name in ("first", "second"):
        found = save(tmp_path / name, tensors, converting)
        assert_equal(found.tensors("actor_critic"), tensors)


def test_the_models_files_are_checked(tmp_path, actor_critic):
    module, model = actor_critic
    found = save(tmp_path, module_tensors(module), model)
    path = found.folder / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    lines: list[str] = []
    assert newest_valid(tmp_path, on_rejected=lines.append) is None
    assert "model/model.safetensors: is damaged (its SHA-256" in lines[0]
    (found.folder / "model" / "more.bin").write_bytes(b"")
    newest_valid(tmp_path, on_rejected=lines.append)
    assert lines[1].endswith("model/more.bin: is not in the manifest")

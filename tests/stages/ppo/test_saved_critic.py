"""A trained critic that PPO starts from: its kind, its weights, and those that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file

import kedge
from kedge.config import Config, check_stage, config_from_settings, initial_critic, load_config
from kedge.models import (
    AdapterSettings,
    initialize_head,
    load_language_model,
    load_tokenizer,
    load_value_head,
    save_policy,
)
from kedge.models.saving import merge
from kedge.runs.fingerprint import input_hashes
from kedge.runs.run import open_run
from kedge.stages.ppo.critics import with_saved_critic
from kedge.stages.ppo.roles import Roles, load_roles
from kedge_base.errors import ConfigError, KedgeError, ModelError
from kedge_hub.card import ModelCard
from tests.tiny import save_tiny_policy, save_tiny_reward_model, tiny_tokenizer

GIVEN = {"model": "m", "data.demonstrations": "d", "data.comparisons": "c", "data.prompts": "p"}
PROMPTS = ["The boat", "A sailor", "My rope broke", "Once upon a time"]


def length(completions: list[str], **_: object) -> list[float]:
    return [len(text) / 10 for text in completions]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_reward_model(tmp_path_factory.mktemp("models") / "critic", seed=5)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, policy: Path) -> Path:
    """The policy with a value head beside it."""
    tokenizer = load_tokenizer(policy)
    model = load_language_model(policy, tokenizer=tokenizer, value_head=True)
    assert model.value_head is not None
    with torch.random.fork_rng():
        torch.manual_seed(7)
        initialize_head(model.value_head, "normal")
    return save_policy(model, tokenizer, tmp_path_factory.mktemp("models") / "shared", card=ModelCard("ppo", "base"))


def configure(policy: Path, out: Path, **settings: Any) -> Config:
    defaults = {"num_updates": 1, "num_prompts": 4, "max_new_tokens": 4, "learning_rate": 1e-4, "runtime.report": False}
    return config_from_settings("ppo", {"model": str(policy), "out": str(out), **defaults, **settings})


def load(policy: Path, out: Path, **settings: Any) -> Roles:
    config = with_saved_critic(configure(policy, out, **settings))
    run = open_run(config, "ppo", in_memory={"data.prompts": PROMPTS, "reward": length})
    return load_roles(config, run)


def test_a_saved_model_is_a_separate_critic(policy: Path, separate: Path, tmp_path: Path) -> None:
    roles = load(policy, tmp_path / "run", critic_init=str(separate))
    weights, critic = load_file(separate / "model.safetensors"), roles.actor_critic.critic
    assert critic is not None
    assert all(torch.equal(weight, weights[name]) for name, weight in critic.classifier.named_parameters())
    rates = {group["lr"] for group in roles.optimizer.param_groups if group["params"]}
    assert rates == {1e-4}, "a trained head has no rate of its own"


def test_a_saved_head_is_loaded_on_the_trunk_that_it_was_fitted_to(policy: Path, shared: Path, tmp_path: Path) -> None:
    head = load(policy, tmp_path / "run", critic_init=str(shared)).actor_critic.policy.value_head
    assert head is not None
    saved = load_file(shared / "value_head/model.safetensors")
    assert all(torch.equal(weight, saved[name]) for name, weight in head.state_dict().items())
    other = save_tiny_policy(tmp_path / "other", seed=3)
    with pytest.raises(ModelError, match=r"is a value head on other weights than those of model=.*other"):
        load(other, tmp_path / "run", critic_init=str(shared))


@pytest.mark.parametrize("adapter", [None, AdapterSettings(rank=2)], ids=["whole", "adapter"])
def test_a_saved_head_on_the_hub_is_that_of_the_folder(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: AdapterSettings | None
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    tokenizer, name = load_tokenizer(policy), f"critic-{'whole' if adapter is None else 'adapter'}"
    model = load_language_model(policy, tokenizer=tokenizer, value_head=True, adapter=adapter)
    assert model.value_head is not None
    torch.nn.init.ones_(model.value_head.weight)
    cached = tmp_path / f"models--crew--{name}"
    save_policy(model, tokenizer, cached / "snapshots" / "c0ffee", card=ModelCard("ppo", "base"))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("c0ffee")
    source = f"crew/{name}"
    head = load(policy, tmp_path / "run", critic_init=source).actor_critic.policy.value_head
    assert head is not None
    assert torch.equal(head.weight, model.value_head.weight)
    if adapter is not None:
        merged = load_language_model(merge(source, tmp_path / "merged"), tokenizer=tokenizer, value_head=True)
        assert merged.value_head is not None
        assert load_value_head(merged.value_head, tmp_path / "merged")
        assert torch.equal(merged.value_head.weight, head.weight)


def test_critics_that_do_not_fit_are_refused(policy: Path, separate: Path, shared: Path, tmp_path: Path) -> None:
    foreign = save_tiny_reward_model(tmp_path / "foreign", tokenizer=tiny_tokenizer(vocab_size=280))
    faults: list[tuple[dict[str, Any], type[KedgeError], str]] = [
        ({"critic_init": str(tmp_path / "gone")}, ModelError, "ppo.critic_init: model .* no such folder"),
        ({"critic_init": str(foreign)}, ModelError, "another tokenizer"),
        ({"critic_init": str(separate), "critic": "shared"}, ConfigError, "use ppo.critic=separate, or leave it out"),
        ({"critic_init": str(shared), "critic": "separate"}, ConfigError, "use ppo.critic=shared, or leave it out"),
    ]
    for settings, kind, words in faults:
        with pytest.raises(kind, match=words):
            load(policy, tmp_path / "run", **settings)


def test_a_run_starts_from_the_critic_of_its_argument(policy: Path, separate: Path, tmp_path: Path) -> None:
    result = kedge.ppo(
        model=policy, prompts=PROMPTS, reward=length, critic=separate, out=tmp_path / "run",
        num_updates=1, num_prompts=4, max_new_tokens=4, **{"runtime.num_fixed_prompts": 0, "runtime.report": False},
    )  # fmt: skip
    written = (result.folder / "config.yaml").read_text()
    assert "critic: separate" in written
    assert f"critic_init: {separate}" in written
    assert "ppo.critic_init" in input_hashes(load_config(result.folder / "config.yaml"))


def test_the_kind_is_that_of_the_folder(separate: Path, shared: Path, tmp_path: Path) -> None:
    for folder, kind in ((separate, "separate"), (shared, "shared")):
        config = configure(separate, tmp_path / "run", critic_init=str(folder))
        assert with_saved_critic(config).ppo.critic == kind


def test_the_argument_is_a_kind_or_a_name() -> None:
    assert initial_critic("separate") == {"ppo.critic": "separate"}
    assert initial_critic("runs/critic") == {"ppo.critic_init": "runs/critic"}
    with pytest.raises(ConfigError, match=r"rlhf trains first; use auto, reward or policy"):
        check_stage(config_from_settings("rlhf", {**GIVEN, "critic_init": "runs/critic"}), "rlhf")

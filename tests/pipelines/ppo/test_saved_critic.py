"""A trained critic that PPO starts from: its kind, its weights, and those that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import kedge
from kedge.config import Config, config_from_settings, initial_critic
from kedge.errors import ConfigError, KedgeError, ModelError
from kedge.models import ModelCard, initialize_head, load_language_model, load_tokenizer, save_policy
from kedge.pipelines.ppo import run_ppo
from kedge.pipelines.ppo.saved_critic import with_saved_critic
from tests.tiny import save_tiny_policy, save_tiny_reward_model, tiny_tokenizer

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
    defaults = {"num_updates": 1, "num_prompts": 4, "max_new_tokens": 4, "runtime.num_fixed_prompts": 0}
    return config_from_settings(
        "ppo",
        {"model": str(policy), "out": str(out), "learning_rate": 0.0, "runtime.report": False, **defaults, **settings},
    )


def test_a_saved_model_is_a_separate_critic(policy: Path, separate: Path, tmp_path: Path) -> None:
    result = kedge.ppo(
        model=policy, prompts=PROMPTS, reward=length, critic=separate, out=tmp_path / "run", learning_rate=0.0,
        num_updates=1, num_prompts=4, max_new_tokens=4,
    )  # fmt: skip
    assert "critic: separate" in (result.folder / "config.yaml").read_text()
    roles: list[Any] = []
    config = configure(policy, tmp_path / "other", **{"ppo.critic_init": str(separate)})
    run_ppo(config, prompts=PROMPTS, reward=length, on_update=lambda update, models: roles.append(models))
    weights, critic = load_file(separate / "model.safetensors"), roles[0].actor_critic.critic
    assert all(torch.equal(weight, weights[name]) for name, weight in critic.classifier.named_parameters())
    assert len(roles[0].optimizer.param_groups) == 1, "a trained head has no rate of its own"


def test_a_saved_head_is_loaded_on_the_trunk_that_it_was_fitted_to(policy: Path, shared: Path, tmp_path: Path) -> None:
    roles: list[Any] = []
    config = configure(policy, tmp_path / "run", **{"ppo.critic_init": str(shared)})
    run_ppo(config, prompts=PROMPTS, reward=length, on_update=lambda update, models: roles.append(models))
    head = load_file(shared / "value_head.safetensors")
    loaded = roles[0].actor_critic.policy.value_head.state_dict()
    assert all(torch.equal(loaded[name], head[name]) for name in head)
    other = save_tiny_policy(tmp_path / "other", seed=3)
    with pytest.raises(ModelError, match=r"is a value head on other weights than those of model=.*other"):
        run_ppo(configure(other, tmp_path / "new", **{"ppo.critic_init": str(shared)}), prompts=PROMPTS, reward=length)
    assert not (tmp_path / "new").exists()


def test_critics_that_do_not_fit_are_refused(policy: Path, separate: Path, shared: Path, tmp_path: Path) -> None:
    foreign = save_tiny_reward_model(tmp_path / "foreign", tokenizer=tiny_tokenizer(vocab_size=280))
    faults: list[tuple[dict[str, Any], type[KedgeError], str]] = [
        ({"critic_init": str(tmp_path / "gone")}, ModelError, "no such folder"),
        ({"critic_init": str(policy)}, ModelError, "no trained scalar head"),
        ({"critic_init": str(foreign)}, ModelError, "another tokenizer"),
        ({"critic_init": str(separate), "critic": "shared"}, ConfigError, "use ppo.critic=separate, or leave it out"),
        ({"critic_init": str(shared), "critic": "separate"}, ConfigError, "use ppo.critic=shared, or leave it out"),
    ]
    for settings, kind, words in faults:
        with pytest.raises(kind, match=words):
            run_ppo(configure(policy, tmp_path / "new", **settings), prompts=PROMPTS, reward=length)
        assert not (tmp_path / "new").exists()


def test_the_kind_is_that_of_the_folder(separate: Path, shared: Path, tmp_path: Path) -> None:
    for folder, kind in ((separate, "separate"), (shared, "shared")):
        config = configure(separate, tmp_path / "run", **{"ppo.critic_init": str(folder)})
        assert with_saved_critic(config).ppo.value.critic == kind


def test_the_argument_is_a_kind_or_a_name() -> None:
    assert initial_critic("separate") == {"ppo.critic": "separate"}
    assert initial_critic("runs/critic") == {"ppo.critic_init": "runs/critic"}
    with pytest.raises(ConfigError, match=r"rlhf trains first; use auto, reward or policy"):
        kedge.rlhf(model="m", demonstrations="d", comparisons="c", prompts="p", **{"ppo.critic_init": "runs/critic"})

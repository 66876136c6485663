"""Training on a simulated device without float64, like an Apple GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kedge
from tests.apple import OnApple, apple_gpu
from tests.tiny import save_tiny_policy, save_tiny_reward_model

PROMPTS = ["ab", "cd ef", "gh"] * 4
SIZES = {"num_prompts": 4, "num_updates": 2, "num_epochs": 2, "rollout.max_new_tokens": 6, "runtime.report": False}


def vowels(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_policy(tmp_path_factory.mktemp("models") / "policy"))


def test_the_device_has_its_own_memory_and_no_float64():
    with apple_gpu() as device:
        x = torch.arange(3.0, device=device, requires_grad=True)
        x.square().sum().backward()
        assert isinstance(x.grad, OnApple)
        assert x.grad.tolist() == [0.0, 2.0, 4.0]
        assert type(x.detach().cpu()) is torch.Tensor
        with pytest.raises(TypeError, match="no float64"):
            x.double()
        with pytest.raises(RuntimeError, match="on the same device"):
            x + torch.ones(3)
        assert x[torch.tensor([1, 2])].tolist() == [1.0, 2.0]
        with pytest.raises(RuntimeError, match="on the same device"):
            x.index_select(0, torch.tensor([1, 2]))


@pytest.mark.parametrize(
    "settings",
    [
        {"eval_every": 1, "ppo.value_loss": "hl_gauss", "runtime.micro_batch_tokens": "auto"},
        {"preset": "critic", "ppo.credit": "turn"},
        {"critic": "readout", "num_responses": 4, "num_epochs": 0.5},
        {"preset": "grpo", "rollout.missing_eos_score": "mask", "runtime.activation_checkpointing": True},
        {"preset": "grpo", "num_epochs": 0.5, "rollout.num_responses": 4},
        {"advantage": "spo"},
        {"advantage": "remax"},
    ],
    ids=["shared", "critic", "readout", "grpo", "share", "spo", "remax"],
)
def test_ppo_trains(settings: dict[str, Any], policy: str, tmp_path: Path) -> None:
    with apple_gpu():
        result = kedge.ppo(model=policy, prompts=PROMPTS, reward=vowels, out=tmp_path / "run", **SIZES | settings)
    assert len(result.metrics) == 2


def test_a_critic_is_trained_and_a_reward_model_scores(policy: str, tmp_path: Path) -> None:
    judge = str(save_tiny_reward_model(tmp_path / "judge"))
    pairs = [{"prompt": "ab" + "x" * length, "chosen": "cd", "rejected": "ef"} for length in range(8)]
    with apple_gpu():
        reward = kedge.reward(model=judge, comparisons=pairs, out=tmp_path / "reward", batch_size=4)
        critic = kedge.critic(
            model=policy, prompts=PROMPTS, reward=str(reward.model), out=tmp_path / "critic", max_new_tokens=6
        )
        result = kedge.ppo(
            model=policy,
            prompts=PROMPTS,
            reward=str(reward.model),
            critic=str(critic.model),
            out=tmp_path / "run",
            **SIZES,
        )
    assert len(result.metrics) == 2

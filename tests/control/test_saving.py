"""A saved policy acts as it did, and a damaged folder is one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from kedge_base.errors import EnvError, ModelError
from kedge_control.making import make_environments
from kedge_control.networks import ControlActorCritic
from kedge_control.normalization import Normalization
from kedge_control.rollout import collect_steps
from kedge_control.saving import load_control_policy, save_control_policy
from kedge_control.spaces import Spaces


def saved(folder: Path, name: str = "Pendulum-v1", **settings: object) -> tuple[ControlActorCritic, Normalization]:
    environments = make_environments(name, 2)
    policy = ControlActorCritic(environments.spaces, seed=4, **settings)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        policy.policy_output.weight.mul_(300)  # so that actions differ
    normalization = Normalization(environments.spaces.observation_size, 2)
    generator = torch.Generator().manual_seed(0)
    normalization.observe(collect_steps(environments, policy, normalization, num_steps=20, generator=generator))
    save_control_policy(folder, policy, normalization, environment={"id": name}, card="# A policy\n")
    return policy, normalization


@pytest.mark.parametrize("bounds", ["clip", "squash"])
def test_a_saved_policy_acts_as_it_did(tmp_path: Path, bounds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, normalization = saved(tmp_path / "policy", action_bounds=bounds, hidden_sizes=(16,), activation="relu")
    monkeypatch.setenv("HOME", str(tmp_path))
    loaded = load_control_policy("~/policy")
    environment = gymnasium.make("Pendulum-v1")
    observation, _ = environment.reset(seed=0)
    for _ in range(5):
        action = loaded.act(observation)
        mean = policy.act(normalization.normalize(observation[None]), policy.blank_memory(1))[0].item()
        expected = 2 * np.tanh(mean) if bounds == "squash" else np.clip(mean, -2, 2)
        assert action == pytest.approx(expected, abs=1e-5)
        assert environment.action_space.contains(action)
        observation = environment.step(action)[0]
    drawn = [loaded.act(observation, deterministic=False).item() for _ in range(20)]
    assert len(set(drawn)) > 10 or max(np.abs(drawn)) == 2
    assert {path.name for path in (tmp_path / "policy").iterdir()} == {
        "policy.safetensors",
        "control.json",
        "README.md",
    }


class Widened(nn.Module):
    def __init__(self, spaces: Spaces) -> None:
        super().__init__()
        self.layer = nn.Linear(spaces.observation_size, 5)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.layer(observations).relu()


def test_a_network_of_ones_own_is_asked_for(tmp_path: Path) -> None:
    policy, _ = saved(tmp_path / "policy", "CartPole-v1", network=Widened)
    with pytest.raises(ModelError, match="a custom network"):
        load_control_policy(tmp_path / "policy")
    loaded = load_control_policy(tmp_path / "policy", network=Widened)
    assert torch.equal(loaded.policy.policy_output.weight, policy.policy_output.weight)
    assert loaded.act(np.zeros(4)) in (0, 1)


@pytest.mark.parametrize("damage", ["{}", "not json", '{"format": 2}', '{"format": 1, "spaces": 1}', "[" * 100_000])
def test_a_damaged_description_is_one_line(tmp_path: Path, damage: str) -> None:
    saved(tmp_path / "policy")
    with pytest.raises(ModelError, match=r"no control\.json"):
        load_control_policy(tmp_path)
    (tmp_path / "policy" / "control.json").write_text(damage)
    with pytest.raises(ModelError, match=r"control\.json"):
        load_control_policy(tmp_path / "policy")


def test_every_damaged_value_is_one_line(tmp_path: Path) -> None:
    """Each value of the description in turn is replaced by values of other types; no other error comes out."""
    saved(tmp_path / "policy", hidden_sizes=(4,))
    path = tmp_path / "policy" / "control.json"
    text = path.read_text()
    whole = json.loads(text)
    refused: list[str] = []
    for keys in places(whole):
        for value in (None, "x", -1, [], {}, [[1]], float("nan")):
            described = json.loads(text)
            owner = described
            for key in keys[:-1]:
                owner = owner[key]
            owner[keys[-1]] = value
            path.write_text(json.dumps(described))
            try:
                load_control_policy(tmp_path / "policy").act(np.zeros(3))
            except ModelError as error:
                refused.append(str(error))
    assert len(refused) > 100
    assert not any("\n" in line for line in refused)
    path.write_text(text)
    weights = tmp_path / "policy" / "policy.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ModelError, match="not a control policy that can be loaded"):
        load_control_policy(tmp_path / "policy")


def places(described: dict[str, Any], *before: str) -> Iterator[tuple[str, ...]]:
    for key, value in described.items():
        yield (*before, key)
        if isinstance(value, dict) and key != "environment":
            yield from places(value, *before, key)


def test_a_vector_of_bytes_is_read_as_in_training(tmp_path: Path) -> None:
    """Bytes that are no image are numbers like others: standardized."""
    spaces = Spaces((8,), None, "discrete", (3,), (), (0,))
    policy, normalization = ControlActorCritic(spaces, seed=1), Normalization(8)
    normalization.observation_moments.update(np.random.default_rng(0).integers(0, 255, (50, 8)))
    save_control_policy(tmp_path / "policy", policy, normalization, environment={}, card="")
    loaded = load_control_policy(tmp_path / "policy")
    rows = np.random.default_rng(1).integers(0, 255, (40, 8)).astype(np.uint8)
    moments = normalization.observation_moments
    scaled = np.clip((rows - moments.mean) / np.sqrt(moments.var + 1e-8), -10, 10).astype(np.float32)
    expected = policy.act(scaled, policy.blank_memory(40))[0].argmax(-1).tolist()
    assert [int(loaded.act(row)) for row in rows] == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (np.zeros(4), r"an observation of shape \(4,\); expected one of shape \(3,\)"),
        (np.zeros((2, 3)), r"an observation of shape \(2, 3\)"),
        ({"a": 1}, "an observation of dict; .*FlattenObservation"),
        (np.array([0, np.nan, 0]), "numbers that are not finite"),
    ],
    ids=["shorter", "batch", "dictionary", "nan"],
)
def test_what_is_no_observation_is_one_line(tmp_path: Path, observation: Any, message: str) -> None:
    saved(tmp_path / "policy")
    with pytest.raises(EnvError, match=message):
        load_control_policy(tmp_path / "policy").act(observation)


def test_an_image_of_fractions_is_one_line(tmp_path: Path) -> None:
    spaces = Spaces((40, 40), "hw", "discrete", (3,), (), (0,))
    policy, normalization = ControlActorCritic(spaces, hidden_sizes=(8,)), Normalization(1600, observations=False)
    save_control_policy(tmp_path / "policy", policy, normalization, environment={}, card="")
    loaded = load_control_policy(tmp_path / "policy")
    assert int(loaded.act(np.zeros((40, 40), np.uint8))) in range(3)
    with pytest.raises(EnvError, match=r"an image of float64, and its space is of bytes \(uint8\)"):
        loaded.act(np.full((40, 40), 0.5))

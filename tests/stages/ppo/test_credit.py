"""Runs with credit by turn, and with GiGPO, on episodes."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor

import kedge
from kedge.algorithm import GroupInGroupAdvantage
from kedge.algorithm.experience import Experience, Rollout
from kedge.config import load_config
from kedge.rollout.episodes import Episodes
from kedge.stages.ppo import run_ppo
from kedge.stages.ppo.result import PpoResult
from kedge.stages.ppo.settings import advantage_of
from kedge.stages.ppo.trainer import Trainer
from tests.rollout.episodes import turns_of
from tests.stages.ppo.test_ppo import configure, metrics_without_times
from tests.tiny import save_tiny_policy

GAMES = [f"Game {number}. " for number in range(6)]
GAMMA = 0.5
SIZES: dict[str, Any] = {
    "max_new_tokens": 40,
    "environment.max_turns": 4,
    "environment.max_turn_tokens": 3,
    "missing_eos_score": None,
    "whiten_advantages": False,
    "gamma": GAMMA,
}


class Rooms:
    """Walks through three rooms by what is said; pays in the second one, and ends in the third with a bonus."""

    def reset(self, row: Any, seed: int) -> str:
        self.room = 0
        return "Room 0.\n"

    def step(self, text: str) -> kedge.Step:
        self.room = len(text) % 3
        if self.room == 2:
            return kedge.Step(reward=1.0, terminated=True)
        return kedge.Step(f"Room {self.room}.\n", reward=0.25 * self.room)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(autouse=True)
def turns_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mark each turn, all of which are answered, where the engine has not."""
    finished = Episodes.finished

    def marked(self: Episodes, rollout: Rollout) -> Rollout:
        found = finished(self, rollout)
        if found.turn_starts is None:
            own = found.action_mask
            object.__setattr__(found, "turn_starts", own & ~torch.nn.functional.pad(own, (1, 0))[:, :-1])
        return found

    monkeypatch.setattr(Episodes, "finished", marked)


def played(
    policy: Path, out: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[PpoResult, list[Experience]]:
    """A run, and the experience of each update."""
    found: list[Experience] = []
    improve = Trainer.improve

    def seen(self: Trainer, experience: Experience, **given: Any) -> Any:
        found.append(experience)
        return improve(self, experience, **given)

    monkeypatch.setattr(Trainer, "improve", seen)
    config = configure(policy, out, **SIZES | settings)
    return run_ppo(config, prompts=GAMES, environment=Rooms), found


def paid(experience: Experience, row: int) -> list[float]:
    """The environment's reward of each turn."""
    assert experience.rollout.rewards is not None
    return [float(experience.rollout.rewards[row, turn].sum()) for turn in turns_of(experience.rollout, row)]


def discounted(rewards: list[float]) -> list[float]:
    return [sum(GAMMA**k * each for k, each in enumerate(rewards[start:])) for start in range(len(rewards))]


def at_turns(table: Tensor, experience: Experience, row: int) -> list[list[float]]:
    return [table[row, turn].tolist() for turn in turns_of(experience.rollout, row)]


@pytest.mark.parametrize("critic", ["shared", "separate", "readout"])
def test_returns_are_discounted_from_turn_to_turn(policy, tmp_path, monkeypatch, critic):
    settings = {"credit": "turn", "ratio": "turn", "critic": critic, "kl_coef": 0.0, "value_gae_lambda": 1.0}
    result, updates = played(policy, tmp_path / "run", monkeypatch, **settings)
    lengths = set()
    for experience in updates:
        assert experience.values is not None
        for row in range(len(experience.scores)):
            expected = discounted(paid(experience, row))
            lengths.add(len(expected))
            returns, values, advantages, counted = (
                at_turns(table, experience, row)
                for table in (experience.returns, experience.values, experience.advantages, experience.reward_mask)
            )
            assert [each[0] for each in returns] == pytest.approx(expected, abs=1e-5)
            assert counted == [[True, *[False] * (len(each) - 1)] for each in returns]
            for turn, value, target in zip(advantages, values, expected, strict=True):
                assert turn == pytest.approx([target - value[0]] * len(turn), abs=1e-5)
    assert len(lengths) > 1
    for row in result.metrics:
        assert row["reward/total"] == pytest.approx(row["reward/score_mean"], abs=1e-6)
    [*_, last] = metrics_without_times(tmp_path / "run")
    if critic != "readout":
        assert last["value/loss"] > 0


def test_the_environments_rewards_are_those_of_gigpos_turns(policy, tmp_path, monkeypatch):
    """GiGPO by loops over the rooms that were entered."""
    settings = {"advantage": "gigpo", "num_responses": 4, "num_prompts": 3, "kl_coef": 0.01}
    result, [experience, *_] = played(policy, tmp_path / "run", monkeypatch, **settings)
    rollout = experience.rollout
    assert not any(name.startswith("value/") for row in result.metrics for name in row)
    steps: dict[tuple[int, tuple[int, ...]], list[float]] = {}
    totals: dict[int, list[float]] = {}
    rows = []
    for row in range(12):
        rewards, group = paid(experience, row), int(rollout.group[row])
        totals.setdefault(group, []).append(sum(rewards))
        last, states = -1, list[tuple[int, ...]]()
        for turn in turns_of(rollout, row):  # what has been read since the last turn is the room
            states.append((last >= 0, *rollout.response_ids[row, last + 1 : turn[0]].tolist()))
            last = turn[-1]
        for state, value in zip(states, discounted(rewards), strict=True):
            steps.setdefault((group, state), []).append(value)
        rows.append((group, sum(rewards), states, discounted(rewards)))

    def compared(value: float, among: list[float]) -> float:
        return (value - fmean(among)) / stdev(among) if len(among) > 1 and max(among) > min(among) else 0.0

    recurring = 0
    for row, (group, total, states, returns) in enumerate(rows):
        for turn, state, value in zip(at_turns(experience.advantages, experience, row), states, returns, strict=True):
            expected = compared(total, totals[group]) + compared(value, steps[group, state])
            recurring += len(steps[group, state]) > 1
            assert turn == pytest.approx([expected] * len(turn), abs=1e-4)
    assert recurring > 12, "every first turn is in the first room, and others come back to it"


def test_gigpo_goes_by_turns_with_its_kl_in_the_loss():
    group = "rollout.num_responses=2"
    config = load_config(overrides=["ppo.advantage=gigpo", group])
    assert (config.ppo.credit, config.ppo.kl_in.name, config.ppo.resolved_critic) == ("turn", "loss", "none")
    assert not config.ppo.whitens_advantages
    config = load_config(overrides=["ppo.advantage={gigpo: 0.5}", "ppo.credit=token", group])
    assert (config.ppo.resolved_credit, config.ppo.estimator) == ("turn", "gigpo")
    assert load_config(overrides=[]).ppo.resolved_credit == "token"


@pytest.mark.parametrize(("weight", "expected"), [("gigpo", 1.0), ({"gigpo": 0.5}, 0.5), ({"gigpo": 0}, 0.0)])
def test_the_weight_of_gigpos_steps_is_its_parameter(weight, expected):
    config = load_config(flags={"ppo.advantage": weight, "ppo.gamma": 0.9, "rollout.num_responses": 2})
    assert advantage_of(config) == GroupInGroupAdvantage(0.9, expected)

"""An estimator and a policy loss of the user's own: equal to kedge's where they are the same, else checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kedge
from kedge.algorithm import generalized_advantages
from kedge.algorithm.group_advantages import GroupMeanAdvantage
from kedge.algorithm.own import OwnAdvantage, call_own
from kedge.config import Config
from kedge.stages.ppo.settings import OwnFunctions
from kedge_base.errors import ConfigError, NumericsError, ShapeError
from tests.stages.ppo.test_own_loop import PROMPTS, SIZES, assert_same, scored
from tests.tiny import save_tiny_policy

FILE = """
from kedge.algorithm.advantages import reward_to_go

def to_go(rewards, mask):
    returns = reward_to_go(rewards, mask, 1.0)
    return returns, returns

def unclipped(log_ratios, advantages):
    return -log_ratios.exp() * advantages
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


def run(policy: Path, out: Path, **settings: Any) -> None:
    kedge.ppo(model=policy, prompts=PROMPTS, reward=scored, out=out, **{**SIZES, **settings})


def gae(rewards: Tensor, mask: Tensor, *, values: Tensor) -> tuple[Tensor, Tensor]:
    return generalized_advantages(rewards, values, mask, gamma=1.0, gae_lambda=0.9)


def clipped(log_ratios: Tensor, advantages: Tensor) -> Tensor:
    ratios = log_ratios.exp()
    return torch.maximum(-ratios * advantages, -ratios.clamp(0.8, 1.2) * advantages)


def gae_in_place(rewards: Tensor, mask: Tensor, *, values: Tensor) -> tuple[Tensor, Tensor]:
    found = gae(rewards, mask, values=values)
    for each in (rewards, mask, values):
        each.zero_()
    return found


def clipped_in_place(log_ratios: Tensor, advantages: Tensor) -> Tensor:
    losses = clipped(log_ratios.clone(), advantages.clone())
    with torch.no_grad():
        log_ratios.zero_()
        advantages.zero_()
    return losses


def group_means(rewards: Tensor, mask: Tensor, *, group: Tensor) -> tuple[Tensor, Tensor]:
    return GroupMeanAdvantage(1.0)(rewards, mask, group=group)


def test_the_same_functions_give_the_same_run(policy: Path, tmp_path: Path) -> None:
    run(policy, tmp_path / "kedge", gae_lambda=0.9)
    run(policy, tmp_path / "own", advantage=gae, surrogate=clipped)
    assert_same(tmp_path / "kedge", tmp_path / "own", besides=("policy/clip_fraction",))
    assert "advantage: python:gae" in (tmp_path / "own" / "config.yaml").read_text()
    with kedge.PpoTrainer(
        model=policy, prompts=PROMPTS, out=tmp_path / "loop", advantage=gae, surrogate=clipped, **SIZES
    ) as trainer:
        for _ in trainer.updates():
            batch = trainer.sample()
            trainer.update(batch, scored(batch.responses))
    assert_same(tmp_path / "own", tmp_path / "loop")


def test_what_they_write_into_their_arguments_stays_there(policy: Path, tmp_path: Path) -> None:
    run(policy, tmp_path / "copied", advantage=gae, surrogate=clipped, ppo={"early_stop_kl": 1e-4})
    run(policy, tmp_path / "in_place", advantage=gae_in_place, surrogate=clipped_in_place, ppo={"early_stop_kl": 1e-4})
    assert_same(tmp_path / "copied", tmp_path / "in_place")


def test_groups_need_no_critic(policy: Path, tmp_path: Path) -> None:
    settings = {"num_prompts": 2, "num_responses": 2, "critic": "none", "whiten_advantages": False, "kl_coef": 0.0}
    run(policy, tmp_path / "kedge", advantage="dr_grpo", **settings)
    run(policy, tmp_path / "own", advantage=group_means, **settings)
    assert_same(tmp_path / "kedge", tmp_path / "own")


def test_by_name_they_are_loaded_and_hashed(policy: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    named = {"advantage": f"{file}:to_go", "surrogate": f"{file}:unclipped", "critic": "none"}
    run(policy, tmp_path / "kedge", advantage="to_go", surrogate="unclipped", critic="none")
    run(policy, tmp_path / "own", **named)
    assert_same(tmp_path / "kedge", tmp_path / "own")
    file.write_text(FILE.replace("-log_ratios.exp() *", "-2 * log_ratios.exp() *"))
    with pytest.raises(ConfigError, match=r"ppo.advantage: the files have changed"):
        run(policy, tmp_path / "own", **named, num_updates=4, resume=True)
    with pytest.raises(ConfigError, match=r"ppo\.advantage .*mine.py:gone"):
        run(policy, tmp_path / "none", advantage=f"{file}:gone")


@pytest.mark.parametrize("on_nonfinite", ["skip", "stop"])
def test_a_loss_that_is_nan_is_the_guards(policy: Path, tmp_path: Path, on_nonfinite: str) -> None:
    def broken(log_ratios: Tensor, advantages: Tensor) -> Tensor:
        return log_ratios * torch.nan

    settings = {"surrogate": broken, "ppo": {"on_nonfinite": on_nonfinite, "max_skips": 100}}
    if on_nonfinite == "skip":
        run(policy, tmp_path / "run", **settings)
        assert "the loss of each response is nan" in (tmp_path / "run" / "incidents.jsonl").read_text()
        return
    with pytest.raises(NumericsError, match=r"the loss of each response is nan"):
        run(policy, tmp_path / "run", **settings)


def test_what_follows_from_nan_is_not_blamed_on_an_estimator() -> None:
    own = OwnAdvantage(gae, 1.0)
    rewards = torch.tensor([[0.0, torch.nan]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert own(rewards, mask, values=torch.zeros(1, 2), group=None, baseline=None, actions=mask).returns.isnan().any()


def test_another_function_is_not_resumed(policy: Path, tmp_path: Path) -> None:
    run(policy, tmp_path / "run", advantage=gae)
    with pytest.raises(ConfigError, match=r"ppo\.advantage"):
        run(policy, tmp_path / "run", advantage=group_means, num_updates=4, resume=True)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"advantage": lambda rewards: rewards}, r"ppo\.advantage: lambda_: too many positional arguments; expected"),
        (
            {"advantage": lambda rewards, mask, gamma: rewards},
            r"a required argument: 'gamma'; expected f\(rewards, mask, ",
        ),
        ({"surrogate": lambda ratios: ratios}, r"ppo\.policy_loss: .*; expected f\(log_ratios, advantages\)$"),
    ],
)
def test_other_arguments_are_refused_before_anything_is_sampled(
    policy: Path, tmp_path: Path, settings: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        run(policy, tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_c_code_does_not_say_its_arguments() -> None:
    assert OwnFunctions.of(Config(), {"ppo.policy_loss": torch.mul}).surrogate is torch.mul


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"advantage": lambda rewards, mask: rewards}, "lambda_ returned Tensor; expected"),
        ({"advantage": lambda rewards, mask: (rewards[0], rewards)}, r"returned advantages of shape \(8,\); expected"),
        ({"advantage": lambda rewards, mask: (rewards, rewards / 0)}, "returned returns that are not finite"),
        (
            {"advantage": lambda rewards, mask: (rewards + 1e20, rewards)},
            r"advantages that are not .*, or beyond 1e\+12",
        ),
        (
            {"advantage": lambda rewards, mask: (rewards.tolist(), rewards)},
            "returned advantages of type list; expected a",
        ),
        ({"surrogate": lambda log_ratios, advantages: advantages.mean()}, r"returned losses of shape \(\)"),
        ({"surrogate": lambda log_ratios, advantages: advantages}, "returned losses without a gradient"),
    ],
)
def test_a_wrong_result_is_one_line(policy: Path, tmp_path: Path, settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ShapeError, match=line):
        run(policy, tmp_path / "run", **settings)


@pytest.mark.parametrize("name", ["advantage", "surrogate"])
def test_an_error_is_one_line_with_its_place(policy: Path, tmp_path: Path, name: str) -> None:
    def wrong(one: Tensor, other: Tensor) -> Any:
        raise KeyError("weight")

    field = {"advantage": "advantage", "surrogate": "policy_loss"}[name]
    with pytest.raises(
        ConfigError, match=rf"^ppo\.{field}: wrong raised KeyError: 'weight' \(test_own_functions\.py:\d+\)$"
    ):
        run(policy, tmp_path / "run", **{name: wrong})


def test_that_memory_runs_out_in_a_function_stays_known() -> None:
    def hungry() -> Any:
        raise torch.OutOfMemoryError("Tried to allocate 1 GiB")

    with pytest.raises(torch.OutOfMemoryError):
        call_own("ppo.advantage: hungry", hungry)

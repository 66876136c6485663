"""Every owner of a detail that the pages of details name is executed by a run of its stage: none is there for show."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import kedge
from kedge.config import config_from_settings
from kedge.models.packing.probe import Findings
from kedge.rewards import RewardTerm
from kedge.rewards.penalties import too_long
from kedge.stages.critic import run_critic
from kedge.stages.ppo import run_ppo
from kedge.stages.reward import run_reward
from kedge.stages.sft import run_sft
from kedge_base.estimators import ESTIMATORS
from tests.tiny import save_tiny_policy, save_tiny_reward_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
PAGES = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("algorithm.md", "control.md"))
OWNERS = sorted(
    (file if file.startswith("kedge_control/") else f"kedge/{file}", name)
    for file, name in set(re.findall(r"`([\w/]+\.py):(\w+)`", PAGES))
)

POSTS = [
    {"subreddit": "sail", "title": f"Rope {number}", "post": "It broke.\nHelp.", "summary": "rope broke"}
    for number in range(6)
]
PAIRS = [{"prompt": f"The boat {n}", "chosen": " sails", "rejected": " sinks"} for n in range(4)]
RANKED = [{"prompt": f"The tide {n}", "responses": [" in", " out", " up"], "ranks": [2, 1, 3]} for n in range(4)]
PROMPTS = ["The boat", "A sailor", "My rope broke", "Once upon a time"]


@contextmanager
def executed() -> Iterator[set[tuple[str, int]]]:
    """The file and first line of every function of kedge that the block calls."""
    seen: set[tuple[str, int]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (code := frame.f_code).co_filename.startswith(str(SOURCE)):
            seen.add((code.co_filename, code.co_firstlineno))

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def lines_of(file: str, name: str) -> range | None:
    """The lines of a function or class, decorators included; None for a protocol, which has nothing to execute."""
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    [node] = [each for each in tree.body if isinstance(each, (ast.FunctionDef, ast.ClassDef)) and each.name == name]
    if isinstance(node, ast.ClassDef) and any(ast.unparse(base).startswith("Protocol") for base in node.bases):
        return None
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return range(first, (node.end_lineno or first) + 1)


def length(completions: list[str], **_: Any) -> list[float]:
    return [-len(text) / 10 for text in completions]


def per_token(completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
    return [[token / 100 for token in ids] for ids in completion_ids]


class Pictures(gymnasium.Env[Any, Any]):
    """Images, and several choices at once."""

    observation_space = spaces.Box(0, 255, (36, 36, 1), np.uint8)
    action_space = spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        return self._seen(), float(action[0]), self.np_random.random() < 0.2, False, {}

    def _seen(self) -> Any:
        return self.np_random.integers(0, 256, (36, 36, 1), np.uint8)


def played(tmp_path: Path) -> Iterator[Callable[[], object]]:
    """The same of docs/control.md."""
    small = {"num_steps": 32, "num_minibatches": 2, "num_epochs": 2, "total_steps": 64, "report": False}

    def control(name: str, env: Any, **more: Any) -> Callable[[], object]:
        return lambda: kedge.control(env=env, out=tmp_path / name, **{**small, **more})

    yield control("gaussian", "Pendulum-v1", num_envs=2)
    yield control("squashed", "Pendulum-v1", action_bounds="squash")
    yield control("trpo", "CartPole-v1", preset="trpo")
    yield control("memory", "CartPole-v1", memory_size=4, critic="shared")
    yield control("pictures", Pictures, critic="shared", hidden_sizes=[8])


def stages(tmp_path: Path) -> Iterator[Callable[[], object]]:
    """Short runs that together use every option of docs/algorithm.md."""
    yield from played(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None  # so that one is added
    policy = save_tiny_policy(tmp_path / "policy", tokenizer=tokenizer, extra_rows=1)
    judge = save_tiny_reward_model(tmp_path / "judge", seed=1)

    def settings(stage: str, name: str, **more: Any) -> Any:
        common = {
            "model": str(policy),
            "out": str(tmp_path / name),
            "runtime.report": False,
            "runtime.precision": "fp32",
        }
        return config_from_settings(stage, {**common, **more})

    def ppo(name: str, reward: Any, **more: Any) -> Callable[[], object]:
        small = {"num_prompts": 4, "max_new_tokens": 6, "num_updates": 2, "runtime.num_fixed_prompts": 0}
        config = settings("ppo", name, **{**small, **more})
        return lambda: run_ppo(config, prompts=PROMPTS, reward=reward)

    sft = settings("sft", "sft", batch_size=3, **{"data.template": "tldr", "data.max_prompt_tokens": 90})
    yield lambda: run_sft(sft, demonstrations=POSTS)
    preferences = settings("reward", "reward", batch_size=2, **{"data.eval_fraction": 0.3})
    yield lambda: run_reward(preferences, comparisons=PAIRS + RANKED)
    returns = settings("critic", "critic", batch_size=2, **{"data.eval_fraction": 0.3, "rollout.max_new_tokens": 4})
    yield lambda: run_critic(returns, prompts=PROMPTS, reward=length)
    (tmp_path / "texts.jsonl").write_text('{"text": "The crew hauled on the rope."}\n' * 4)
    adaptive = {"kl_controller": "ziegler", "entropy_coef": 0.01, "entropy_target": 4.0, "whiten_rewards": True}
    mixed = {"ptx_coef": 0.1, "data.pretraining": [str(tmp_path / "texts.jsonl")], "ppo.old_logprobs.cap": 2.0}
    mixed |= {"importance_mask": "sequence"}
    lambdas = {"gae_lambda": {"length_adaptive": 0.3}, "value_gae_lambda": 1.0}
    penalized = [length, RewardTerm(too_long, settings={"window": 0.5})]
    yield ppo("shared", penalized, **adaptive, **mixed, **lambdas, on_spike={"skip": 9.0})
    in_loss = {"kl_in": "loss", "kl_controller": {"schulman": {"wait": 0}}, "score_at": "after_last"}
    in_separate = {"critic": "separate", "advantage": {"n_step": 2}, "value_loss": "hl_gauss"}
    in_separate |= {"num_critic_epochs": 2}
    checked = {"critic_check": 2, "ppo.critic_check.size": [32, 1, 2]}
    checked |= {"data.eval_fraction": 0.4}
    yield ppo("separate", str(judge), **in_separate, **in_loss, **checked)
    yield ppo("to-go", length, advantage="to_go", kl_coef=0.0, num_minibatches=2, positive_nll_coef=0.1)
    group = {"num_responses": 2, "num_prompts": 2, "num_updates": 1}
    yield ppo("rloo", length, advantage="rloo", policy_loss="cispo", ratio="sequence", **group)
    yield ppo("gigpo", length, advantage="gigpo", ratio="turn", **group)
    yield ppo("double-sided", length, advantage="dr_grpo", policy_loss="double_sided", **group)
    yield ppo("grpo", per_token, advantage="grpo", kl_in="loss", **group)
    for name, facts in ESTIMATORS.items():
        yield ppo(f"estimator-{name}", length, advantage=name, **(group if facts.baseline == "group" else {}))
    yield ppo("readout", length, critic="readout", num_updates=1)
    yield ppo("frozen", str(judge), critic="frozen", num_updates=1)
    yield ppo("total", length, advantage="total", policy_loss="kl_penalty_adaptive")


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, int]]:
    found: set[tuple[str, int]] = set()
    with patch.dict(Findings._known, clear=True):  # whatever models other tests of this process have tried
        for run in stages(tmp_path_factory.mktemp("owners")):
            with executed() as seen:
                run()
            found |= seen
    return found


def is_called(calls: set[tuple[str, int]], file: str, name: str) -> bool:
    lines = lines_of(file, name)
    return lines is None or any(path == str(SOURCE / file) and first in lines for path, first in calls)


@pytest.mark.parametrize(("file", "name"), OWNERS)
def test_a_run_executes_the_owner(calls: set[tuple[str, int]], file: str, name: str) -> None:
    assert is_called(calls, file, name)


def test_an_owner_that_no_training_calls_would_be_noticed(calls: set[tuple[str, int]]) -> None:
    assert not is_called(calls, "kedge/algorithm/shaping.py", "sequence_kl")  # kedge evaluate's


def test_the_page_names_owners() -> None:
    assert len(OWNERS) > 40

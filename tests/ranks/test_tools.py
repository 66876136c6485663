"""The calls of tools of all ranks' episodes are counted, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kedge
from kedge_base.run_folder.record_format import read_metrics
from tests.lab.evaluation.speakers import save_speaker
from tests.ranks.forked import forked_ranks
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer


class Adder:
    """A tool that fails in one of the games."""

    def reset(self, fails: bool, **_: Any) -> None:
        """Note whether it is that one."""
        self.fails = fails

    def add(self, a: int) -> int:
        """Add 1.

        Args:
            a: It.
        """
        if self.fails:
            raise ValueError("no")
        return a + 1

    def get_reward(self) -> float:
        return 0.0


def train(policy: Path, folder: Path) -> None:
    """Two updates of two episodes, one for each rank."""
    kedge.ppo(
        model=policy,
        prompts=[{"prompt": [{"role": "user", "content": f"Game {n}"}], "fails": n == 0} for n in range(2)],
        environment=Adder,
        out=folder,
        device="cpu",
        report=False,
        num_updates=2,
        num_prompts=2,
        max_new_tokens=60,
        learning_rate=0.0,
        **{"environment.max_turns": 2, "environment.max_turn_tokens": 1, "runtime.num_fixed_prompts": 0},
    )


def test_calls_are_counted_on_all_ranks(tmp_path: Path) -> None:
    """By hand: the policy says a call until the limit of two turns, in one of two games in vain."""
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    tokenizer.add_tokens(["<add>6</add>"])
    policy = save_speaker(tmp_path / "policy", "<add>6</add>", tokenizer=tokenizer)
    assert forked_ranks(train, policy, tmp_path / "run") == [0, 0]
    rows = read_metrics(tmp_path / "run")
    assert [(row["tools/calls"], row["tools/failed"]) for row in rows] == [(2, 0.5)] * 2

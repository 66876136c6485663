"""A reward that is given several times counts as often, which a line says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kedge.config import config_from_settings
from kedge.runs.run import _say_of_settings  # pyright: ignore[reportPrivateUsage]
from kedge_base.stage import find_stage


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        (["rm", "rm"], ["reward rm is given 2 times, and counts as often"]),
        (["rm", "other", "rm", "rm"], ["reward rm is given 3 times, and counts as often"]),
        ({"rm": 0.5, "other": 1.0}, []),
        ([{"source": "rm"}, {"source": "rm", "weight": 0}], []),
        ([{"source": "f.py:g"}, {"source": "f.py:g", "settings": {"window": 0.5}}], []),
        (["python:<lambda>", "python:<lambda>"], []),
    ],
)
def test_a_reward_that_is_given_twice_is_named(rewards: Any, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("kedge.runs.run.say", lines.append)
    config = config_from_settings("ppo", {"model": "m", "prompts": "p.jsonl", "reward": rewards})
    _say_of_settings(config, find_stage("ppo"), torch.device("cpu"))
    assert lines == said

"""The words of a command line."""

from __future__ import annotations

import pytest

from kedge_base.command import name_first


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("ppo --out sft", "ppo --out sft"),
        ("--out runs ppo --model m", "ppo --out runs --model m"),
        ("--out sft ppo --model m", "ppo --out sft --model m"),
        ("--anyway ppo --model sft", "ppo --anyway --model sft"),
        ("--out=sft ppo", "ppo --out=sft"),
        ("--help", "--help"),
    ],
)
def test_options_may_stand_before_a_stage_and_be_named_like_one(words: str, first: str) -> None:
    assert name_first(words.split(), ("ppo", "sft")) == first.split()

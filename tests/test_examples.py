"""The examples: their files fit each other, and they run, here with a tiny model."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from kedge.config import load_config
from kedge.logs.json_lines import EVALUATIONS_FILE, read_json_lines
from kedge.stages.ppo import run_ppo
from tests.tiny import CHAT_TEMPLATE, save_tiny_policy, tiny_tokenizer

ROOT = Path(__file__).parents[1]
BRIEF = Path("examples/brief")


def subjects(name: str) -> set[str]:
    """What the questions of a file are about."""
    patterns = r"for|about|explain"
    rows = [json.loads(line)["prompt"][0]["content"] for line in (ROOT / BRIEF / name).read_text().splitlines()]
    return {
        re.split(rf" (?:{patterns}) ", row, maxsplit=1)[1].split("?")[0].removesuffix(" to a child") for row in rows
    }


def test_the_held_out_questions_are_about_other_subjects():
    trained, held_out = subjects("prompts.jsonl"), subjects("held_out.jsonl")
    assert (len(trained), len(held_out)) == (40, 12)
    assert not trained & held_out


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Swimming keeps you fit.", "right"),
        (" It is fun!\n", "right"),
        ("one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen.", "right"),
        (
            "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen.",
            "too long",
        ),
        ("Two words.", "too short"),
        ("Swimming keeps you fit", "not finished"),
        ("Swimming keeps you fit. It is fun.", "several sentences"),
        ("Swimming\nkeeps you fit.", "several sentences"),
        ("", "not finished"),
    ],
)
def test_one_short_sentence(text, reason):
    assert runpy.run_path(str(ROOT / BRIEF / "reward.py"))["one_short_sentence"]([text]) == [
        {"score": float(reason == "right"), "reason": reason}
    ]


def test_the_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    policy = save_tiny_policy(tmp_path / "policy", tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE))
    small = ["num_updates=2", "eval_every=1", "eval_num_prompts=3", "max_new_tokens=6"]
    flags = {"model": str(policy), "out": str(tmp_path / "run")}
    run_ppo(load_config(BRIEF / "run.yaml", small, flags, stage="ppo"))
    rows = read_json_lines(tmp_path / "run" / EVALUATIONS_FILE)
    assert [(row["update"], len(row["responses"])) for row in rows] == [(0, 3), (1, 3), (2, 3)]
    assert all(response["reason"] for row in rows for response in row["responses"])

"""A run whose advantage needs no values has no critic: not in memory, metrics or files, nor in its report."""

import json

import pytest
from safetensors.torch import load_file

from kedge.stages.ppo import run_ppo
from kedge_inspect.doctor import examine
from kedge_inspect.record import read_run
from tests.stages.ppo.test_ppo import PROMPTS, configure, vowels
from tests.tiny import save_tiny_policy

NUM_UPDATES = 8
"""As many as the doctor's rules on critics need."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("critic-free")
    small = {"num_updates": NUM_UPDATES, "num_epochs": 1, "max_new_tokens": 4, "num_responses": 2, "num_prompts": 2}
    config = configure(save_tiny_policy(place / "policy"), place / "run", advantage="to_go", report=True, **small)
    run_ppo(config, prompts=PROMPTS, reward=vowels)
    return place / "run"


def test_nothing_of_a_critic_is_logged_or_saved(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == NUM_UPDATES
    assert not [name for row in rows for name in row if name.startswith("value/")]
    assert "critic" not in json.loads((folder / "roles.json").read_text())
    # One epoch, and a third of a step each for the rollout and the reference; the reward is a program.
    assert rows[-1]["cost/sft_steps"] == pytest.approx(1 + 1 / 3 + 1 / 3)
    saved = [name for path in folder.rglob("*.safetensors") for name in load_file(path)]
    assert saved
    assert not [name for name in saved if "value" in name or "critic" in name]


def test_the_report_and_the_doctor_are_silent_about_critics(folder):
    examination = examine(read_run(folder))
    named = [each.rule for each in (*examination.findings, *examination.gaps)]
    assert not [rule for rule in named if "critic" in rule or "value" in rule]
    page = (folder / "report.html").read_text()
    assert "Explained variance" not in page
    assert "Set ppo.critic_check" not in page

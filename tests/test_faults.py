"""Some faulty cases on a model of a few thousand parameters; `make faults` runs all of them on the demo's world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.faults import running
from bench.faults.case import Case
from bench.faults.catalogue import CASES
from bench.faults.faulty import FAULTS
from bench.faults.matrix import write_matrix
from bench.faults.running import Found, Outcome
from bench.processes import BenchError
from kedge.config import config_from_settings
from kedge.stages.ppo import run_ppo
from kedge_inspect.doctor import RULES, diagnose
from kedge_inspect.doctor.rule import TRAINED
from kedge_inspect.record import read_run
from tests.tiny import save_tiny_policy

TINY: dict[str, Any] = {
    "num_updates": 12,
    "num_prompts": 32,
    "num_minibatches": 2,
    "num_epochs": 2,
    "max_new_tokens": 12,
    "temperature": 0.7,
    "learning_rate": 2e-3,
    "report": False,
    "num_fixed_prompts": 0,
}
PROMPTS = [f"The boat {number}" for number in range(64)]


def vowels(completions: list[str]) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) for text in completions]


def outcome_of(case: Case, folder: Path) -> Outcome:
    policy = save_tiny_policy(folder / "policy")
    config = config_from_settings("ppo", {**TINY, "model": str(policy), "out": str(folder / "run"), **case.settings})
    with case.bug():
        run_ppo(config, prompts=PROMPTS, reward=vowels)
    return Outcome(case.name, case.rule, 0, 0.0, tuple(map(Found.of, diagnose(read_run(folder / "run")))))


@pytest.mark.parametrize(
    "name",
    [
        "KL sign flipped, β × 10, learning rate × 3",
        "trainer ignores the temperature",
        "learning rate × 100",
        "critic frozen",
    ],
)
def test_the_right_rule_finds_the_fault(name: str, tmp_path: Path) -> None:
    outcome = outcome_of(CASES[name], tmp_path)
    assert outcome.place in (1, 2), outcome.findings


def test_a_frozen_critic_that_adds_to_a_baseline_is_idle_and_not_dead(tmp_path: Path) -> None:
    found = [each.rule for each in outcome_of(CASES["critic frozen, added to a baseline"], tmp_path).findings]
    assert "idle_critic" in found
    assert "dead_critic" not in found


def test_a_healthy_run_has_no_serious_finding(tmp_path: Path) -> None:
    assert outcome_of(Case("healthy"), tmp_path).alarms == ()


def test_every_rule_about_training_has_a_fault() -> None:
    rules = {rule.name for rule in RULES if set(rule.stages) & set(TRAINED)}
    assert {case.rule for case in FAULTS} == rules, "bench/faults/faulty.py needs a run with each rule's fault"


def test_no_two_cases_share_a_folder() -> None:
    assert len({case.folder for case in CASES.values()}) == len(CASES)


SERIOUS, NOTE = Found("a", "serious", "it is"), Found("b", "note", "it was")


@pytest.mark.parametrize(
    ("rule", "findings", "good"),
    [
        ("a", (SERIOUS, NOTE), True),
        ("b", (SERIOUS, NOTE), True),
        ("b", (SERIOUS, SERIOUS, NOTE), False),
        ("c", (SERIOUS,), False),
        ("", (NOTE,), True),
        ("", (NOTE, SERIOUS), False),
    ],
)
def test_rank_one_or_two_is_found_and_serious_is_an_alarm(rule: str, findings: tuple[Found, ...], good: bool) -> None:
    assert Outcome("case", rule, 0, 1.0, findings).good is good


def test_the_matrix_shows_what_was_found() -> None:
    outcomes = [
        Outcome("one", "b", 0, 4.0, (SERIOUS, NOTE)),
        Outcome("one", "b", 1, 4.0, (SERIOUS, SERIOUS, NOTE)),
        Outcome("two", "", 1, 6.0, (SERIOUS,)),
    ]
    text = write_matrix(outcomes)
    assert "| one | ✓ ✗ | a | **b**, a | **b** |" in text
    assert "| two | ✗ | a | – | – |" in text
    assert "Seeds 0, 1: in 1 of 2 faulty runs" in text
    assert "0 of 1 healthy runs" in text


def test_a_run_that_cannot_start_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(work: Path, seed: int) -> None:
        raise SystemExit(f"no base, {seed}")

    monkeypatch.setattr(running, "make_base", broken)
    with pytest.raises(BenchError, match=r"base-7\.log: exit code 1, no base, 7$"):
        running.run_case_apart(Case("healthy"), 7, tmp_path)

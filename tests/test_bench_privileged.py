"""The comparison of a privileged critic: its record is complete, and its page has what it says."""

from __future__ import annotations

from bench.privileged import ARMS, NAME, PAGE, RECORD, SEEDS, TUNING_SEED, best, page, tuned, unit
from bench.study.unit import read_outcomes
from bench.tables import renewed


def test_the_page_has_the_recorded_figures() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert renewed(text, NAME, page()) == text, "run python -m bench.privileged --page"


def test_all_arms_are_tuned_by_as_many_runs_and_recorded() -> None:
    outcomes = read_outcomes(RECORD)
    assert len({len(tuned(arm)) for arm in ARMS}) == 1
    for arm in ARMS:
        assert TUNING_SEED not in SEEDS
        assert all(unit(arm, best(arm, outcomes), seed).key in outcomes for seed in SEEDS)

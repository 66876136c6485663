"""A leak is told from memory that is taken once."""

from __future__ import annotations

from pathlib import Path

from kedge.inspect.doctor import diagnose
from kedge.inspect.record import RunRecord


def found(figures):
    rows = [{"update": update, "memory/process": held} for update, held in enumerate(figures, 1)]
    run = RunRecord(Path("run"), facts={"stage": "ppo"}, metrics=rows, state="running")
    return "memory_growing" in {finding.rule for finding in diagnose(run, advice=lambda *_: "")}


def test_a_batch_that_was_longer_than_all_before_is_no_leak():
    crept = [0.782, 0.825, 0.837, 1.063, 1.064, 1.064, 1.065, 1.065, 1.096, 1.096, 1.097, 1.098]
    assert not found(crept)
    assert found([0.8 + 0.03 * update for update in range(12)])

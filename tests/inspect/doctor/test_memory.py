"""A leak is distinguished from memory that is allocated once."""

from __future__ import annotations

from pathlib import Path

from kedge_inspect.doctor import diagnose
from kedge_inspect.record import RunRecord


def is_leak(values):
    rows = [{"update": update, "memory/process": held} for update, held in enumerate(values, 1)]
    run = RunRecord(Path("run"), facts={"stage": "ppo"}, metrics=rows, state="running")
    return "memory_growing" in {finding.rule for finding in diagnose(run, advice=lambda *_: "")}


def test_the_longest_batch_so_far_is_no_leak():
    creeping = [0.782, 0.825, 0.837, 1.063, 1.064, 1.064, 1.065, 1.065, 1.096, 1.096, 1.097, 1.098]
    assert not is_leak(creeping)
    assert is_leak([0.8 + 0.03 * update for update in range(12)])

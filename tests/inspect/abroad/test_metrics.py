"""The table of metrics names only what the libraries log and what kedge documents."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.abroad.cases import CASES as BENCH
from kedge_inspect.abroad.runs import METRICS
from kedge_inspect.abroad.trainers import TRAINERS
from kedge_inspect.doctor import RULES

ROOT = Path(__file__).resolve().parents[3]
OF_TRANSFORMERS = {"loss", "eval_loss", "grad_norm", "learning_rate"}
"""Names that transformers' `Trainer` logs for every trainer of TRL."""


def _logged() -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for line in (ROOT / "bench" / "abroad" / "names.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        trainer, name, versions = line.split("\t")
        found.setdefault(trainer, {})[name] = versions.split()
    return found


LOGGED = _logged()


def _versions(trainer: str, name: str) -> list[str]:
    names = LOGGED[trainer]
    return names.get(name) or names.get(name.removeprefix("eval_")) or []


def _order(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]


@pytest.mark.parametrize("row", METRICS, ids=lambda row: f"{row[0]} {row[2]}")
def test_every_name_is_one_that_the_library_logs_in_these_versions(row: list[str]) -> None:
    trainer, versions, name = row[:3]
    if trainer.startswith("trl") and name in OF_TRANSFORMERS:
        return
    first, last = map(_order, versions.split("-"))
    read = {version for found in LOGGED[trainer].values() for version in found}
    within = [version for version in read if first <= _order(version) <= last]
    assert within, "none of the versions was read"
    assert set(within) <= set(_versions(trainer, name))


def test_every_factor_is_a_name_that_the_library_logs() -> None:
    for row in METRICS:
        if len(row) > 4 and row[4].startswith("*"):
            assert _versions(row[0], row[4][1:])


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    known = set(re.findall(r"`([^`]+)`", page + (ROOT / "docs" / "control.md").read_text(encoding="utf-8")))
    assert {row[3] for row in METRICS} - known == set()


def test_every_trainer_has_rows_and_every_row_a_trainer() -> None:
    assert {row[0] for row in METRICS} == {trainer.key for trainer in TRAINERS}


def test_every_case_of_the_bench_names_rules_that_exist() -> None:
    known = {rule.name for rule in RULES}
    for case in BENCH:
        assert set(case.rules) <= known, case
        assert case.is_healthy or case.is_visible or case.why.startswith("no: "), case

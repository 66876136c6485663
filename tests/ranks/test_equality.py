"""The result of a run does not depend on the number of its ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.ranks.cases import POLICY_CASES, run, save_models
from tests.ranks.processes import torchrun

CASES = (*POLICY_CASES, "sft", "reward", "critic")
MEASURED = ("time/", "memory/", "tokens_per_second")


def prepared(folder: Path) -> Path:
    save_models(folder / "models")
    return folder


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def assert_equal_runs(one: Path, other: Path) -> None:
    """Same figures up to the rounding of sums, same sampled tokens, same weights."""
    for ours, theirs in zip(rows(one / "metrics.jsonl"), rows(other / "metrics.jsonl"), strict=True):
        assert ours.keys() == theirs.keys()
        for name in (name for name in ours if not name.startswith(MEASURED)):
            close = ours[name] == theirs[name] or math.isclose(ours[name], theirs[name], rel_tol=1e-3, abs_tol=2e-5)
            assert close, f"{one.name} {name}: {ours[name]} with one rank, {theirs[name]} with several"
    if (one / "samples.jsonl").exists():
        texts = [[sample["response"] for sample in rows(run / "samples.jsonl")] for run in (one, other)]
        assert texts[0] == texts[1]
    for path in sorted((one / "model").rglob("*.safetensors")):
        weights, others = load_file(path), load_file(other / path.relative_to(one))
        for name, weight in weights.items():
            difference = (others[name] - weight).abs() - 1e-3 * weight.abs()
            assert difference.max() < 2e-5, name


def check(folder: Path, count: int, cases: tuple[str, ...], parallel: str) -> None:
    for name in ("one", "several"):
        prepared(folder / name)
    code, output = torchrun(count, "tests.ranks.cases", str(folder / "several"), *cases, CASES_PARALLEL=parallel)
    assert code == 0, output
    for case in cases:
        run(case, folder / "one" / "models", folder / "one" / "runs")
        assert_equal_runs(folder / "one" / "runs" / case, folder / "several" / "runs" / case)


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    check(tmp_path, 2, ("shared", "sft"), "replicate")
    config = (tmp_path / "several" / "runs" / "shared" / "config.yaml").read_text(encoding="utf-8")
    assert "# ranks: 2 (replicate)" in config


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4])
def test_ranks_equal_one(count: int, tmp_path: Path) -> None:
    check(tmp_path, count, CASES, "replicate")

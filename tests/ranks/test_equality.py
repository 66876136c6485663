"""The result of a run does not depend on the number of its ranks."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.ranks.cases import COMPARED, POLICY_CASES, run, save_models
from tests.ranks.processes import torchrun

CASES = (
    *POLICY_CASES,
    "ahead",
    "adapter",
    "sft",
    "reward",
    "critic",
    "critic_head",
    "generate",
    *COMPARED,
    "check_critic",
    "rlhf",
)
SHARDED = tuple(case for case in CASES if case not in ("ahead", "adapter"))
RESULTS = ("comparisons-2.jsonl", "metrics.jsonl", "responses.jsonl", "judgments.jsonl", "critic_checks.jsonl")
MEASURED = ("time/", "memory/", "tokens_per_second")


def prepared(folder: Path) -> Path:
    save_models(folder / "models")
    return folder


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def assert_close(ours: Any, theirs: Any, place: str) -> None:
    """Numbers agree up to the rounding of sums, everything else is equal."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for name in (name for name in ours if not name.startswith(MEASURED)):
            assert_close(ours[name], theirs[name], f"{place} {name}")
    elif isinstance(ours, list):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_close(one, other, f"{place} {number}")
    else:
        numbers = isinstance(ours, float) and isinstance(theirs, float)
        close = ours == theirs or (numbers and math.isclose(ours, theirs, rel_tol=1e-3, abs_tol=2e-5))
        assert close, f"{place}: {ours} with one rank, {theirs} with several"


def assert_equal_runs(one: Path, other: Path) -> None:
    """Same figures up to the rounding of sums, same sampled tokens, same weights."""
    if (one / "ppo").exists():
        stages = sorted(path.parent.name for path in one.glob("*/config.yaml"))
        assert stages == sorted(path.parent.name for path in other.glob("*/config.yaml"))
        for stage in stages:
            assert_equal_runs(one / stage, other / stage)
    found = [name for name in RESULTS if (one / name).exists()]
    assert found
    for name in found:
        assert_close(rows(one / name), rows(other / name), f"{one.name} {name}")
    if (one / "samples.jsonl").exists():
        texts = [[sample["response"] for sample in rows(run / "samples.jsonl")] for run in (one, other)]
        assert texts[0] == texts[1]
    for path in sorted((one / "model").rglob("*.safetensors")):
        weights, others = load_file(path), load_file(other / path.relative_to(one))
        for name, weight in weights.items():
            difference = (others[name] - weight).abs() - 1e-3 * weight.abs()
            assert difference.max() < 2e-5, name


def check(folder: Path, count: int, cases: tuple[str, ...]) -> None:
    """Compare runs of several ranks with those of one; of CASE:shard with those of CASE."""
    for name in ("one", "several"):
        prepared(folder / name)
    code, output = torchrun(count, "tests.ranks.cases", str(folder / "several"), *cases)
    assert code == 0, output
    for case in cases:
        name = case.partition(":")[0]
        if not (folder / "one" / "runs" / name).exists():
            run(name, folder / "one" / "models", folder / "one" / "runs")
        assert_equal_runs(folder / "one" / "runs" / name, folder / "several" / "runs" / case.replace(":", "-"))


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    check(
        tmp_path,
        2,
        (
            "shared",
            "shared:shard",
            "readout",
            "readout:shard",
            "frozen:shard",
            "equal_groups",
            "equal_groups:shard",
            "part",
            "part:shard",
            "ahead",
            "episodes",
            "contexts",
            "sft",
            "generate",
            "evaluate:shard",
            "reward:shard",
        ),
    )
    for name in ("replicate", "shard"):
        folder = tmp_path / "several" / "runs" / ("shared" if name == "replicate" else "shared-shard")
        assert f"# ranks: 2 ({name})" in (folder / "config.yaml").read_text(encoding="utf-8")
    rewind(folder, 2)
    assert len(list(folder.glob("checkpoints/update-000002/*/shard-*-of-00002.safetensors"))) == 4
    run("shared:shard", tmp_path / "several" / "models", folder.parent, resume=True)
    assert_equal_runs(tmp_path / "one" / "runs" / "shared", folder)


def rewind(folder: Path, update: int) -> None:
    """Let a finished run go on from an earlier checkpoint."""
    (folder / "finished.json").unlink()
    for path in folder.glob("checkpoints/update-*"):
        if path.name > f"update-{update:06d}":
            shutil.rmtree(path)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4])
def test_ranks_equal_one(count: int, tmp_path: Path) -> None:
    check(tmp_path, count, CASES)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_with_sharded_weights_equal_one(count: int, tmp_path: Path) -> None:
    check(tmp_path, count, tuple(f"{case}:shard" for case in SHARDED))

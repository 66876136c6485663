"""Checkpoints in parts: resumed on other numbers of ranks, and faults while several ranks write one."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.ranks.cases import save_models
from tests.ranks.processes import started, torchrun
from tests.ranks.test_equality import assert_equal_runs
from tests.ranks.test_faults import assert_resumes, command, fault, saved_updates

IN_PARTS = ("parallel=shard", "checkpoint.sharded_above=0", "checkpoint.every=1")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("kind", "saved"), [("SIGTERM", 3), ("SIGKILL", 2)])
def test_parts_of_two_ranks_are_resumed_on_one_three_and_four(kind: str, saved: int, tmp_path: Path) -> None:
    fault(tmp_path, 1, kind, *IN_PARTS)
    assert saved_updates(tmp_path)[-1] == f"update-{saved:06d}"
    shards = tmp_path.glob(f"run/checkpoints/update-{saved:06d}/*/shard-*-of-00002.safetensors")
    assert len(list(shards)) == 4
    for name in ("third", "fourth", "whole-again"):
        shutil.copytree(tmp_path / "run", tmp_path / name)
    assert_resumes(tmp_path, 1, *IN_PARTS)
    for count, name, settings in (
        (3, "third", IN_PARTS),
        (4, "fourth", IN_PARTS),
        (2, "whole-again", ("parallel=replicate", *IN_PARTS[1:])),
    ):
        code, output = torchrun(count, "kedge", *command(tmp_path, *settings), "--resume", str(tmp_path / name))
        assert code == 0, output
        assert_equal_runs(tmp_path / "whole", tmp_path / name)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("full disk", "update 2 cannot be saved (rank {}: No space left on device)"),
        ("exception", "ZeroDivisionError: a bug on one rank"),
        ("SIGKILL", "contact with another rank was lost"),
    ],
)
def test_a_fault_in_a_rank_that_writes_leaves_the_checkpoint_before(
    rank: int, kind: str, said: str, tmp_path: Path
) -> None:
    save_models(tmp_path / "models")
    code, output = torchrun(2, "tests.ranks.faulty", str(rank), "save", kind, *command(tmp_path, *IN_PARTS))
    assert code != 0, output
    assert output.count(said.format(rank)) == 1, output
    assert saved_updates(tmp_path) == ["update-000001"]
    assert_resumes(tmp_path, 2, *IN_PARTS)


def test_a_signal_ends_a_run_of_which_a_rank_hangs_while_it_writes(tmp_path: Path) -> None:
    save_models(tmp_path / "models")
    with started(2, "tests.ranks.faulty", "1", "save", "hang", *command(tmp_path, *IN_PARTS)) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if "now hanging" in text:
                os.kill(process.pid, signal.SIGTERM)
                break
        process.communicate()
    assert process.returncode != 0
    assert saved_updates(tmp_path) == ["update-000001"]

"""Only one process trains in a run's folder."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier

import pytest

from kedge.runs.claim import claim, claim_free_folder, claims
from kedge.runs.run import Resume
from kedge.stages.sft import run_sft
from kedge_base.errors import OutputError
from tests.tiny import save_tiny_policy

HOLD = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(folder: Path):
    """Another process that trains in a folder."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        yield other
        other.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot lock a folder")
def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    with held(tmp_path) as other, pytest.raises(OutputError, match="another process is training in") as refused:
        claim(tmp_path)
    if Path("/proc/locks").exists():
        assert f"process {other.pid} ({sys.executable} -c" in str(refused.value)
    with claims():
        claim(tmp_path)
        who = "this process is training in .* already; wait" if Path("/proc/locks").exists() else "another process"
        with pytest.raises(OutputError, match=who):
            claim(tmp_path)
    claim(tmp_path)
    claim(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot lock a folder")
@pytest.mark.parametrize("number", range(40))  # a race shows in one of some
def test_runs_without_a_folder_that_start_at_once_get_one_each(tmp_path: Path, number: int) -> None:
    (tmp_path / "runs/ppo").mkdir(parents=True)
    (tmp_path / "runs/ppo/config.yaml").touch()
    together, ended = Barrier(4), Barrier(4)

    def start(number: int) -> Path:
        with claims():
            together.wait(60)
            try:
                folder = claim_free_folder(tmp_path / "runs/ppo")
            finally:
                ended.wait(60)
            with claims():  # of the stage, whose run starts in the folder
                claim(folder)
            if number == 0:
                (folder / "config.yaml").touch()
        return folder

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(start, range(4)))
    assert sorted(folder.name for folder in found) == ["ppo-2", "ppo-3", "ppo-4", "ppo-5"]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"ppo", found[0].name}
    with claims():
        assert claim_free_folder(tmp_path / "other/ppo") == tmp_path / "other/ppo"
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot lock a folder")
@pytest.mark.parametrize("number", range(10))
def test_runs_that_start_while_others_end_get_one_each(tmp_path: Path, number: int) -> None:
    running: set[Path] = set()

    def start(_: int) -> None:
        with claims():
            folder = claim_free_folder(tmp_path / "runs/ppo")
            assert folder.is_dir()
            assert folder not in running
            running.add(folder)
            claim(folder)
            running.discard(folder)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(start, range(40)))
    assert list(tmp_path.glob("*/*")) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot lock a folder")
def test_a_run_is_claimed_before_it_is_read_and_after_it_has_ended_free(tmp_path: Path) -> None:
    from kedge.config import config_from_settings

    rows = [{"prompt": f"Deck {number}:", "completion": " Aye."} for number in range(4)]
    settings = {"runtime.report": False, "data.eval_fraction": 0}
    source = save_tiny_policy(tmp_path / "policy")
    config = config_from_settings("sft", {"model": str(source), "out": str(tmp_path / "run"), **settings})
    run_sft(config, demonstrations=rows)
    (tmp_path / "run" / "finished.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    with held(tmp_path / "run"), pytest.raises(OutputError, match="another process"):
        run_sft(config, demonstrations=rows, resume=Resume())
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    claim(tmp_path / "run")
    with pytest.raises(OutputError, match="not empty"):  # an error before the start leaves no claim either
        run_sft(config, demonstrations=rows)
    claim(tmp_path / "run")

"""Only one process trains in a run's folder."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from kedge.errors import OutputError
from kedge.pipelines.sft import run_sft
from kedge.runs.claim import claim, claims
from kedge.runs.run import Resume
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
        with pytest.raises(OutputError, match="another process"):
            claim(tmp_path)
    claim(tmp_path)
    claim(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot lock a folder")
def test_a_run_is_claimed_before_it_is_read_and_after_it_has_ended_free(tmp_path: Path) -> None:
    from kedge.config import config_from_settings

    rows = [{"prompt": f"Deck {number}:", "completion": " Aye."} for number in range(4)]
    settings = {"runtime.plots": False, "runtime.report": False, "data.eval_fraction": 0}
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

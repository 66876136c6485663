"""Real Ray on this machine: a rank that is killed costs no update. Skipped where Ray is not installed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

import kedge
from tests.system.ranks.cases import save_models
from tests.system.ranks.processes import ROOT
from tests.system.ranks.test_equality import assert_equal_runs
from tests.system.ranks.test_faults import SETTINGS, command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None or not Path("/proc").exists(), reason="ray is not installed"),
]
NUM_UPDATES = 12
LONGEST = 400.0


def ranks_of(folder: Path) -> dict[int, int]:
    """The processes of the run in this folder by their rank, without the processes that they start."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if words[1:3] == [b"-m", b"kedge.cli.as_child"] and f"{folder}/run".encode() in words:
                variables = dict(each.partition(b"=")[::2] for each in (path / "environ").read_bytes().split(b"\0"))
                found[int(variables[b"RANK"])] = int(path.name)
    return found


def parent(process: int) -> int:
    return int((Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[1])


@contextmanager
def launched(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A run of PPO on two of Ray's actors, which are ended with the launcher."""
    save_models(folder / "models")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(Path(kedge.__file__).parents[1]),
        "RAY_AUTH_TOKEN": "a token for one test",
    }
    environment.pop("RAY_ADDRESS", None)
    words = ["-m", "kedge", "launch", "--ray", "--actors", "2", "--", *command(folder), *arguments]
    process = subprocess.Popen(
        [sys.executable, *words, f"num_updates={NUM_UPDATES}"],
        cwd=ROOT,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=LONGEST)


def wait_for_update(folder: Path, update: int) -> None:
    """Wait until the run has written this many updates."""
    path, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + LONGEST
    while not path.exists() or path.read_bytes().count(b"\n") < update:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("fault", "rank"), [("rank", 0), ("rank", 1), ("actor", 1)])
def test_a_killed_rank_costs_no_update(fault: str, rank: int, tmp_path: Path) -> None:
    with launched(tmp_path, "checkpoint.every=1") as process:
        wait_for_update(tmp_path, 3)
        before = ranks_of(tmp_path)
        killed = before[rank] if fault == "rank" else parent(before[rank])
        os.kill(killed, signal.SIGKILL)
        start = time.monotonic()
        while not (now := ranks_of(tmp_path)) or set(now.values()) & set(before.values()):
            time.sleep(0.05)
        print(f"\n{fault} {rank}: started again {time.monotonic() - start:.1f} s after the kill")
        done = (tmp_path / "run" / "metrics.jsonl").read_bytes().count(b"\n")
        wait_for_update(tmp_path, done + 1)
        print(f"{fault} {rank}: next update {time.monotonic() - start:.1f} s after the kill")
        output, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, output
    said = "was ended by SIGKILL" if fault == "rank" else "and the process that started it are gone"
    assert f"rank {rank} {said}; all start again" in output
    assert not ranks_of(tmp_path)
    settings = {**SETTINGS, "num_updates": NUM_UPDATES, "checkpoint.every": 1}
    models = {"model": tmp_path / "models" / "policy", "reward": tmp_path / "models" / "reward", "device": "cpu"}
    kedge.ppo(prompts=tmp_path / "prompts.jsonl", out=tmp_path / "whole", **models, **settings)
    assert_equal_runs(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_ranks_cleanly(signum: signal.Signals, tmp_path: Path) -> None:
    with launched(tmp_path) as process:
        wait_for_update(tmp_path, 2)
        process.send_signal(signum)
        output, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 128 + signum, output
    assert "interrupted after" in output
    assert not ranks_of(tmp_path)


def test_a_user_error_is_not_repeated(tmp_path: Path) -> None:
    with launched(tmp_path, "num_prompts=0") as process:
        output, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 2, output
    assert output.count("error: ") == 1, output


def test_nothing_is_left_of_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with launched(tmp_path) as process:
        wait_for_update(tmp_path, 2)
        process.kill()
        deadline = time.monotonic() + LONGEST
        while ranks_of(tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.1)

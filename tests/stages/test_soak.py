"""A long run does not leak memory, open files, threads or processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.soak import FIGURES_FILE, SAVE_INTERVAL, Reading

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc what a process holds")


def soak(folder: Path, num_updates: int) -> dict[int, Reading]:
    """Readings by update, of a run in a process of its own: this one's memory is anybody's."""
    command = [sys.executable, "-m", "bench.soak", str(folder), "--updates", str(num_updates)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    readings = json.loads((folder / FIGURES_FILE).read_text())["readings"]
    return {row["update"]: Reading(**row) for row in readings}


def held(reading: Reading) -> tuple[int, int, int]:
    return reading.files, reading.threads, reading.children


def test_sixty_updates_leave_nothing_behind(tmp_path):
    readings = soak(tmp_path, 60)
    # From the second checkpoint on: it is the first that leaves its model's weights to the checkpoint, which fills
    # caches of transformers once (46 objects; from there on one per twenty updates).
    early, late = readings[40], readings[60]
    assert held(late) == held(early)
    # Leaking one update, such as a copy of the 14,000 weights, is 28 objects and 60 kB; twenty times that by now.
    assert late.objects - early.objects < 40
    assert late.memory - early.memory < 1.0
    # What could leak has happened: the reward function died and was started again, and old checkpoints were deleted.
    log = (tmp_path / "run" / "reward.log").read_text()
    assert log.count("exited with status 1") >= 2
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2
    assert 60 // SAVE_INTERVAL > 2


@pytest.mark.slow
def test_two_thousand_updates_leave_nothing_behind(tmp_path):
    readings = soak(tmp_path, 2000)
    assert {held(reading) for update, reading in readings.items() if update >= 200} == {held(readings[200])}
    assert readings[2000].objects - readings[200].objects < 1800
    assert readings[2000].memory <= 1.05 * readings[200].memory

"""A run killed at any step of a save, or with a failing disk, still has a valid checkpoint."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kedge.training.checkpoint.store import newest_valid, open_checkpoint
from kedge_base.errors import OutputError
from kedge_base.machine.durable import is_part
from tests.forking import fork_context
from tests.training.checkpoint.saver import is_consistent, names, refuse, save_until_killed, save_update

# Death at every step of a save.


class PowerCutError(BaseException):
    """The machine stops; nothing after this point happens."""


def die_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Fail from the n-th call that changes the disk; return whether that call was reached."""
    count = itertools.count(1)

    def guard(function: Callable[..., object]) -> Callable[..., object]:
        def guarded(*arguments: object, **options: object) -> object:
            number = next(count)
            if number == step and function is rmtree:  # rmtree is many steps: delete one file first
                min(Path(str(arguments[0])).iterdir()).unlink()
            if number >= step:
                raise PowerCutError
            return function(*arguments, **options)

        return guarded

    rmtree = shutil.rmtree
    for owner, name in ((Path, "mkdir"), (Path, "rename"), (os, "fsync"), (shutil, "rmtree")):
        monkeypatch.setattr(owner, name, guard(getattr(owner, name)))
    return lambda: next(count) > step


@pytest.mark.parametrize("keep", [1, 2])
def test_death_at_any_step_leaves_the_old_or_the_new_one(tmp_path, keep):
    for step in itertools.count(1):
        folder = tmp_path / str(step)
        for update in (1, 2):
            save_update(folder, update, keep=keep)
        with pytest.MonkeyPatch.context() as patch:
            died = die_at(step, patch)
            with contextlib.suppress(PowerCutError):
                save_update(folder, 3, keep=keep)
            over = not died()
        newest = newest_valid(folder, on_rejected=refuse)
        assert newest is not None
        assert newest.update == 3 if over else newest.update in (2, 3)
        assert is_consistent(newest)
        save_update(folder, newest.update + 1, keep=keep)
        kept = list(range(max(1, newest.update + 2 - keep), newest.update + 2))
        assert names(folder) == [f"update-{update:06d}" for update in kept]
        if over:
            break
    assert step > 10


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of open files from /proc")
def test_the_disk_has_every_file_before_the_name_and_the_name_before_anything_goes(tmp_path, monkeypatch):
    save_update(tmp_path, 1, keep=1)
    order: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note_fsync(descriptor: int) -> None:
        order.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        order.append(f"rename {path.name} {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    save_update(tmp_path, 2, keep=1)
    assert [re.sub(r"\.[0-9a-f]{16}\.", ".….", step) for step in order] == [
        "fsync policy.safetensors",
        "fsync optimizer.safetensors",
        "fsync state.json",
        "fsync manifest.json",
        "fsync .update-000002.….part",
        "rename .update-000002.….part update-000002",
        f"fsync {tmp_path.name}",
        "rename update-000001 .update-000001.….part",
    ]


def survive_kills(folder: Path, count: int, *, longest: float) -> int:
    """Repeatedly kill a run that saves continuously; return how many kills interrupted a save or deletion."""
    context = fork_context()
    saved, rng, halves, before = folder.parent / "saved", random.Random(0), 0, ""
    saved.touch()
    for _ in range(count):
        run = context.Process(target=save_until_killed, args=(folder, saved))
        run.start()
        while run.is_alive() and saved.read_text() == before:
            time.sleep(0.002)  # until it has saved once
        time.sleep(rng.uniform(0, longest))
        assert run.is_alive()
        run.kill()
        run.join()
        halves += any(map(is_part, folder.iterdir()))
        newest = newest_valid(folder, on_rejected=refuse)
        assert newest is not None
        assert is_consistent(newest)
        before = saved.read_text()
        assert newest.update >= int(before)
    return halves


@pytest.mark.skipif(sys.platform == "win32", reason="no fork server")
def test_kill_at_random_moments(tmp_path):
    assert survive_kills(tmp_path / "checkpoints", 8, longest=0.05) > 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no fork server")
def test_fifty_kills_at_random_moments(tmp_path):
    assert survive_kills(tmp_path / "checkpoints", 50, longest=0.2) > 10


# Failing disks.


def test_a_full_disk_is_one_line_and_leaves_the_last_one(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    save_update(folder, 1)
    for failing in range(1, 6):
        calls = itertools.count(1)

        def fsync(descriptor: int, calls: Iterator[int] = calls, failing: int = failing) -> None:
            if next(calls) == failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(OutputError) as error:
            save_update(folder, 2, size=1000)
        expected = f"{folder}: the checkpoint of update 2 cannot be saved (No space left on device); it needs 8,0"
        assert str(error.value).startswith(expected)
        assert names(folder) == ["update-000001"]
        assert is_consistent(open_checkpoint(folder / "update-000001"))


@pytest.mark.skipif(sys.platform == "win32", reason="no RLIMIT_FSIZE")
def test_a_write_that_stops_half_way_is_one_line(tmp_path):
    import resource

    save_update(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(OutputError, match=r"update 2 cannot be saved \(File too large\); it needs 8,000,0"):
            save_update(tmp_path, 2, size=1_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["update-000001"]
    assert is_consistent(open_checkpoint(tmp_path / "update-000001"))


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_a_small_disk_that_fills_up(small_disk):
    folder = small_disk / "checkpoints"
    for update in (1, 2):
        save_update(folder, update, size=150_000)  # 1.2 MB each
    for _ in range(2):
        with pytest.raises(OutputError, match="No space left on device"):
            save_update(folder, 3, size=1_000_000)
        assert names(folder) == ["update-000001", "update-000002"]
        newest = newest_valid(folder, on_rejected=refuse)
        assert newest is not None
        assert is_consistent(newest)
    save_update(folder, 3, size=150_000)
    assert names(folder) == ["update-000002", "update-000003"]


def test_a_file_in_the_way_is_one_line(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(OutputError, match=r"checkpoints: the checkpoint of update 1 cannot be saved \(File exists\)"):
        save_update(tmp_path / "checkpoints", 1)

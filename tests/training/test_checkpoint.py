"""Checkpoints under attack: killed at every step and at random, damaged at every byte, on a full disk."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kedge.errors import DataError, NumericsError, OutputError
from kedge.training import checkpoint as module
from kedge.training.checkpoint import clean_leftovers, newest_valid, open_checkpoint, save_checkpoint
from kedge.training.manifest import MANIFEST_FILE
from tests.training.saver import is_consistent, save_until_killed, save_update

FILES = ("manifest.json", "optimizer.safetensors", "policy.safetensors", "state.json")


def refuse(line: str) -> None:
    raise AssertionError(line)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def saved(folder: Path, **more: object) -> Path:
    settings = {"update": 1, "kind": "ppo", "fingerprint": {}, "tensors": {}, "state": {}, "keep": 2}
    return save_checkpoint(folder, **(settings | more))


# What is saved comes back.


def test_a_checkpoint_is_what_was_saved(tmp_path):
    path = save_update(tmp_path / "checkpoints", 123)
    assert path.name == "update-000123"
    assert names(path) == list(FILES)
    found = newest_valid(tmp_path / "checkpoints", on_rejected=refuse)
    assert found is not None
    assert is_consistent(found)
    assert (found.update, found.manifest.kind) == (123, "ppo")
    assert found.manifest.fingerprint == {"data.prompts": "abc"}


def test_every_number_and_text_comes_back(tmp_path):
    state = {
        "floats": [0.1 + 0.2, 5e-324, -0.0, 1.7976931348623157e308, 1 / 3],
        "integers": [2**63 - 1, -(2**200)],
        "texts": ["naïve 🛟", "\ud83d", "\x00\u2028"],
        "rest": [None, True, {}, []],
    }
    assert repr(open_checkpoint(saved(tmp_path, state=state)).state) == repr(state)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_state_that_is_not_finite_is_refused_by_name(tmp_path, value):
    with pytest.raises(NumericsError, match=rf"state.controller\[1\].kl is {value}"):
        saved(tmp_path, state={"controller": [0, {"kl": value}]})
    assert names(tmp_path) == []


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, torch.tensor(1.0), Path("x")])
def test_what_json_would_change_is_refused(tmp_path, value):
    with pytest.raises(TypeError, match=r"state\.position is a"):
        saved(tmp_path, state={"position": value})


def test_no_checkpoint_is_none(tmp_path):
    assert newest_valid(tmp_path / "nowhere", on_rejected=refuse) is None
    assert newest_valid(tmp_path, on_rejected=refuse) is None


def test_a_part_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"update-000001: has no critic.safetensors"):
        open_checkpoint(saved(tmp_path)).tensors("critic")


# Which stay, and in which order the others go.


def test_the_newest_stay(tmp_path):
    for update in range(8, 13):
        save_update(tmp_path, update, keep=3)
    assert names(tmp_path) == ["update-000010", "update-000011", "update-000012"]


def test_numbers_beyond_six_digits_are_newer(tmp_path):
    for update in (999_999, 1_000_000):
        save_update(tmp_path, update)
    newest = newest_valid(tmp_path, on_rejected=refuse)
    assert newest is not None
    assert newest.update == 1_000_000


def test_a_run_that_went_back_leaves_the_later_ones_behind(tmp_path):
    for update in (10, 20, 30):
        save_update(tmp_path, update, keep=3)
    save_update(tmp_path, 15, keep=1)
    assert names(tmp_path) == ["update-000015"]


def test_a_valid_one_of_the_same_update_stays_and_a_broken_one_goes(tmp_path):
    path = save_update(tmp_path, 5, keep=1)
    before = (path / MANIFEST_FILE).stat().st_mtime_ns
    save_update(tmp_path, 5, keep=1)
    assert (path / MANIFEST_FILE).stat().st_mtime_ns == before
    (path / "state.json").write_text("{}")
    save_update(tmp_path, 5, keep=1)
    assert is_consistent(open_checkpoint(path))
    assert names(tmp_path) == ["update-000005"]


def test_an_old_one_goes_only_after_the_new_one_is_there(tmp_path, monkeypatch):
    save_update(tmp_path, 1, keep=1)
    seen: list[list[str]] = []

    def remove(path: Path) -> None:
        seen.append(names(tmp_path))
        shutil.rmtree(path)

    monkeypatch.setattr(module, "_remove", remove)
    save_update(tmp_path, 2, keep=1)
    assert seen == [[".tmp-old-update-000001", "update-000002"]]


def test_leftovers_are_cleaned_by_the_next_save_and_on_demand(tmp_path):
    for clean in (lambda: save_update(tmp_path, 2), lambda: clean_leftovers(tmp_path)):
        (tmp_path / ".tmp-update-000001").mkdir(exist_ok=True)
        (tmp_path / ".tmp-update-000001" / "policy.safetensors").write_bytes(b"half")
        (tmp_path / ".tmp-file").write_bytes(b"")
        clean()
        assert names(tmp_path) == ["update-000002"]


# Damage.


@pytest.fixture
def two(tmp_path) -> Path:
    for update in (1, 2):
        save_update(tmp_path, update, size=3)
    return tmp_path


def check_rejected(folder: Path, reason: str) -> None:
    """The second checkpoint is rejected in one line for this reason, and the first one is used."""
    lines: list[str] = []
    found = newest_valid(folder, on_rejected=lines.append)
    assert found is not None
    assert is_consistent(found)
    assert found.update == 1
    assert len(lines) == 1
    assert lines[0].startswith(str(folder / "update-000002"))
    assert reason in lines[0]
    assert "\n" not in lines[0]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_at_any_byte_is_found(two, name):
    path, rng = two / "update-000002" / name, random.Random(name)
    whole = path.read_bytes()
    for position in range(len(whole)):
        flipped = whole[position] ^ (1 << rng.randrange(8))
        path.write_bytes(whole[:position] + bytes([flipped]) + whole[position + 1 :])
        check_rejected(two, f"{name}: ")
    path.write_bytes(whole)
    assert is_consistent(open_checkpoint(path.parent))


@pytest.mark.parametrize("name", FILES)
def test_any_other_length_is_found(two, name):
    path = two / "update-000002" / name
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        check_rejected(two, f"{name}: ")
    path.write_bytes(whole + b"\n")
    check_rejected(two, f"{name}: ")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(two, name):
    (two / "update-000002" / name).unlink()
    check_rejected(two, name)


def test_a_file_of_somebody_else_is_named(two):
    (two / "update-000002" / "pytorch_model.bin").write_bytes(b"")
    check_rejected(two, "pytorch_model.bin: does not belong there")


def test_an_exchanged_file_is_named(two):
    shutil.copy(two / "update-000001" / "policy.safetensors", two / "update-000002")
    check_rejected(two, "policy.safetensors: its bytes are not those that were written")


def test_a_renamed_checkpoint_is_found(two):
    (two / "update-000002").rename(two / "update-000003")
    lines: list[str] = []
    newest_valid(two, on_rejected=lines.append)
    assert lines == [f"{two / 'update-000003'}: is the checkpoint of update 2, under another name"]


@pytest.mark.parametrize("text", ["", "null", "[]", "7", '{"sha256": 1}', "[" * 100_000, '{"update": 2}'])
def test_any_other_manifest_is_refused(two, text):
    (two / "update-000002" / MANIFEST_FILE).write_text(text)
    check_rejected(two, "manifest.json: is not as it was written")


def test_a_format_of_the_future_is_named(two, monkeypatch):
    monkeypatch.setattr("kedge.training.manifest.FORMAT", 2)
    lines: list[str] = []
    assert newest_valid(two, on_rejected=lines.append) is None
    assert len(lines) == 2
    assert "manifest.json: is of format 1, by kedge " in lines[0]


def test_a_file_in_the_place_of_a_folder_is_named(two):
    shutil.rmtree(two / "update-000002")
    (two / "update-000002").write_text("not a folder")
    check_rejected(two, "cannot be read (Not a directory)")


def test_all_broken_is_none_and_each_is_told(two):
    for path in two.iterdir():
        (path / "state.json").unlink()
    lines: list[str] = []
    assert newest_valid(two, on_rejected=lines.append) is None
    assert len(lines) == 2


# Death at each step of a save.


class PowerCutError(BaseException):
    """The machine stops: nothing that would come after it is done."""


def die_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Stop at the n-th call that changes the disk, and at all after it; return whether it came to that."""
    count = itertools.count(1)

    def guard(function: Callable[..., object]) -> Callable[..., object]:
        def guarded(*arguments: object, **options: object) -> object:
            number = next(count)
            if number == step and function is rmtree:  # which is many steps: it has deleted one file
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


def survive_kills(folder: Path, count: int, *, longest: float) -> int:
    """Kill a run that saves itself all the time, again and again; return how many kills left a save half done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.saver"])
    told, rng, halves, before = folder.parent / "saved", random.Random(0), 0, ""
    told.touch()
    for _ in range(count):
        run = context.Process(target=save_until_killed, args=(folder, told))
        run.start()
        while run.is_alive() and told.read_text() == before:
            time.sleep(0.002)  # until it is at work
        time.sleep(rng.uniform(0, longest))
        assert run.is_alive()
        run.kill()
        run.join()
        halves += any(path.name.startswith(".tmp-") for path in folder.iterdir())
        newest = newest_valid(folder, on_rejected=refuse)
        assert newest is not None
        assert is_consistent(newest)
        before = told.read_text()
        assert newest.update >= int(before)
    return halves


@pytest.mark.skipif(sys.platform == "win32", reason="no fork server")
def test_kill_at_random_moments(tmp_path):
    assert survive_kills(tmp_path / "checkpoints", 8, longest=0.05) > 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no fork server")
def test_fifty_kills_at_random_moments(tmp_path):
    assert survive_kills(tmp_path / "checkpoints", 50, longest=0.2) > 10


# A disk that refuses.


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


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of that kind")
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


def test_a_folder_in_the_way_is_one_line(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(OutputError, match=r"checkpoints: the checkpoint of update 1 cannot be saved \(File exists\)"):
        save_update(tmp_path / "checkpoints", 1)


def test_the_manifest_is_plain_json(tmp_path):
    manifest = json.loads((save_update(tmp_path, 1) / MANIFEST_FILE).read_text())
    assert manifest["files"]["state.json"]["size"] == (tmp_path / "update-000001" / "state.json").stat().st_size

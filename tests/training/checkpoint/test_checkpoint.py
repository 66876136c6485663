"""Checkpoints load as saved; any damage is found and named; the newest are kept."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.training.checkpoint.files import MANIFEST_FILE
from kedge.training.checkpoint.store import newest_valid, open_checkpoint, save_checkpoint
from kedge_base.errors import DataError, NumericsError
from kedge_base.machine import durable
from tests.training.checkpoint.saver import is_consistent, names, refuse, save_update

FILES = ("manifest.json", "optimizer.safetensors", "policy.safetensors", "state.json")


def saved(folder: Path, **more: Any) -> Path:
    settings: dict[str, Any] = {"update": 1, "kind": "ppo", "fingerprint": {}, "tensors": {}, "state": {}, "keep": 2}
    return save_checkpoint(folder, **(settings | more))


# Round trips.


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
    with pytest.raises(TypeError, match=r"state\.position is of type"):
        saved(tmp_path, state={"position": value})


def test_no_checkpoint_is_none(tmp_path):
    assert newest_valid(tmp_path / "nowhere", on_rejected=refuse) is None
    assert newest_valid(tmp_path, on_rejected=refuse) is None


def test_a_missing_group_is_named(tmp_path):
    with pytest.raises(DataError, match=r"update-000001: critic.safetensors is missing"):
        open_checkpoint(saved(tmp_path)).tensors("critic")


# Which are kept, and the order of deletions.


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
        if path.exists():
            seen.append(names(tmp_path))
            shutil.rmtree(path)

    monkeypatch.setattr(durable, "_remove", remove)
    save_update(tmp_path, 2, keep=1)
    [[left, new]] = seen
    assert left.startswith(".update-000001.")
    assert new == "update-000002"


def test_leftovers_are_cleaned_by_the_next_save(tmp_path):
    left = durable.temporary_name(tmp_path / "update-000001")
    left.mkdir()
    (left / "policy.safetensors").write_bytes(b"half")
    durable.temporary_name(tmp_path / "file").write_bytes(b"")
    save_update(tmp_path, 2)
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


def test_an_unexpected_file_is_named(two):
    (two / "update-000002" / "pytorch_model.bin").write_bytes(b"")
    check_rejected(two, "pytorch_model.bin: is not in the manifest")


def test_an_exchanged_file_is_named(two):
    shutil.copy(two / "update-000001" / "policy.safetensors", two / "update-000002")
    check_rejected(two, "policy.safetensors: is damaged (its SHA-256 is not the one in the manifest)")


def test_a_renamed_checkpoint_is_found(two):
    (two / "update-000002").rename(two / "update-000003")
    lines: list[str] = []
    newest_valid(two, on_rejected=lines.append)
    assert lines == [f"{two / 'update-000003'}: contains the checkpoint of update 2; the folder was renamed"]


@pytest.mark.parametrize("text", ["", "null", "[]", "7", '{"sha256": 1}', "[" * 100_000, '{"update": 2}'])
def test_any_other_manifest_is_refused(two, text):
    (two / "update-000002" / MANIFEST_FILE).write_text(text)
    check_rejected(two, "manifest.json: is damaged (its hash does not match)")


def test_an_unsupported_format_is_named(two, monkeypatch):
    monkeypatch.setattr("kedge.training.checkpoint.files.FORMAT", 4)
    lines: list[str] = []
    assert newest_valid(two, on_rejected=lines.append) is None
    assert len(lines) == 2
    assert "manifest.json: has format 3 of kedge " in lines[0]
    assert lines[0].endswith("this version reads format 4")


def test_a_file_instead_of_a_folder_is_named(two):
    shutil.rmtree(two / "update-000002")
    (two / "update-000002").write_text("not a folder")
    check_rejected(two, "cannot be read (Not a directory)")


def test_without_a_valid_one_each_is_reported(two):
    for path in two.iterdir():
        (path / "state.json").unlink()
    lines: list[str] = []
    assert newest_valid(two, on_rejected=lines.append) is None
    assert len(lines) == 2


def test_the_manifest_is_plain_json(tmp_path):
    manifest = json.loads((save_update(tmp_path, 1) / MANIFEST_FILE).read_text())
    assert manifest["files"]["state.json"]["size"] == (tmp_path / "update-000001" / "state.json").stat().st_size

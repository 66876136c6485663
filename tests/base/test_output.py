"""Checks before writing: free folders, and system errors as one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kedge.models import load_language_model, load_tokenizer, save_policy
from kedge_base.errors import OutputError
from kedge_base.machine.invocation import mark_command_line
from kedge_base.run_folder.output import (
    REJECTED_FILE,
    REWARD_LOG,
    check_output,
    free_folders,
    replace_file,
    write_summary,
    writing,
)
from kedge_hub.card import ModelCard
from tests.tiny import save_tiny_policy


def test_nothing_an_empty_folder_and_rejected_rows_are_free(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "ppo"
    assert check_output(folder) == folder
    assert not folder.parent.exists()
    folder.mkdir(parents=True)
    assert check_output(str(folder)) == folder
    (folder / REJECTED_FILE).touch()
    (folder / REWARD_LOG).touch()
    assert check_output(folder) == folder
    (folder / "notes.txt").touch()
    with pytest.raises(OutputError, match=r"ppo is not empty; choose another out=, or empty it$"):
        check_output(folder)


def test_an_empty_name_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--out "$RUN"` without the variable would write into an empty current folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match=r"^out= is empty text; give a folder's name, or \. for the current folder$"):
        check_output("")


def test_a_folder_below_more_folders_than_python_can_make_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_output("d/" * 200).parts == ("d",) * 200
    with pytest.raises(OutputError, match=r"^d/d/.*… cannot be created: more than 200 levels$"):
        check_output("d/" * 1_500)


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_folder_with_a_run_names_the_line_that_resumes_it(tmp_path: Path, has_checkpoint: bool) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    if has_checkpoint:
        (folder / "checkpoints" / "update-000003").mkdir(parents=True)
    (folder / "config.yaml").write_text("# stage: ppo\n# device: cpu\nmodel: m\n")
    with pytest.raises(OutputError, match=r"another out=, or empty it, or resume its run of ppo: resume=True$"):
        check_output(folder)
    mark_command_line()
    with pytest.raises(OutputError) as caught:
        check_output(folder)
    assert str(caught.value).endswith(f"or empty it, or resume its run of ppo: kedge ppo --resume '{folder}'")
    for header in ("# stage: generate", "# stage: nonsense", "model: m"):  # nothing to resume
        (folder / "config.yaml").write_text(f"{header}\n")
        with pytest.raises(OutputError, match=r"another --out, or empty it$"):
            check_output(folder)


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_output("~/run") == tmp_path / "run"


def test_what_cannot_be_created_is_refused_without_creating_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / "file" / "deep" / "run"):
        with pytest.raises(OutputError, match=r"cannot be created: .*file is not a folder$"):
            check_output(folder)
    with pytest.raises(OutputError, match=r"^/dev/null/run cannot be created: /dev/null is not a folder$"):
        check_output("/dev/null/run")


def test_a_write_protected_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Real permissions would not do: root may write everywhere.
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path)
    with pytest.raises(OutputError, match=f"cannot be created: {tmp_path} is write-protected"):
        check_output(tmp_path / "runs" / "ppo")
    (tmp_path / "open").mkdir()
    assert check_output(tmp_path / "open" / "ppo") == tmp_path / "open" / "ppo"


def test_the_free_folders(tmp_path: Path) -> None:
    demo = tmp_path / "demo"
    assert next(free_folders(demo)) == demo
    for name in ("demo", "demo-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / REJECTED_FILE).touch()
    assert next(free_folders(demo)) == demo
    (demo / "metrics.jsonl").touch()
    assert next(free_folders(demo)) == tmp_path / "demo-2"
    (tmp_path / "demo-2" / "metrics.jsonl").touch()
    assert next(free_folders(demo)) == tmp_path / "demo-3"


def test_a_system_error_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "none" / "file"
    with (
        pytest.raises(OutputError, match=r"^\S+/none/file cannot be written: No such file or directory$"),
        writing(path),
    ):
        path.write_text("text")


def test_a_file_is_replaced_atomically(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "log"
    replace_file(path, [b"a", b"b"])
    assert path.read_bytes() == b"ab"

    def refuse(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OutputError, match=r"log cannot be written: No space left on device"):
        replace_file(path, [b"c"])
    assert path.read_bytes() == b"ab"
    assert list(tmp_path.iterdir()) == [path]


def test_the_summary_of_a_stage_is_complete_or_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OutputError, match=r"summary.json cannot be written: No space left on device"):
        write_summary(tmp_path, {"mean": 0.0})
    assert list(tmp_path.iterdir()) == []


def test_saved_files_may_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        model = save_tiny_policy(tmp_path / "source")
        tokenizer = load_tokenizer(model)
        policy = load_language_model(str(model), tokenizer=tokenizer, value_head=True)
        saved = save_policy(policy, tokenizer, tmp_path / "model", card=ModelCard("sft", "base"))
    finally:
        os.umask(before)
    files = {path.relative_to(saved).as_posix(): path for path in saved.rglob("*") if path.is_file()}
    assert {oct(path.stat().st_mode & 0o777) for path in files.values()} == {"0o640"}
    assert {"model.safetensors", "value_head/model.safetensors"} <= set(files)

"""Files and folders appear complete, under random names until then, and no link that lies in wait is followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kedge.durable import is_part, remove_parts, replace_contents, replaced_folder
from kedge.errors import OutputError
from kedge.inspect.report import write_report
from kedge.output import check_output
from tests.inspect.page.records import ppo_record, write_run


def test_links_in_the_place_of_a_page_or_its_temporary_file_are_not_followed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ppo_record())
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (folder / "report.html.part").symlink_to(victim)
    page = write_report([folder])
    assert victim.read_text() == "mine"
    page.rename(tmp_path / "page.html")
    page.symlink_to(tmp_path / "page.html")
    before = (tmp_path / "page.html").read_bytes()
    write_report([folder])
    assert not page.is_symlink()
    assert (tmp_path / "page.html").read_bytes() == before


def test_a_pipe_in_the_place_of_a_page_is_one_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ppo_record())
    os.mkfifo(folder / "report.html")
    with pytest.raises(OutputError, match=r"report\.html exists and is not a kedge report"):
        write_report([folder])


def test_a_folder_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "model"

    def replace(text: str, error: OSError | None = None) -> None:
        with replaced_folder(folder) as part:
            (part / "weights").write_text(text)
            assert is_part(part)
            if error is not None:
                raise error

    replace("first")
    replace("second")
    with pytest.raises(OSError, match="full"):
        replace("third", OSError(28, "full"))
    rename = Path.rename

    def refuse_the_last(self: Path, target: Path) -> Path:
        if Path(target) == folder and (self / "weights").read_text() == "fourth":
            raise OSError(13, "refused")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_the_last)
    with pytest.raises(OSError, match="refused"):
        replace("fourth")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == [
        "new", "new/model", "new/model/weights"
    ]  # fmt: skip
    assert (folder / "weights").read_text() == "second"


def test_what_a_killed_process_leaves_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(_: int) -> None:
        raise SystemExit

    with monkeypatch.context() as killed:
        killed.setattr(os, "fsync", kill)
        killed.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(SystemExit):
            replace_contents(tmp_path / "config.yaml", [b"seed: 3"])
    [left] = tmp_path.iterdir()
    assert check_output(tmp_path) == tmp_path
    (tmp_path / "notes.part").touch()
    remove_parts(tmp_path)
    assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.part"]

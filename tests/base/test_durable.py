"""Files and folders appear complete, under random names until then, and no link that lies in wait is followed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kedge.logs.run_folder import create_run_folder
from kedge_base.errors import OutputError
from kedge_base.machine.durable import (
    copy_tree,
    is_part,
    remove_parts,
    replace_contents,
    replaced_folder,
    share_as_usual,
)
from kedge_base.run_folder.output import check_output
from kedge_inspect.report import write_report
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


def refuse(code: int) -> Callable[..., None]:
    def call(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


def folders_only(refusal: Callable[..., None], usual: Callable[..., None]) -> Callable[..., None]:
    return lambda place, *rest: (
        refusal()
        if stat.S_ISDIR((os.fstat if isinstance(place, int) else os.stat)(place).st_mode)
        else usual(place, *rest)
    )


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_mount_without_fsync_of_folders_is_written_to(tmp_path, monkeypatch, code):
    monkeypatch.setattr(os, "fsync", folders_only(refuse(code), os.fsync))
    with replaced_folder(tmp_path / "new" / "model") as part:
        replace_contents(part / "weights", [b"1"])
    assert (tmp_path / "new/model/weights").read_text() == "1"
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        replace_contents(tmp_path / "config.yaml", [b"2"])


def test_permissions_are_set_where_they_differ_and_the_mount_has_them(tmp_path, monkeypatch):
    for name, mode in (("usual", 0o644), ("secret", 0o600)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    (tmp_path / "probe").touch()
    usual = stat.S_IMODE((tmp_path / "probe").stat().st_mode)
    (tmp_path / "usual").chmod(usual)
    changed = []
    chmod = os.chmod
    monkeypatch.setattr(os, "chmod", lambda path, *rest, **more: (changed.append(Path(path).name), chmod(path, *rest)))
    share_as_usual(tmp_path)
    assert changed == ["secret"]
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == usual
    chmod(tmp_path / "secret", 0o600)
    monkeypatch.setattr(os, "chmod", refuse(errno.EPERM))
    share_as_usual(tmp_path)
    copy_tree(tmp_path, tmp_path.with_name("copy"), leave_out="prob*")
    assert sorted(os.listdir(tmp_path.with_name("copy"))) == ["secret", "usual"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EXDEV])
def test_a_mount_that_cannot_rename_folders_is_one_line(tmp_path, monkeypatch, code):
    monkeypatch.setattr(os, "rename", folders_only(refuse(code), os.rename))
    with pytest.raises(OutputError) as error:
        create_run_folder(tmp_path / "run")
    assert str(error.value) == (
        f"{tmp_path / 'run'} cannot be written: its file system cannot rename folders ({os.strerror(code)}); "
        "choose another one"
    )
    assert os.listdir(tmp_path) == []
    with pytest.raises(OSError, match="cannot rename folders"), replaced_folder(tmp_path / "model"):
        pass
    assert os.listdir(tmp_path) == []


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

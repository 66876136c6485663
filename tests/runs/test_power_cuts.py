"""After a power cut, the disk has every rename, but of the files' contents only what was forced to it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kedge.config import Config, config_from_settings
from kedge.logs.json_lines import read_metrics
from kedge.runs.resuming import damage, finished_run
from kedge.runs.run import Resume
from kedge.stages.sft import run_sft
from kedge_base.errors import DataError
from tests.tiny import save_tiny_policy

ROWS = [{"prompt": f"Deck {number}:", "completion": f" Aye, {number}."} for number in range(8)]


class Disk:
    """Copies a folder after every rename in it, with what was forced to disk by then; the rest is empty."""

    def __init__(self, folder: Path, cuts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.cuts, self.forced = folder, cuts, dict[int, tuple[str, bytes]]()
        self.names: list[str] = []
        fsync, rename, replace = os.fsync, os.rename, os.replace

        def forcing(descriptor: int) -> None:
            fsync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_file():
                self.forced[path.stat().st_ino] = (path.suffix, path.read_bytes())

        def renaming(do):
            def renamed(source, target, **options):
                do(source, target, **options)
                self.cut(Path(target))

            return renamed

        monkeypatch.setattr(os, "fsync", forcing)
        monkeypatch.setattr(os, "rename", renaming(rename))
        monkeypatch.setattr(os, "replace", renaming(replace))

    def cut(self, renamed: Path) -> None:
        """Power is lost right after a rename."""
        if self.folder not in renamed.parents:
            return
        copy = self.cuts / f"{len(self.names):03d}"
        self.names.append(renamed.name)
        for path in self.folder.rglob("*"):
            target = copy / path.relative_to(self.folder)
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                suffix, contents = self.forced.get(path.stat().st_ino, ("", b""))
                # A new file may have got the inode of a deleted one.
                target.write_bytes(contents if contents in (path.read_bytes(), b"") or suffix == ".jsonl" else b"")


def configured(policy: Path, out: Path) -> Config:
    settings = {"sft.batch_size": 4, "data.eval_fraction": 0, "checkpoint.every": 1, "checkpoint.keep": 9}
    quiet = {"runtime.report": False}
    return config_from_settings("sft", {"model": str(policy), "out": str(out), **settings, **quiet})


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs the names of open files")
def test_what_is_announced_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = save_tiny_policy(tmp_path / "policy")
    with monkeypatch.context() as patch:
        disk = Disk(tmp_path / "run", tmp_path / "cuts", patch)
        run_sft(configured(policy, tmp_path / "run"), demonstrations=ROWS)
    firsts = [disk.names.index(name) for name in ("config.yaml", "update-000001", "finished.json")]
    for number in firsts:
        out = tmp_path / "run"
        shutil.rmtree(out)
        shutil.copytree(disk.cuts / f"{number:03d}", out)
        config = configured(policy, out)
        assert (finished_run(config) is not None) == (disk.names[number] == "finished.json")
        run_sft(config, demonstrations=ROWS, resume=Resume())
        assert weights(out) == weights(disk.cuts / f"{len(disk.names) - 1:03d}")
        assert [row["update"] for row in read_metrics(out)] == [1, 2]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run_sft(configured(save_tiny_policy(folder / "policy"), folder / "run"), demonstrations=ROWS)
    return folder


def test_a_finished_run_with_a_damaged_model_is_resumed(finished, capsys):
    config = configured(finished / "policy", finished / "run")
    assert finished_run(config) == finished / "run"
    model, whole = finished / "run" / "model", weights(finished / "run")
    (model / "model.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    run_sft(config, demonstrations=ROWS, resume=Resume())
    assert "model.safetensors is damaged: the end of the run is repeated" in capsys.readouterr().err.replace("\n", "")
    assert weights(finished / "run") == whole
    for name, contents, problem in (("config.json", b"", "damaged"), ("tokenizer.json", b"{", "damaged")):
        kept = (model / name).read_bytes()
        (model / name).write_bytes(contents)
        assert damage(finished / "run") == f"{model / name} is {problem}"
        (model / name).write_bytes(kept)
    (model / "generation_config.json").rename(model / "gone.json")
    assert damage(finished / "run") == f"{model / 'generation_config.json'} is missing"
    (model / "gone.json").rename(model / "generation_config.json")
    assert finished_run(config) == finished / "run"


def test_without_a_checkpoint_a_damaged_model_is_one_line_and_nothing_is_trained(finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    (tmp_path / "run" / "model" / "README.md").write_text("Edited.")
    config = configured(finished / "policy", tmp_path / "run")
    assert finished_run(config) == tmp_path / "run"
    (tmp_path / "run" / "model" / "config.json").write_bytes(b"")
    with pytest.raises(DataError, match=r"config\.json is damaged, and .* has no checkpoint"):
        run_sft(config, demonstrations=ROWS, resume=Resume())
    assert finished_run(configured(finished / "policy", tmp_path / "other")) is None

"""A run's folder is never a second run's, and its configuration file is a configuration again."""

from __future__ import annotations

import platform

import pytest
import torch
import yaml

from kedge.errors import OutputError
from kedge.report.run_folder import create_run_folder, installed_versions, next_free_folder, write_config


def test_new_and_empty_folders_are_taken(tmp_path):
    folder = create_run_folder(tmp_path / "runs" / "demo")
    assert folder.is_dir()
    assert create_run_folder(folder) == folder


def test_a_folder_with_anything_in_it_is_refused_and_left_alone(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / ".hidden").write_text("mine")
    with pytest.raises(OutputError, match=r"demo' is not empty; try '.*demo-2'"):
        create_run_folder(tmp_path / "demo")
    assert [path.name for path in (tmp_path / "demo").iterdir()] == [".hidden"]
    assert not (tmp_path / "demo-2").exists()


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "demo").write_text("a file")
    with pytest.raises(OutputError, match="demo' is a file; expected a folder"):
        create_run_folder(tmp_path / "demo")
    with pytest.raises(OutputError, match="cannot be made: Not a directory"):
        create_run_folder(tmp_path / "demo" / "below")


def test_the_next_free_folder(tmp_path):
    demo = tmp_path / "demo"
    assert next_free_folder(demo) == demo
    for name in ("demo", "demo-2"):
        (tmp_path / name).mkdir()
    assert next_free_folder(demo) == demo
    (demo / "metrics.jsonl").touch()
    assert next_free_folder(demo) == tmp_path / "demo-2"
    (tmp_path / "demo-2" / "metrics.jsonl").touch()
    assert next_free_folder(demo) == tmp_path / "demo-3"


def test_the_configuration_is_written_with_its_versions(tmp_path):
    text = "ppo:\n  clip_range: 0.2\n"
    path = write_config(tmp_path, text, {**installed_versions(), "seed": 3})
    written = path.read_text()
    assert yaml.safe_load(written) == {"ppo": {"clip_range": 0.2}}
    assert written.startswith("# kedge: ")
    for line in (f"# torch: {torch.__version__.split('+')[0]}", f"# python: {platform.python_version()}", "# seed: 3"):
        assert line in written

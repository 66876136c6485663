"""A run's folder is never shared with a second run, and its configuration file can be loaded again."""

from __future__ import annotations

import pytest
import yaml

from kedge.logs.run_folder import create_run_folder, discard_run_folder, write_config
from kedge_base.errors import OutputError


def test_new_and_empty_folders_are_accepted(tmp_path):
    folder = create_run_folder(tmp_path / "runs" / "demo")
    assert folder.is_dir()
    assert create_run_folder(folder) == folder


def test_a_folder_with_anything_in_it_is_refused_and_left_alone(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / ".hidden").write_text("mine")
    with pytest.raises(OutputError, match="demo is not empty"):
        create_run_folder(tmp_path / "demo")
    assert [path.name for path in (tmp_path / "demo").iterdir()] == [".hidden"]


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "demo").write_text("a file")
    with pytest.raises(OutputError, match=r"demo cannot be created: .*demo is not a folder"):
        create_run_folder(tmp_path / "demo")
    with pytest.raises(OutputError, match=r"below cannot be created: .*demo is not a folder"):
        create_run_folder(tmp_path / "demo" / "below")


def test_a_folder_that_cannot_be_created_is_named(tmp_path):
    with pytest.raises(OutputError, match="cannot be created: File name too long"):
        create_run_folder(tmp_path / ("n" * 300))


def started(folder, **files):
    create_run_folder(folder)
    write_config(folder, "ppo: {}", {})
    for name, text in files.items():
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def test_a_run_without_results_leaves_no_folder(tmp_path):
    discard_run_folder(started(tmp_path / "run", metrics="", samples=""))
    assert not (tmp_path / "run").exists()


def test_rejected_rows_outlive_their_run(tmp_path):
    folder = started(tmp_path / "run", metrics="", rejected="{}\n")
    discard_run_folder(folder)
    assert [path.name for path in folder.iterdir()] == ["rejected.jsonl"]
    assert create_run_folder(folder) == folder


def test_a_run_with_results_is_left_alone(tmp_path):
    folder = started(tmp_path / "run", metrics='{"update": 1}\n', samples="")
    discard_run_folder(folder)
    assert len(list(folder.iterdir())) == 3
    folder = started(tmp_path / "other", metrics="")
    (folder / "model").mkdir()
    discard_run_folder(folder)
    assert len(list(folder.iterdir())) == 3


def test_the_configuration_is_written_with_its_facts(tmp_path):
    text = "ppo:\n  clip_range: 0.2\n"
    path = write_config(tmp_path, text, {"stage": "ppo", "seed": 3})
    written = path.read_text()
    assert yaml.safe_load(written) == {"ppo": {"clip_range": 0.2}}
    assert written.startswith("# stage: ppo\n# seed: 3\n")

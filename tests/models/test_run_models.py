"""The names of models: folders, runs, and checkpoints by number or as the best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kedge.models import find_model
from kedge_base.errors import ModelError


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run with three checkpoints, the first without its model."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/x")
    for model in (folder, *(folder / f"checkpoints/update-00000{update}" for update in (8, 9))):
        (model / "model").mkdir(parents=True)
        (model / "model/config.json").write_text("{}")
    for update in (4, 8, 9):
        (folder / f"checkpoints/update-00000{update}").mkdir(exist_ok=True)
        (folder / f"checkpoints/update-00000{update}/manifest.json").write_text("{}")
    (folder / "config.yaml").write_text("")
    (folder / "checkpoints/best.json").write_text(json.dumps({"update": 8, "metric": "eval/score", "value": 0.5}))
    return folder


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("runs/x", "runs/x/model"),
        ("runs/x/model", "runs/x/model"),
        ("runs/x@8", "runs/x/checkpoints/update-000008/model"),
        ("runs/x@best", "runs/x/checkpoints/update-000008/model"),
        ("runs/x@009", "runs/x/checkpoints/update-000009/model"),
        ("runs/x/checkpoints/update-000009", "runs/x/checkpoints/update-000009/model"),
        ("org/name", "org/name"),
        ("runs", "runs"),
    ],
)
def test_a_name_is_a_folder(run, name, folder):
    assert find_model(name) == folder
    assert find_model(Path(name)) == folder


def test_a_folder_of_that_name_comes_first(run):
    Path("runs/x@8").mkdir()
    Path("runs/x@8/config.json").write_text("{}")
    assert find_model("runs/x@8") == "runs/x@8"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("runs/x@7", "no checkpoint of update 7; it has checkpoints of updates 4, 8 (best), 9"),
        ("runs/x@4", "update-000004 has no model"),
        ("runs/x/checkpoints/update-000004", "update-000004 has no model"),
        ("runs/x@bset", "@ is followed by the number of an update, or by best; it has checkpoints of updates 4, 8"),
        ("runs/x@-8", "@ is followed by the number"),
        ("runs/y@8", "'runs/y' is not the folder of a run"),
        ("org/name@main", "'org/name' is not the folder of a run"),
    ],
)
def test_a_wrong_name_is_one_line(run, name, said):
    with pytest.raises(ModelError, match=r"^model '") as error:
        find_model(name)
    assert said in str(error.value)


def test_a_run_without_models_says_so(run):
    (run / "checkpoints/best.json").unlink()
    with pytest.raises(ModelError, match="kept no best checkpoint; it has checkpoints of updates 4, 8, 9"):
        find_model("runs/x@best")
    (run / "model/config.json").unlink()
    with pytest.raises(ModelError, match="the run has no model; it has checkpoints of updates 4, 8, 9"):
        find_model("runs/x")
    (run / "config.yaml").write_text("# stage: control\n")
    with pytest.raises(ModelError, match="'runs/x': the run of kedge control has no model; it has checkpoints"):
        find_model("runs/x")

"""Before a stage trains, it saves its model once without weights: what cannot be saved is found out first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedConfig

from kedge.config import config_from_settings
from kedge.runs.run import Resume
from kedge.stages.sft import run_sft
from kedge.training.checkpoint.files import _canonical_json
from kedge_base.errors import DataError, ModelError
from tests.tiny import save_tiny_policy


def test_a_model_that_cannot_be_saved_is_one_line_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    source = save_tiny_policy(tmp_path / "policy")

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("num_sails must be even")

    monkeypatch.setattr(PreTrainedConfig, "save_pretrained", refuse)
    config = config_from_settings("sft", {"model": str(source), "out": str(tmp_path / "run"), "data.eval_fraction": 0})
    with pytest.raises(ModelError, match=r"could not be saved with its config\.json as it is: num_sails must be even"):
        run_sft(config, demonstrations=[{"prompt": "Deck:", "completion": " Aye."}] * 4)
    assert "loss" not in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_whose_checkpoints_are_all_damaged_or_anothers_is_not_started_over(tmp_path: Path) -> None:
    source = save_tiny_policy(tmp_path / "policy")
    settings = {"model": str(source), "out": str(tmp_path / "run"), "data.eval_fraction": 0, "runtime.report": False}
    config, rows = config_from_settings("sft", settings), [{"prompt": "Deck:", "completion": " Aye."}] * 4
    run_sft(config, demonstrations=rows)
    (tmp_path / "run" / "finished.json").unlink()
    [checkpoint] = (tmp_path / "run" / "checkpoints").glob("update-*")
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    del manifest["sha256"]
    for change, said in (
        ({"kind": "reward"}, "is a checkpoint of kedge reward, not of sft"),
        ({"unknown": 1}, "has no whole checkpoint; to train from the start"),
    ):
        (checkpoint / "manifest.json").write_bytes(_canonical_json({**manifest, **change}))
        with pytest.raises(DataError, match=said):
            run_sft(config, demonstrations=rows, resume=Resume())
        assert checkpoint.is_dir()

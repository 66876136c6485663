"""The files that a resumed run must find unchanged."""

from pathlib import Path

import pytest

from kedge.config import load_config
from kedge.runs.fingerprint import changed_inputs, input_hashes


@pytest.mark.parametrize("name", ["model.safetensors", "value_head/model.safetensors", "config.json", "tokenizer.json"])
def test_a_changed_file_of_a_model_folder_is_noticed(name: str, tmp_path: Path) -> None:
    file = tmp_path / "model" / name
    file.parent.mkdir(parents=True)
    file.write_text("before")
    config = load_config(overrides=[f"model={tmp_path / 'model'}"])
    saved = input_hashes(config)
    assert changed_inputs(saved, input_hashes(config)) == []
    file.write_text("after")
    (line,) = changed_inputs(saved, input_hashes(config))
    assert line == "model: the files have changed since the run started"

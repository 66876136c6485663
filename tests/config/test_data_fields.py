"""Columns and the mix of sources: every way to set them, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kedge.config import explain, load_config
from kedge.config.loading.settings import config_from_settings
from kedge.errors import ConfigError

NAMED = {"prompt": "dialogue", "comparisons.prompt": "question"}


def test_columns_on_the_command_line_in_a_file_and_from_python(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {columns: {prompt: other, comparisons: {prompt: question}}}\n")
    assert load_config(path, ["data.columns.prompt=dialogue"]).data.columns == NAMED
    overrides = ["data.columns.prompt=dialogue", "data.columns.comparisons.prompt=question"]
    assert load_config(None, overrides).data.columns == NAMED
    settings: list[dict[str, Any]] = [
        {"columns": NAMED},
        {"data": {"columns": NAMED}},
        {"data.columns.prompt": "dialogue", "data.columns.comparisons.prompt": "question"},
    ]
    for given in settings:
        assert config_from_settings("sft", given).data.columns == NAMED
    path.write_text("data.columns.prompt: dialogue\ndata.columns.comparisons.prompt: question\n")
    assert load_config(path).data.columns == NAMED


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.columns.promt=dialogue", "promt is not a column that kedge reads; did you mean prompt?"),
        ("data.columns.rewards.prompt=dialogue", "rewards.prompt is not a column that kedge reads"),
        ("data.columns=dialogue", "data.columns must be a mapping of names to text; it is dialogue"),
        ("data.columns.prompt=[a]", "data.columns must be a mapping of names to text"),
    ],
)
def test_wrong_columns(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.columns") as raised:
        load_config(None, [override])
    assert said in str(raised.value)


def test_a_column_is_explained() -> None:
    assert explain("data.columns.prompt").endswith(explain("data.columns").partition("\n")[2])

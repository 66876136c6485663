"""Columns and the mix of sources: every way to set them, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kedge.config import explain, load_config
from kedge.config.loading.load import config_from_settings
from kedge_base.errors import ConfigError

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
    path.write_text("data: {columns: {prompt: dialogue, comparisons: {prompt: other}}}\n")
    assert load_config(path, ["data.columns.comparisons={prompt: question}"]).data.columns == NAMED
    path.write_text("data.columns.prompt: dialogue\ndata.columns.comparisons.prompt: question\n")
    assert load_config(path).data.columns == NAMED


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.columns.promt=dialogue", "promt is not a column that kedge reads; did you mean prompt?"),
        ("data.columns.rewards.prompt=dialogue", "rewards.prompt is not a column that kedge reads"),
        ("data.columns.prompts.mesages=dialogue", "did you mean messages?"),
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


def test_shares_of_a_mix() -> None:
    overrides = ["data.demonstrations=[a, b]", "data.prompts=[c]"]
    data = load_config(None, [*overrides, "data.mix=[1, 3]"]).data
    assert (data.shares("demonstrations"), data.shares("prompts")) == ((1.0, 3.0), None)
    data = load_config(None, [*overrides, "data.mix={b: 0.7, a: 0.3}"]).data
    assert data.shares("demonstrations") == (0.3, 0.7)
    assert load_config(None, overrides).data.shares("demonstrations") is None


@pytest.mark.parametrize(
    ("mix", "said"),
    [
        ("[1, 2, 3]", "data.mix has 3 shares, and data.demonstrations has 2 sources"),
        ("{a: 1}", "data.mix has no share for b (0 leaves it out)"),
        ("{a: 1, b: 1, x: 1}", "data.mix names x, which is not a source; they are a, b"),
        ("[-1, 1]", "the shares of data.mix must be at least 0"),
        ("[0, 0]", "one of them above 0"),
        ("[1, yes]", "data.mix must be a list of numbers, a mapping of names to a number, or null; it is [1, true]"),
        ("high", "data.mix must be a list of numbers, a mapping of names to a number, or null; it is high"),
    ],
)
def test_wrong_mixes(mix: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, ["data.demonstrations=[a, b]", f"data.mix={mix}"])
    assert said in str(raised.value)


def test_a_mix_of_one_source_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.mix needs several sources"):
        load_config(None, ["data.prompts=a", "data.mix=[1]"])

"""The preview of data, and the first example that a stage prints."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

import kedge
from kedge.cli import app
from kedge.config import load_config
from kedge.data import Demonstration
from kedge.data.preview import example_lines, histogram, parts_of
from kedge.runs.data_log import DataLog
from kedge.runs.inputs import load_rows
from kedge_base.errors import KedgeError
from tests.tiny import tiny_sentencepiece_tokenizer, tiny_tokenizer

ROWS = [{"dialogue": f"Where is boat {number}?", "summary": " At anchor."} for number in range(9)]


@pytest.mark.parametrize(
    ("context", "named"), [(None, "longer than data.max_length=20"), (12, "longer than the context of 12")]
)
def test_the_limit_that_rows_exceed_is_the_field_or_the_context(context: int | None, named: str) -> None:
    config = load_config(None, ["data.max_length=20", "data.max_rejected_fraction=0.9"], {"model": "a"})
    for role in ("demonstrations", "pretraining"):
        rows = [{"prompt": "a", "completion": "sea " * length} for length in (2, 50)]
        run = SimpleNamespace(rejected_file=None, data=DataLog(), objects={f"data.{role}": rows})
        load_rows(role, config, cast(Any, run), tiny_tokenizer(), room=context)
        [reason] = run.data.roles[role].dropped
        assert named in reason


def test_an_example_shows_every_token_and_what_is_trained() -> None:
    tokenizer = tiny_sentencepiece_tokenizer()
    prompt, completion = parts_of(Demonstration("The boat lay", " at anchor."), tokenizer)
    assert (prompt.use, completion.use) == ("read", "trained on")
    assert "".join(completion.pieces) == f" at anchor.{tokenizer.eos_token}"
    assert "".join(prompt.pieces).endswith("The boat lay")
    assert len(completion.pieces) == completion.length
    [first, second] = example_lines([prompt, completion], width=60)
    assert len(first) <= 60
    assert second.startswith(f"  completion {completion.length:6} trained on  ")
    [short, _] = example_lines([prompt, completion], width=35)
    assert " … " in short
    long = parts_of(Demonstration("sea " * 2000, "x"), tiny_tokenizer())[0]
    assert long.length > 1000
    assert len(long.pieces) == 400


def test_the_parts_of_a_conversation_are_its_learned_and_its_read_turns() -> None:
    turns = [("user", "Why?"), ("assistant", "So."), ("user", "And?"), ("assistant", "No.")]
    rows = [{"messages": [{"role": role, "content": content} for role, content in turns]}]
    [parts] = kedge.preview_data(rows).examples
    assert [(part.use, "".join(part.pieces)) for part in parts] == [
        ("read", "[user] Why?\n[assistant] "),
        ("trained on", "So."),
        ("read", "\n[user] And?\n[assistant] "),
        ("trained on", "No.<end>"),
    ]
    preview = kedge.preview_data(rows)
    [length] = preview.lengths["prompt and answer"]
    assert length == sum(part.length for part in parts)
    opened = [{"role": "assistant", "content": "Ahoy."}, *rows[0]["messages"]]
    [parts] = kedge.preview_data([{"messages": opened}]).examples
    assert [part.use for part in parts] == ["read", "trained on", "read", "trained on"]
    assert "".join(parts[0].pieces).startswith("[assistant] Ahoy.")
    [whole] = kedge.preview_data(rows, train_on="last").examples
    assert [part.use for part in whole] == ["read", "trained on"]


def test_a_histogram_by_hand() -> None:
    assert histogram([5, 5]) == "█"
    assert histogram([0, *[16] * 8]) == "▁              █"


def test_the_command_previews_rows_without_a_model(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, [*ROWS, {"dialogue": "Why?", "summary": ""}])))
    columns = ["data.columns.prompt=dialogue", "data.columns.completion=summary"]
    result = CliRunner().invoke(app, ["data", str(path), *columns, "--examples", "1"])
    assert result.exit_code == 0, result.output
    assert (
        "as data of sft: 9 of 10 rows used; 1 dropped: field 'completion' is empty; "
        "sft refuses that many: 10.0%, data.max_rejected_fraction=0.05 allows 5.0%\n"
    ) in result.output
    accepted = CliRunner().invoke(app, ["data", str(path), *columns, "data.max_rejected_fraction=0.1"]).output
    assert "1 dropped: field 'completion' is empty\n" in accepted
    assert "columns: dialogue ('Where is boat 0?'), summary (' At anchor.')\n" in result.output
    assert "lengths in characters; without a model, no limit of length is checked:\n" in result.output
    assert "  prompt             min 16  median 16  max 16  █\n" in result.output
    assert "  completion     12 trained on   At anchor.<end>" in result.output
    output = CliRunner().invoke(app, ["data", str(path)]).output
    assert "no usable row; data.columns.prompt=… names a column" in output


def test_the_preview_reads_the_tables_that_the_stages_read() -> None:
    import datasets

    rows = [{"prompt": "a", "completion": "b"}]
    split = datasets.Dataset.from_list(rows)
    tables = [datasets.DatasetDict(train=split), datasets.IterableDatasetDict(train=split.to_iterable_dataset())]
    for table in (*tables, split, iter(rows), split.to_pandas()):
        assert kedge.preview_data(table).columns == {"prompt": "'a'", "completion": "'b'"}
    with pytest.raises(KedgeError, match=r"^the data has several splits \(a, b\); pass one of them$"):
        kedge.preview_data(datasets.DatasetDict(a=split, b=split))
    with pytest.raises(KedgeError, match=r"not dict$"):
        kedge.preview_data({"prompt": ["a"], "completion": ["b"]})
    with pytest.raises(KedgeError, match=r"^nonsense is not a setting of reward"):
        kedge.preview_data(rows, stage="reward", nonsense=1)


def test_the_preview_from_python_knows_the_stage() -> None:
    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    named: dict[str, Any] = {"columns": {"prompt": "dialogue"}}
    for rows, settings, stage in (
        (ROWS, named, "ppo"),
        ([{"messages": chat}], {}, "sft"),
        (["Once upon"], {}, "ppo"),
        ([chat], {}, "sft"),
        ([chat[:1]], {}, "ppo"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], {}, "reward"),
    ):
        preview = kedge.preview_data(rows, num_rows=3, **settings)
        assert (preview.stage, preview.unit) == (stage, "characters")
        assert preview.usage.used == min(len(rows), 3)
    shown = str(kedge.preview_data([{"messages": chat}]))
    assert "[user] Why?\\n[assistant] " in shown
    assert "token ids need a model" in str(kedge.preview_data([{"input_ids": [1, 2]}]))
    with pytest.raises(KedgeError, match="choose one of sft, reward"):
        kedge.preview_data(ROWS, stage="rlhf")

"""Files and folders of other libraries: what is found, and one line about what cannot be read."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kedge.cli import main
from kedge_base.errors import DataError
from kedge_inspect.abroad import wire
from kedge_inspect.abroad.runs import Origin, read_any_run
from kedge_inspect.abroad.sources import log_files, merge_rows, read_log
from kedge_inspect.abroad.wire import read_events, read_training_args, read_wandb
from tests.inspect.abroad.logs import (
    BASELINES,
    GRPO,
    VERL,
    Config,
    Strategy,
    event,
    events,
    history,
    leveldb,
    message,
    over,
    scalar,
    settings_record,
    write_args,
    write_state,
)


def test_the_newest_checkpoint_of_an_output_folder_is_read(tmp_path: Path) -> None:
    for number, count in ((90, 9), (100, 10), (20, 2)):
        write_state(tmp_path / f"checkpoint-{number}", over(count, GRPO))
    assert len(read_log(tmp_path).rows) == 10
    write_state(tmp_path, over(12, GRPO))
    assert len(read_log(tmp_path).rows) == 12


def test_settings_lie_beside_the_state_or_in_a_checkpoint(tmp_path: Path) -> None:
    write_state(tmp_path, over(9, GRPO))
    assert read_log(tmp_path).settings == {}
    (tmp_path / "checkpoint-9").mkdir()
    write_args(tmp_path / "checkpoint-9", beta=0.04, scheduler=Strategy("cosine"), other=object)
    assert read_log(tmp_path).settings == {"beta": 0.04, "scheduler": "cosine"}


def test_settings_among_which_is_a_tensor_are_read(tmp_path: Path) -> None:
    made = Config()
    made.__dict__.update(beta=0.1, weights=torch.ones(2), frozen=nn.Parameter(torch.ones(3)), last="x")
    torch.save(made, tmp_path / "training_args.bin")
    assert read_training_args(tmp_path / "training_args.bin") == {"beta": 0.1, "last": "x"}


def test_unpickling_settings_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "made"),)

    write_args(tmp_path, beta=0.1)
    write_args(tmp_path, beta=0.1, evil=Evil())
    assert read_training_args(tmp_path / "training_args.bin")["beta"] == 0.1


def test_settings_larger_than_any_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small archive may unpack to more than fits into memory."""
    write_args(tmp_path, beta=0.1)
    monkeypatch.setattr(wire, "LARGEST_SETTINGS", 10)
    assert read_training_args(tmp_path / "training_args.bin") == {}
    assert not (tmp_path / "made").exists()


def test_rows_of_the_same_step_are_joined() -> None:
    rows = [{"step": 1, "loss": 2.0}, {"step": 1, "eval_loss": 3.0}, {"step": 2, "loss": 1.0, "note": "text"}]
    assert merge_rows(rows) == [{"step": 1, "loss": 2.0, "eval_loss": 3.0}, {"step": 2, "loss": 1.0}]


def test_steps_that_begin_again_are_numbered() -> None:
    rows = [{"time/iterations": number, "rollout/ep_rew_mean": 1.0} for number in (1, 2, 3, 1, 2)]
    assert [row["step"] for row in merge_rows(rows)] == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="after step 3 it starts again at step 1"):
        merge_rows([{"step": number, "loss": 1.0} for number in (1, 2, 3, 1, 2)])
    resumed = [{"step": number, "loss": float(at)} for at, number in enumerate((1, 2, 3, 2, 3))]
    assert merge_rows(resumed) == [{"step": 1, "loss": 0.0}, {"step": 2, "loss": 3.0}, {"step": 3, "loss": 4.0}]


def test_tensorboard_events_are_read_without_the_library() -> None:
    data = events([{"critic/score/mean": 0.5, "actor/lr": 0.25}, {"critic/score/mean": 0.75}])
    tensor = message((1, "loss"), (8, message((1, 1), (5, b"\x00\x00\x80\x3f"))))
    text = message((1, "args/text_summary"), (8, message((1, 7), (8, "{}"))))
    rows, texts = read_events(data + event(3, tensor, text) + b"\x09\x00\x00")
    assert rows == [
        {"step": 1, "critic/score/mean": 0.5, "actor/lr": 0.25},
        {"step": 2, "critic/score/mean": 0.75},
        {"step": 3, "loss": 1.0},
    ]
    assert texts == {"args/text_summary": "{}"}
    assert read_events((data + event(3, scalar("x", 1.0)))[:-6])[0][-1]["step"] == 2


def test_offline_files_of_wandb_are_read_without_the_library() -> None:
    rows = [{"_step": step, "critic/score/mean": 0.5, "blob": "x" * 5000} for step in range(1, 40)]
    records = [settings_record({"algorithm": {"adv_estimator": "grpo"}}), *map(history, rows)]
    assert read_wandb(leveldb(records)) == (rows, {"algorithm": {"adv_estimator": "grpo"}})
    cut, _ = read_wandb(leveldb(records)[:-100])
    assert cut == rows[:-1]


def test_several_event_files_of_a_folder_are_one_run_and_those_of_several_folders_are_not(tmp_path: Path) -> None:
    for folder, number in (("a", 1), ("a", 2), ("b", 1)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"events.out.tfevents.{number}.host").write_bytes(events(over(9, VERL)))
    assert len(log_files(tmp_path / "a")) == 2
    with pytest.raises(DataError, match="holds 2 runs: a, b; name one of them"):
        log_files(tmp_path)


def test_lines_of_verl_and_flat_ones_are_read_up_to_an_incomplete_one(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text("".join(json.dumps({"step": step, "data": VERL}) + "\n" for step in (1, 2)) + '{"step": 3, "da')
    assert [row["step"] for row in read_log(file).rows] == [1, 2]
    file.write_text("".join(json.dumps({"step": step, **VERL}) + "\n" for step in (1, 2)))
    assert read_log(tmp_path).rows[1] == {"step": 2, **VERL}


def test_tables_of_baselines_and_of_wandb(tmp_path: Path) -> None:
    names = list(BASELINES)
    lines = [",".join(names), ",".join(str(BASELINES[name]) for name in names), ",,2,4096,,,,"]
    (tmp_path / "progress.csv").write_text("\n".join(lines))
    first, second = read_log(tmp_path).rows
    assert first == {"step": 1, **{name: value for name, value in BASELINES.items() if name != "time/iterations"}}
    assert second == {"step": 2, "time/total_timesteps": 4096.0}
    file = tmp_path / "export.csv"
    file.write_text("Step,my run - critic/score/mean,my run - critic/score/mean__MIN\n1,0.5,0.1\n2,0.75,\n")
    assert list(read_log(file).rows) == [{"step": 1, "critic/score/mean": 0.5}, {"step": 2, "critic/score/mean": 0.75}]
    file.write_text("Step,a - loss,b - loss\n1,0.5,0.1\n")
    with pytest.raises(DataError, match="holds 2 runs; export one of them"):
        read_log(file)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize(("separator", "point"), [(",", "."), ("\t", "."), (";", "."), (";", ",")])
def test_tables_of_spreadsheets_are_read(tmp_path: Path, encoding: str, separator: str, point: str) -> None:
    file = tmp_path / ("export.tsv" if separator == "\t" else "export.csv")
    rows = [["Step", "critic/score/mean"], ["7", "0.5"], ["9", "NaN"]]
    text = "\n".join(separator.join(cell.replace(".", point) for cell in row) for row in rows)
    file.write_text(text, encoding=encoding)
    first, second = read_log(file).rows
    assert first == {"step": 7, "critic/score/mean": 0.5}
    assert second["step"] == 9
    assert math.isnan(second["critic/score/mean"])


def test_lines_may_have_a_byte_order_mark_and_numbers_as_text(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    rows = [{"_step": "4", "loss": "0.5", "note": "good"}, ["another", 3], {"_step": "5", "loss": "Infinity"}]
    expected = [{"step": 4, "loss": 0.5}, {"step": 5, "loss": math.inf}]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8-sig")
    assert [{name: row[name] for name in ("step", "loss")} for row in read_log(file).rows] == expected
    file.write_text(json.dumps(rows, indent=1))
    assert [{name: row[name] for name in ("step", "loss")} for row in read_log(file).rows] == expected


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text('{"step": 1, "loss": 2}\nwarning: slow\n{"step": 2, "loss": 2}\n')
    with pytest.raises(DataError, match=r"run\.jsonl' cannot be read: line 2 is not JSON"):
        read_log(file)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("step,loss\n1,2\n2,3,5\n", "line 3 has more cells than the header"),  # a comma as decimal point
        ("step;loss\n1;2;7\n", "line 2 has more cells than the header"),
    ],
)
def test_a_table_whose_cells_have_no_column_is_refused(tmp_path: Path, table: str, message: str) -> None:
    file = tmp_path / "progress.csv"
    file.write_text(table)
    with pytest.raises(DataError, match=rf"progress\.csv' cannot be read: .*{message}"):
        read_log(file)


def test_a_cell_longer_than_the_limit_of_the_process_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "progress.csv"
    file.write_text(f"step,loss\n1,{'2' * 200}\n")
    before = csv.field_size_limit(100)  # libraries raise it for the whole process
    try:
        with pytest.raises(DataError, match=r"progress\.csv' cannot be read: .*field larger than field limit"):
            read_log(file)
    finally:
        csv.field_size_limit(before)


def test_a_table_may_have_an_index_and_separators_at_the_end_of_rows(tmp_path: Path) -> None:
    file = tmp_path / "progress.csv"
    file.write_text(",step,loss\n0,1,0.5,\n1,2,,\n2,3,0.25\n")
    assert read_log(file).rows == [{"step": 1, "loss": 0.5}, {"step": 3, "loss": 0.25}]


def test_a_log_with_two_runs_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text("".join(json.dumps({"step": step, **VERL}) + "\n" for step in (1, 2, 3, 1, 2)))
    with pytest.raises(DataError, match="holds several runs: after step 3 it starts again at step 1; keep the rows"):
        read_log(file)
    file.rename(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"holds 2 files that may be the log of a run: a\.jsonl, b\.jsonl; name one"):
        log_files(tmp_path)


def test_nan_and_infinity_are_read_and_become_incidents(tmp_path: Path) -> None:
    write_state(tmp_path, over(10, GRPO, loss=lambda number: float("nan") if number == 6 else 0.1))
    run = read_any_run(tmp_path)
    assert run.incidents == [
        {"kind": "nonfinite", "update": 7, "what": "loss is not finite", "figures": {"loss": None}}
    ]


def _half(folder: Path) -> None:
    write_state(folder, over(9, GRPO))
    file = folder / "trainer_state.json"
    file.write_text(file.read_text()[:-200])


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return write


BAD: dict[str, Callable[[Path], object]] = {
    "nothing": lambda folder: None,
    "half a state": _half,
    "an empty history": lambda folder: write_state(folder, []),
    "a history of texts": _write("trainer_state.json", b'{"log_history": ["a", 3, null]}'),
    "another object": _write("trainer_state.json", b"[1, 2]"),
    "a state without a history": _write("trainer_state.json", b"{}"),
    "an empty state": _write("trainer_state.json", b""),
    "a binary state": _write("trainer_state.json", bytes(range(256)) * 9),
    "a binary table": _write("progress.csv", bytes(range(256)) * 9),
    "an empty table": _write("progress.csv", b""),
    "a table without rows": _write("progress.csv", b"a,b\n"),
    "a table of others": _write("progress.csv", b"a,b\n1,2\n"),
    "binary events": _write("events.out.tfevents.1", bytes(range(256)) * 9),
    "empty events": _write("events.out.tfevents.1", b""),
    "a binary offline file": _write("run-x.wandb", bytes(range(256)) * 9),
    "an empty offline file": _write("run-x.wandb", b":W&B\xe1\xbe\x00"),
    "binary lines": _write("run.jsonl", bytes(range(256)) * 9),
    "lines of numbers": _write("run.jsonl", b"1\n2\n"),
    "unknown names": _write("run.jsonl", b'{"step": 1, "x": 2}\n{"step": 2, "x": 2}\n'),
    "a plain trainer": lambda folder: write_state(folder, [{"loss": 1.0, "grad_norm": 0.1}]),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("command", ["doctor", "report"])
def test_what_cannot_be_read_gets_one_line_and_exit_code_2(
    name: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    BAD[name](tmp_path)
    monkeypatch.setattr("sys.argv", ["kedge", command, str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_a_damaged_settings_file_gets_one_line(tmp_path: Path) -> None:
    write_state(tmp_path, over(9, GRPO))
    (tmp_path / "settings.yaml").write_text("a: [1")
    with pytest.raises(DataError, match=r"settings\.yaml' cannot be read"):
        read_any_run(tmp_path, origin=Origin(settings=tmp_path / "settings.yaml"))
    (tmp_path / "settings.yaml").write_text("- a")
    with pytest.raises(DataError, match="has no settings"):
        read_any_run(tmp_path, origin=Origin(settings=tmp_path / "settings.yaml"))


def test_a_damaged_args_file_is_left_out_with_one_line(tmp_path: Path) -> None:
    write_state(tmp_path, over(9, GRPO))
    for content in (b"", bytes(range(256)), b"PK\x03\x04"):
        (tmp_path / "training_args.bin").write_bytes(content)
        said: list[str] = []
        assert read_any_run(tmp_path, on_skipped=said.append).arguments == {}
        assert said == [f"{tmp_path / 'training_args.bin'}: the settings in it cannot be read, left out"]
    shutil.rmtree(tmp_path)

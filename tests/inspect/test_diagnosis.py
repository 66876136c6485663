"""The doctor's visits: to a folder, to a chain, to a run at work and to one that ends; and the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import kedge
from kedge.cli import main
from kedge.config import Config, field_advice
from kedge.errors import DataError
from kedge.inspect.diagnosis import LiveDoctor, diagnose_run
from kedge.inspect.record import RunRecord
from kedge.runs.ending import say_findings
from tests.inspect.doctor.synthetic import made_up

WILD = {"policy/clip_fraction": [0.5] * 16}
DULL = {"prompt/distinct": [0.5] * 16}

CONFIG = Config().model_dump(mode="json")


def write(folder: Path, run: RunRecord, stage: str = "ppo") -> Path:
    """The folder that a run would have left."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"# stage: {stage}\n# precision: fp32\n\n{yaml.safe_dump(dict(run.config))}")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run.metrics))
    return folder


def command(*words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["kedge", "doctor", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_a_folder_is_examined_with_the_configurations_own_words(tmp_path: Path) -> None:
    [finding] = kedge.doctor(str(write(tmp_path / "run", made_up(figures=WILD))))
    assert finding.rule == "steps_too_large"
    assert "ppo.learning_rate=0.0001 instead of 0.0003 (too high: training is unstable: KL and clip" in finding.try_
    assert "ppo.early_stop_kl=0.02, which ends an update that goes too far" in finding.try_


def test_a_chain_is_examined_stage_by_stage(tmp_path: Path) -> None:
    write(tmp_path / "ppo", made_up(figures={**WILD, **DULL}))
    write(tmp_path / "ppo-2", made_up(figures=WILD))
    write(tmp_path / "sft", made_up(figures=WILD), stage="sft")
    (tmp_path / "config.yaml").write_text("# stage: rlhf\n\nmodel: x\n")
    (tmp_path / "plots").mkdir()
    seen = [(finding.severity, finding.seen.partition(":")[0]) for finding in diagnose_run(tmp_path)]
    assert seen == [("serious", "sft"), ("serious", "ppo"), ("serious", "ppo-2"), ("warning", "ppo")]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not the folder of a run: it has no config\.yaml"):
        diagnose_run(tmp_path)


@pytest.mark.parametrize(("figures", "code"), [(WILD, 1), (DULL, 0), ({}, 0)])
def test_the_exit_code_tells_whether_something_serious_was_found(
    figures: dict[str, Any],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = str(write(tmp_path / "run", made_up(figures=figures)))
    assert command(folder, monkeypatch=monkeypatch) == code
    assert ("docs/doctor.md#" in capsys.readouterr().out) == bool(figures)
    assert command(folder, "--json", monkeypatch=monkeypatch) == code
    told = json.loads(capsys.readouterr().out)
    assert list(told) == ["findings"]
    assert told["findings"] == [finding.as_json() for finding in kedge.doctor(folder)]


def test_a_folder_that_is_no_run_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(str(tmp_path), monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_damaged_folder_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "run", made_up())
    (folder / "summary.json").write_text("{")
    assert command(str(folder), monkeypatch=monkeypatch) == 2
    assert "summary.json' is damaged" in capsys.readouterr().err


def test_the_end_of_a_run_tells_what_is_serious_and_what_may_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    young = {"value/explained_variance": [-0.02] * 16}
    folder = write(tmp_path / "run", made_up(figures={**WILD, **DULL, **young}))
    say_findings(folder)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[:2] for line in lines[:-1]] == [
        ["serious", " steps_too_large"],
        ["warning", " duplicated_prompts"],
    ]
    assert lines[-1] == f"Run `kedge doctor {folder}` for explanations and remedies"


def test_the_end_of_a_run_that_is_well_tells_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say_findings(write(tmp_path / "run", made_up()))
    assert capsys.readouterr().err == ""


def rows(run: RunRecord) -> list[tuple[int, dict[str, float]]]:
    return [(row["update"], {name: figure for name, figure in row.items() if name != "update"}) for row in run.metrics]


def test_a_run_at_work_is_told_of_each_serious_thing_once_and_early(tmp_path: Path) -> None:
    said: list[str] = []
    doctor = LiveDoctor(tmp_path, {"precision": "fp32"}, CONFIG, say=said.append, advice=field_advice)
    sick = made_up(40, {"policy/clip_fraction": [0.5] * 40, "prompt/distinct": [0.5] * 40})
    for update, metrics in rows(sick):
        doctor.see(update, metrics)
        assert len(said) == (update >= 4)
    assert said[0].startswith("serious: steps_too_large: 50% of the tokens are clipped")
    assert "Try: ppo.learning_rate=3.3e-06 instead of 1e-05" in said[0]


def test_a_run_that_goes_on_knows_what_came_before(tmp_path: Path) -> None:
    sick = made_up(figures=WILD)
    folder = write(tmp_path / "run", made_up(3, {"policy/clip_fraction": [0.5] * 3}))
    said: list[str] = []
    doctor = LiveDoctor(folder, {}, CONFIG, say=said.append)
    for update, metrics in rows(sick)[3:7]:
        doctor.see(update, metrics)
    [told] = said
    assert "(updates 1 to 3)" in told


def test_a_long_run_is_remembered_by_its_beginning_and_its_latest_updates(tmp_path):
    doctor = LiveDoctor(tmp_path, {"precision": "fp32"}, CONFIG, say=lambda line: None)
    for update in range(1, 1201):
        doctor.see(update, {"reward/score_mean": 0.1})
    assert [row["update"] for row in doctor._rows] == [*range(1, 51), *range(751, 1201)]

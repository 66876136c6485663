"""Diagnoses of a folder, of several stages, of a run in progress and at its end; and the command."""

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
from kedge.runs.ending import say_findings
from kedge_base.errors import DataError
from kedge_inspect.diagnosis import LiveDoctor, diagnose_run
from kedge_inspect.record import RunRecord
from kedge_inspect.report import write_report
from tests.inspect.doctor.synthetic import synthetic_run, towards

LARGE_STEPS = {"policy/clip_fraction": [0.5] * 16}
REPEATED_PROMPTS = {"prompt/distinct": [0.5] * 16}

CONFIG = Config().model_dump(mode="json")


def write(folder: Path, run: RunRecord, stage: str = "ppo") -> Path:
    """A run's folder."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"# stage: {stage}\n# precision: fp32\n\n{yaml.safe_dump(dict(run.config))}")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run.metrics))
    return folder


def command(*words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["kedge", "doctor", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_advice_comes_from_the_configuration(tmp_path: Path) -> None:
    [finding] = kedge.doctor(str(write(tmp_path / "run", synthetic_run(metrics=LARGE_STEPS))))
    assert finding.rule == "steps_too_large"
    too_high = field_advice("ppo.learning_rate", "too_high")
    assert f"lower ppo.learning_rate from 0.0003 to 4.2e-05 (if too high: {too_high})" in finding.try_
    assert "set ppo.early_stop_kl=0.02 to end an update that moves too far" in finding.try_


def test_a_file_of_a_run_stands_for_its_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", synthetic_run(metrics=LARGE_STEPS))
    assert diagnose_run(folder / "metrics.jsonl") == diagnose_run(folder) != []
    assert write_report([folder / "metrics.jsonl"]) == folder / "report.html"


def test_several_stages_are_diagnosed_one_by_one(tmp_path: Path) -> None:
    write(tmp_path / "ppo", synthetic_run(metrics={**LARGE_STEPS, **REPEATED_PROMPTS}))
    for name in ("ppo-2", "ppo-10"):
        write(tmp_path / name, synthetic_run(metrics=LARGE_STEPS))
    write(tmp_path / "sft", synthetic_run(metrics=LARGE_STEPS), stage="sft")
    (tmp_path / "config.yaml").write_text("# stage: rlhf\n\nmodel: x\n")
    (tmp_path / "plots").mkdir()
    seen = [(finding.severity, finding.seen.partition(":")[0]) for finding in diagnose_run(tmp_path)]
    assert seen == [*(("serious", name) for name in ("sft", "ppo", "ppo-2", "ppo-10")), ("warning", "ppo")]


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not the folder of a run: it has no config\.yaml"):
        diagnose_run(tmp_path)


@pytest.mark.parametrize(("metrics", "code"), [(LARGE_STEPS, 1), (REPEATED_PROMPTS, 0), ({}, 0)])
def test_the_exit_code_is_1_for_serious_findings_only(
    metrics: dict[str, Any],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = str(write(tmp_path / "run", synthetic_run(metrics=metrics)))
    assert command(folder, monkeypatch=monkeypatch) == code
    assert ("docs/doctor.md#" in capsys.readouterr().out) == bool(metrics)
    assert command(folder, "--json", monkeypatch=monkeypatch) == code
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == ["findings", "checks", "not_judged", "verdict", "ended_early"]
    assert printed["findings"] == [finding.as_json() for finding in kedge.doctor(folder)]


def test_json_that_utf8_cannot_write_is_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder = write(tmp_path / "run", synthetic_run())
    (folder / "finished.json").write_text(json.dumps({"ended": "patience \ud800"}))
    assert command(str(folder), "--json", monkeypatch=monkeypatch) == 0
    assert json.loads(capsysbinary.readouterr().out)["ended_early"] == "patience \ud800"


def test_the_command_refuses_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(str(tmp_path), monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_damaged_file_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "run", synthetic_run())
    (folder / "summary.json").write_text("{")
    assert command(str(folder), monkeypatch=monkeypatch) == 2
    assert "summary.json' is damaged" in capsys.readouterr().err


def test_the_end_of_a_run_prints_serious_findings_and_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    untrained = {"value/explained_variance": [-0.02] * 16}
    folder = write(tmp_path / "run", synthetic_run(metrics={**LARGE_STEPS, **REPEATED_PROMPTS, **untrained}))
    say_findings(folder)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[:2] for line in lines[:-1]] == [
        ["serious", " steps_too_large"],
        ["warning", " duplicated_prompts"],
        ["doctor", " 1 serious, 1 warning, 1 note in 30 checks so far; 1 could not be made"],
    ]
    assert lines[-1] == f"Run `kedge doctor {folder}` for explanations and remedies"


def test_the_end_of_a_healthy_run_prints_what_was_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say_findings(write(tmp_path / "run", synthetic_run()))
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("doctor: nothing wrong in 30 checks so far; 1 could not be made: no judge")


def broken_advice(field: str, direction: str) -> str:
    raise SyntaxError(f"{field} {direction}")


def test_an_error_of_the_doctor_is_a_line_at_the_end_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kedge.runs.ending.field_advice", broken_advice)
    say_findings(write(tmp_path / "run", synthetic_run(metrics=LARGE_STEPS)))
    assert capsys.readouterr().err == "doctor: failed: SyntaxError: ppo.learning_rate too_high\n"


def rows(run: RunRecord) -> list[tuple[int, dict[str, float]]]:
    return [(row["update"], {name: value for name, value in row.items() if name != "update"}) for row in run.metrics]


def test_a_serious_finding_is_reported_once_and_early(tmp_path: Path) -> None:
    said: list[str] = []
    doctor = LiveDoctor(tmp_path, {"precision": "fp32"}, CONFIG, say=said.append, advice=field_advice)
    faulty = synthetic_run(40, {"policy/clip_fraction": [0.5] * 40, "prompt/distinct": [0.5] * 40})
    for update, metrics in rows(faulty):
        doctor.see(update, metrics)
        assert len(said) == 1 + (update >= 4)
    assert said[0].startswith("warning: first_update_too_large: update 1 clips 50% of the tokens")
    assert "Try: lower ppo.learning_rate from 1e-05 to 1.4e-06" in said[0]
    assert said[1].startswith("serious: steps_too_large: up to 50% of the tokens are clipped")
    assert "Try: lower ppo.learning_rate from 1e-05 to 1.4e-06" in said[1]


def test_an_error_of_the_doctor_is_a_line_of_the_run_in_progress(tmp_path: Path) -> None:
    said: list[str] = []
    doctor = LiveDoctor(tmp_path, {"precision": "fp32"}, CONFIG, say=said.append, advice=broken_advice)
    for update, metrics in rows(synthetic_run(40, {"policy/clip_fraction": [0.5] * 40})):
        doctor.see(update, metrics)
    assert said == ["the doctor failed: SyntaxError: ppo.learning_rate too_high"]


def test_that_no_response_stops_is_said_after_the_first_update(tmp_path: Path) -> None:
    said: list[str] = []
    none = {"response/eos_rate": 0.0, "reward/score_mean": [-1.0] * 3, "reward/score_std": 0.0}
    run = synthetic_run(3, none)
    doctor = LiveDoctor(tmp_path, run.facts, run.config, say=said.append)
    for update, metrics in rows(run):
        doctor.see(update, metrics)
        assert len(said) == 1
    assert said[0].startswith("serious: too_few_eos: all responses were cut off and score -1.00 (update 1)")


@pytest.mark.parametrize(
    ("metrics", "settings", "line"),
    [
        ({"group/single": 1.0}, {"ppo.advantage": "grpo"}, "serious: groups_of_one: 100% of the prompts have a single"),
        ({"reward/score_mean": 0.0, "reward/score_std": 0.0}, {}, "warning: reward_flat: all scores are 0: "),
        ({"reward/score_mean": 0.0, "reward/score_std": 0.0}, {"rollout.num_prompts": 4}, ""),
        ({"reward/score_mean": 0.0, "reward/score_std": 0.0, "episode/turns": 2.0}, {}, ""),
    ],
)
@pytest.mark.parametrize("warmup", [0, 5])
def test_what_moves_no_weight_is_said_after_the_first_update(
    tmp_path: Path, metrics: dict[str, Any], settings: dict[str, Any], line: str, warmup: int
) -> None:
    said: list[str] = []
    run = synthetic_run(1, metrics, settings={**settings, "ppo.value_warmup_updates": warmup})
    doctor = LiveDoctor(tmp_path, run.facts, run.config, say=said.append)
    [(update, row)] = rows(run)
    doctor.see(update, row)
    assert len(said) == bool(line)
    assert "".join(said).startswith(line)


def test_a_run_in_progress_is_judged_by_its_roles_and_incidents_as_its_folder_is(tmp_path: Path) -> None:
    """The roles tell that functions alone score, which may ask for short responses: a note, which is not said."""
    shorter = {"reward/score_mean": towards(0.0, 1.0), "response/length": towards(60.0, 20.0)}
    run = synthetic_run(metrics={**shorter, "reward/length_correlation": -0.7})
    incident = {"update": 3, "kind": "nonfinite", "what": "a score is NaN", "consequence": "skip"}
    for roles, incidents, expected in (
        ({"policy": {}, "reward: rm": {}}, [], {"hacking_by_length"}),
        ({"policy": {}, "reference": {}}, [], set[str]()),
        ({"policy": {}, "reference": {}}, [incident, {**incident, "update": 6}], {"not_finite"}),
    ):
        folder = tmp_path / f"{len(roles)}-{len(incidents)}-{len(expected)}"
        folder.mkdir()
        (folder / "roles.json").write_text(json.dumps(roles))
        (folder / "incidents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in incidents))
        said: list[str] = []
        doctor = LiveDoctor(folder, run.facts, run.config, say=said.append)
        for update, metrics in rows(run):
            doctor.see(update, metrics)
        assert {line.split(": ")[1] for line in said} == expected
        whole = write(tmp_path / f"whole-{folder.name}", run)
        for name in ("roles.json", "incidents.jsonl"):
            (whole / name).write_text((folder / name).read_text())
        assert {each.rule for each in diagnose_run(whole) if each.severity == "serious"} == expected


def test_old_incidents_of_a_long_run_count_as_little_as_its_old_updates(tmp_path: Path) -> None:
    incidents = [{"update": n, "kind": "nonfinite", "what": "NaN", "consequence": "skip"} for n in range(60, 120)]
    (tmp_path / "incidents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in incidents))
    said: list[str] = []
    doctor = LiveDoctor(tmp_path, {"precision": "fp32"}, CONFIG, say=said.append)
    doctor._rows += [{"update": update} for update in range(1, 5001)]
    doctor.see(5001, {"reward/score_mean": 0.1})  # 60 of 5,001 updates are less than a tenth, 60 of the 500 kept more
    assert not [line for line in said if "not_finite" in line]


def test_a_resumed_run_includes_earlier_updates(tmp_path: Path) -> None:
    faulty = synthetic_run(metrics=LARGE_STEPS)
    folder = write(tmp_path / "run", synthetic_run(3, {"policy/clip_fraction": [0.5] * 3}))
    said: list[str] = []
    doctor = LiveDoctor(folder, {}, CONFIG, say=said.append)
    for update, metrics in rows(faulty)[3:7]:
        doctor.see(update, metrics)
    [line] = said
    assert "(updates 1 to 3)" in line


def test_only_the_first_and_latest_updates_of_a_long_run_are_kept(tmp_path):
    doctor = LiveDoctor(tmp_path, {"precision": "fp32"}, CONFIG, say=lambda line: None)
    for update in range(1, 1201):
        doctor.see(update, {"reward/score_mean": 0.1})
    assert [row["update"] for row in doctor._rows] == [*range(1, 51), *range(751, 1201)]

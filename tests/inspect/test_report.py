"""Reports: which runs are on a page, where it is written, and that failures do not end a run."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kedge.cli import main
from kedge.config import load_config
from kedge.runs.ending import chain_report, leave_stage_report
from kedge.stages.sft import run_sft
from kedge_base.errors import DataError, OutputError
from kedge_inspect import report as reporting
from kedge_inspect.diagnosis import examine_run
from kedge_inspect.page.document import MARKER
from kedge_inspect.record import readable
from kedge_inspect.report import collect_page, leave_report, write_report
from tests.inspect.page.records import CONFIG, ppo_record, reward_record, write_run
from tests.tiny import save_tiny_policy


def names(data: dict[str, Any]) -> list[str]:
    return [run["name"] for run in data["runs"]]


def test_a_run_gets_its_page_and_a_newer_one_replaces_it(tmp_path):
    folder = write_run(tmp_path / "story", ppo_record())
    path = write_report([folder])
    assert path == folder / "report.html"
    assert MARKER in path.read_text(encoding="utf-8")
    assert write_report([folder]) == path
    assert not list(folder.glob("*.part"))


def test_several_runs_share_a_page_in_the_current_folder(tmp_path, monkeypatch):
    folders = [write_run(tmp_path / name / "ppo", ppo_record()) for name in ("one", "two")]
    monkeypatch.chdir(tmp_path)
    assert write_report(folders) == Path("report.html")
    assert names(collect_page(folders)) == ["one/ppo", "two/ppo"]
    assert write_report(folders, tmp_path / "both.html").is_file()


def test_a_file_that_is_not_a_report_is_left_alone(tmp_path):
    folder = write_run(tmp_path / "story", ppo_record())
    (folder / "report.html").write_text("my own report", encoding="utf-8")
    with pytest.raises(OutputError, match="is not a kedge report"):
        write_report([folder])
    assert (folder / "report.html").read_text(encoding="utf-8") == "my own report"
    with pytest.raises(OutputError):
        write_report([folder], tmp_path)


def test_a_folder_without_a_run_is_one_line(tmp_path):
    with pytest.raises(DataError, match="not the folder of a run"):
        write_report([tmp_path / "nothing"])
    with pytest.raises(DataError, match="no run folder given"):
        write_report([])
    assert not list(tmp_path.iterdir())


def test_runs_are_named_by_relative_and_absolute_paths(tmp_path, monkeypatch):
    folders = [write_run(tmp_path / name, ppo_record()) for name in ("one", "other")]
    monkeypatch.chdir(tmp_path)
    assert names(collect_page([Path("one"), folders[1]])) == ["one", "other"]


def test_a_run_with_another_one_in_its_folder_is_reported_itself(tmp_path):
    folder = write_run(tmp_path / "ppo", ppo_record())
    write_run(folder / "next", ppo_record())
    assert names(collect_page([folder])) == ["ppo"]
    assert list(examine_run(folder)) == [str(folder)]


@pytest.mark.parametrize("command", ["report", "doctor", "watch"])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, monkeypatch, capsys, command):
    folder = write_run(tmp_path / "story", ppo_record())
    metrics = folder / "metrics.jsonl"
    read = Path.read_bytes

    def forbidden(path: Path) -> bytes:
        if path == metrics:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", forbidden)  # root may read every file
    monkeypatch.setattr(sys, "argv", ["kedge", command, str(folder)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {metrics} cannot be read: Permission denied\n"


def test_a_chain_is_reported_stage_by_stage_in_order(tmp_path):
    for name, record in (("ppo-2", ppo_record()), ("ppo", ppo_record()), ("reward", reward_record())):
        write_run(tmp_path / name, record)
    assert names(collect_page([tmp_path])) == ["reward", "ppo", "ppo-2"]


def test_the_demos_judge_is_in_the_headlines_and_the_curve(tmp_path):
    write_run(tmp_path / "ppo", ppo_record())
    rate = {"value": 0.85, "low": 0.8, "high": 0.9}
    point = {"update": 2, "kl": 4.0, "proxy": 1.0, "gold": {"value": 0.9, "low": 0.8, "high": 1.0}}
    summary = {"win_rate_over_sft": rate, "gold_quality": {"sft": 0.7}, "curves": {"ppo": [point]}}
    (tmp_path / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    data = collect_page([tmp_path])
    assert [(each["value"], each["low"]) for each in data["headlines"]] == [(0.85, 0.8), (0.7, None)]
    assert data["runs"][0]["frontier"]["judges"][0]["values"] == [0.9]


def test_a_runs_reward_model_is_found(tmp_path):
    reward = write_run(tmp_path / "reward", reward_record())
    config = {**CONFIG, "reward": [{"source": str(reward / "model"), "weight": 1.0}]}
    ppo = write_run(tmp_path / "elsewhere" / "ppo", ppo_record(config=config))
    [run] = collect_page([ppo])["runs"]
    assert run["reward_models"][0]["accuracy"]["value"] == 0.75
    trained, _ = collect_page([reward, ppo])["runs"]
    assert trained["reward_models"][0]["name"] == "reward"


def test_the_ending_of_an_unfinished_run_can_be_given(tmp_path):
    folder = write_run(tmp_path / "story", ppo_record(), finished=False)
    states = [collect_page([folder], ending=ending)["runs"][0]["state"] for ending in (None, "finished", "stopped")]
    assert states == ["running", "finished", "stopped"]
    long_ago = time.time() - 3600
    os.utime(folder / "metrics.jsonl", (long_ago, long_ago))
    assert collect_page([folder])["runs"][0]["state"] == "stopped"


def test_a_report_that_fails_is_one_line(tmp_path, monkeypatch, capsys):
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(reporting, "render_page", broken)
    leave_report(write_run(tmp_path / "story", ppo_record()))
    err = capsys.readouterr().err
    assert "could not be written: ZeroDivisionError: a defect" in err
    assert err.count("\n") == 1


def test_runtime_report_false_leaves_none(tmp_path):
    folder = write_run(tmp_path / "ppo", ppo_record())
    silent = load_config(None, ["runtime.report=false"], {})
    leave_stage_report(silent, folder, interrupted=False)
    run: Any = SimpleNamespace(folder=tmp_path, has_started=True, config=silent)
    with chain_report(run):
        pass
    assert not list(tmp_path.rglob("report.html"))


def test_an_interrupted_chain_leaves_a_page_unless_it_has_no_run(tmp_path):
    write_run(tmp_path / "begun" / "ppo", ppo_record())
    (tmp_path / "empty").mkdir()
    for name in ("begun", "empty"):
        run: Any = SimpleNamespace(folder=tmp_path / name, has_started=True, config=load_config(None, [], {}))
        with pytest.raises(KeyboardInterrupt), chain_report(run):
            raise KeyboardInterrupt
    assert [path.parent.name for path in tmp_path.rglob("report.html")] == ["begun"]


def test_a_stage_leaves_its_page(tmp_path):
    save_tiny_policy(tmp_path / "base")
    flags = {"model": str(tmp_path / "base"), "out": str(tmp_path / "run")}
    config = load_config(None, ["sft.batch_size=2", "data.eval_fraction=0"], flags)
    run_sft(config, demonstrations=[{"prompt": "Deck:", "completion": f" {number}"} for number in range(4)])
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert '"state":"finished"' in page
    assert "Fine-tuning ran 2 steps" in page


def test_the_command_writes_it_and_says_where(tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path / "story", ppo_record())
    monkeypatch.setenv("HOME", str(tmp_path))
    cases = {
        folder / "report.html": [str(folder)],
        tmp_path / "elsewhere.html": [str(folder), "--out", str(tmp_path / "elsewhere.html")],
        tmp_path / "home.html": ["~/story", "--out=~/home.html"],
    }
    for out, arguments in cases.items():
        monkeypatch.setattr(sys, "argv", ["kedge", "report", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        assert capsys.readouterr().out.strip() == str(out)
        assert out.is_file()


def test_the_page_says_what_the_doctor_checked_and_praises_no_unchecked_run(tmp_path):
    [run] = collect_page([write_run(tmp_path / "story", ppo_record())])["runs"]
    assert " check" in run["doctor"]["verdict"]
    unknown = replace(ppo_record(), facts={"stage": "generate"}, metrics=[], samples=[], details=[])
    [run] = collect_page([write_run(tmp_path / "generate", unknown, finished=False)])["runs"]
    assert not run["doctor"]["clean"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError(errno.EIO, "Input/output error"), "Input/output error"), (TimeoutError("late"), "late")],
)
def test_a_file_that_fails_while_it_is_read_is_one_line(error: OSError, reason: str, tmp_path: Path) -> None:
    """Such an error has no file name."""
    with pytest.raises(DataError, match=rf"^{re.escape(str(tmp_path))} cannot be read: {reason}$"), readable(tmp_path):
        raise error

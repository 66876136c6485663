"""A sweep runs its trials in processes, compares them, continues, and stops them when it is stopped.

Stand-ins that write the files of a run in milliseconds take the place of `kedge STAGE`.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kedge.config import load_config
from kedge.runs.claim import claim, claims
from kedge.runs.fingerprint import input_hashes
from kedge_base.errors import ConfigError, KedgeError, OutputError
from kedge_inspect.sweeps import read_sweep
from kedge_lab import sweep
from kedge_lab.sweep import Trial, plan_trials, run_sweep

STAND_IN = """
import json, os, pathlib, signal, sys
out, score, seed = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
if score == 0.3:
    sys.exit("error: this setting cannot run")
if score == 0.5:
    print("ppo 3/20", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
out.mkdir()
rows = [{"update": n, "reward/score_mean": score * n + seed, "objective/kl": n / 10} for n in range(1, 21)]
(out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
(out / "finished.json").write_text("{}")
"""


def trials(*values: str, seeds: int = 2, preset: list[str] | None = None) -> list[Trial]:
    return plan_trials(
        {"ppo.clip_range": list(values)},
        range(seeds),
        lambda settings: load_config(None, [f"{field}={value}" for field, value in settings.items()], preset=preset),
    )


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def start(trial: Trial, folder: Path, stage: str, num_processes: int) -> subprocess.Popen[bytes]:
        names.append(trial.name)
        arguments = [str(folder / trial.name), trial.values["ppo.clip_range"], str(trial.seed)]
        with (folder / "logs" / f"{trial.name}.log").open("ab") as log:
            return subprocess.Popen([sys.executable, "-S", "-c", STAND_IN, *arguments], stderr=log)

    monkeypatch.setattr(sweep, "_start", start)
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.005)
    monkeypatch.setattr(sweep, "write_report", lambda *_, **__: "report.html")
    return names


def test_runs_are_compared_and_a_second_call_has_nothing_to_do(
    tmp_path: Path, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    result = run_sweep(trials("0.1", "0.2"), "ppo", folder, num_processes=2)
    assert len(started) == 4
    assert [row.label for row in result.rows] == ["ppo.clip_range=0.2", "ppo.clip_range=0.1"]
    # The mean of updates 19 and 20, the last tenth: 0.2 · 19.5, and one more with seed 1.
    assert result.rows[0].values == pytest.approx([3.9, 4.9])
    printed, said = capsys.readouterr()
    assert "reward/score_mean at the end, highest first" in printed
    assert said.startswith("4 runs (2 settings × 2 seeds), 2 at a time, in ")
    saved = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    assert saved["results"][0]["interval"]["value"] == pytest.approx(4.4)

    again = run_sweep(trials("0.1", "0.2", "0.4"), "ppo", folder, num_processes=2)
    assert len(started) == 6
    assert again.rows[0].label == "ppo.clip_range=0.4"


def test_a_folder_in_the_home_folder_is_written_and_continued_there(
    tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    results = [run_sweep(trials("0.1"), "ppo", Path("~/sweep"), num_processes=2) for _ in range(2)]
    assert [result.folder for result in results] == [tmp_path / "sweep"] * 2
    assert len(started) == 2
    assert (tmp_path / "sweep" / "configs" / f"{started[0]}.yaml").is_file()


def test_code_that_has_changed_is_refused_once_a_run_with_it_has_finished(tmp_path: Path, started: list[str]) -> None:
    code = tmp_path / "reward.py"
    code.write_text("f = broken", encoding="utf-8")

    def rewarded(value: str, seeds: int) -> list[Trial]:
        return plan_trials(
            {"ppo.clip_range": [value]},
            range(seeds),
            lambda values: load_config(
                overrides=[f"reward={code}:f", *(f"{key}={value}" for key, value in values.items())]
            ),
        )

    for text in ("f = broken", "f = right"):
        code.write_text(text, encoding="utf-8")
        with pytest.raises(KedgeError, match="no run of the sweep has finished"):  # so that nothing is mixed
            run_sweep(rewarded("0.3", 1), "ppo", tmp_path / "sweep", num_processes=1)
    run_sweep(rewarded("0.1", 1), "ppo", tmp_path / "sweep", num_processes=1)
    run_sweep(rewarded("0.1", 2), "ppo", tmp_path / "sweep", num_processes=1)
    assert len(started) == 4
    finished = rewarded("0.1", 2)[0]  # which the stand-in for `kedge ppo` leaves without what a run writes
    inputs = {"inputs": input_hashes(finished.config)}
    (tmp_path / "sweep" / finished.name / "finished.json").write_text(json.dumps(inputs), encoding="utf-8")
    run_sweep(rewarded("0.1", 2), "ppo", tmp_path / "sweep", num_processes=1)
    code.write_text("f = other", encoding="utf-8")
    said = "clip_range=0.1_seed=0, which has finished, and reward: the files have changed since the run started"
    with pytest.raises(ConfigError, match=said):
        run_sweep(rewarded("0.1", 3), "ppo", tmp_path / "sweep", num_processes=1)
    assert len(started) == 4


def test_settings_that_tie_are_not_called_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A longer name of the same number is another setting."""
    three = trials("0.1", "0.10", "0.05", seeds=1, preset=["small-cpu", "s2-defaults"])
    run_sweep(three, "ppo", tmp_path, num_processes=1)
    printed = capsys.readouterr().err
    assert printed.startswith("3 runs (3 settings, one seed each), 1 at a time, in ")
    assert printed.count("presets differ, and the later one counts: ppo.learning_rate=1e-05") == 1
    assert f"Best: 2 of 3 settings tie; the first of them: {tmp_path / 'clip_range=0.1_seed=0' / 'model'}\n" in printed


def test_the_same_sweep_does_not_run_twice_at_a_time(tmp_path: Path, started: list[str]) -> None:
    """The second would start the same runs, which refuse it, and note them as failed."""
    folder = tmp_path / "sweep"
    run_sweep(trials("0.1"), "ppo", folder, num_processes=1)
    before = (folder / "sweep.json").read_bytes()
    with claims():
        claim(folder)
        with pytest.raises(OutputError, match="is training in"):
            run_sweep(trials("0.1", "0.2"), "ppo", folder, num_processes=1)
    assert len(started) == 2
    assert (folder / "sweep.json").read_bytes() == before


def test_a_failed_run_does_not_end_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_sweep(trials("0.3", "0.1", "0.5", seeds=1), "ppo", tmp_path / "sweep", num_processes=1)
    assert result.failed == ["clip_range=0.3_seed=0", "clip_range=0.5_seed=0"]
    printed = capsys.readouterr().err
    assert "clip_range=0.3_seed=0 failed: error: this setting cannot run" in printed
    assert "clip_range=0.5_seed=0 failed: killed by SIGKILL" in printed
    assert [run.error for run in read_sweep(result.folder).runs] == [
        "error: this setting cannot run",
        None,
        "killed by SIGKILL",
    ]
    assert [row.interval is None for row in result.rows] == [False, True, True]
    assert math.isnan(result.rows[0].interval.low)  # type: ignore[union-attr]
    json.loads((tmp_path / "sweep" / "sweep.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)


def test_a_metric_that_the_first_run_does_not_have_is_named_when_it_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "metric: the runs have no reward/scor_mean; did you mean reward/score_mean?"
    with pytest.raises(ConfigError) as refused:
        run_sweep(trials("0.1", "0.2"), "ppo", tmp_path / "sweep", num_processes=1, metric="reward/scor_mean")
    assert str(refused.value) == said
    assert capsys.readouterr().err.count(f"{said} so far; ") == 1


def test_a_metric_that_no_run_has_costs_no_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another setting may have the metric, such as one with ppo.eval_every."""
    with pytest.raises(ConfigError, match="the runs have no eval/score; they have objective/kl, reward/score_mean"):
        run_sweep(trials("0.1", "0.2"), "ppo", tmp_path / "sweep", num_processes=2, metric="eval/score")
    printed = capsys.readouterr()
    assert "reward/score_mean at the end, highest first" in printed.out
    assert "Report: report.html" in printed.err


def test_a_stopped_sweep_stops_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import signal, sys, pathlib, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); "
    code += "pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
    running: list[subprocess.Popen[bytes]] = []

    def start(trial: Trial, folder: Path, stage: str, num_processes: int) -> subprocess.Popen[bytes]:
        running.append(subprocess.Popen([sys.executable, "-S", "-c", code, str(tmp_path / trial.name)]))
        return running[-1]

    sleep, signals = time.sleep, iter([signal.SIGINT])

    def interrupt_once_all_run(seconds: float) -> None:
        if all((tmp_path / trial.name).exists() for trial in both):
            for signum in signals:
                signal.raise_signal(signum)
        sleep(seconds)

    both = trials("0.1", "0.2", seeds=1)
    monkeypatch.setattr(sweep, "_start", start)
    monkeypatch.setattr(sweep.time, "sleep", interrupt_once_all_run)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(both, "ppo", tmp_path / "sweep", num_processes=2)
    assert [process.returncode for process in running] == [7, 7]
    assert f"Resume: the same call continues the sweep in {tmp_path / 'sweep'}\n" in capsys.readouterr().err


def test_another_sweep_or_another_folder_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_sweep(trials("0.1", seeds=2), "ppo", tmp_path / "sweep", num_processes=2)
    assert capsys.readouterr().err.startswith("2 runs (1 setting × 2 seeds), 2 at a time, in ")
    changed = plan_trials(
        {"ppo.clip_range": ["0.1"]},
        range(2),
        lambda values: load_config(
            overrides=["ppo.num_epochs=2", *(f"{key}={value}" for key, value in values.items())]
        ),
    )
    with pytest.raises(ConfigError, match=r"other settings \(.*_seed=0.yaml: ppo.num_epochs: 4 in the run, 2 now\)"):
        run_sweep(changed, "ppo", tmp_path / "sweep")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(OutputError, match="is not empty"):
        run_sweep(trials("0.1"), "ppo", tmp_path / "mine")

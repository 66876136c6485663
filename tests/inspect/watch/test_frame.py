"""Frames of synthetic runs."""

from __future__ import annotations

import os
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from kedge.inspect.doctor import Examination, Finding
from kedge.inspect.watch import Follower, Snapshot, draw_frame
from tests.inspect.watch.runs import CONFIG, add, begin, metrics, sample


def finding(rule: str, **more: Any) -> Finding:
    fields: dict[str, Any] = {"severity": "serious", "seen": "0.9 at update 3", "means": "m", "field": "", **more}
    return Finding(rule, direction="switch", try_="ppo.kl_coef=0.1", docs="docs/doctor.md", **fields)


def snapshot_of(folder: Path, *findings: Finding) -> Snapshot:
    return Follower(folder, lambda record: Examination(tuple(findings), 30)).look()


def drawn(snapshot: Snapshot, width: int = 100, height: int | None = None) -> str:
    console = Console(
        record=True, width=width, height=height, file=StringIO(), color_system="truecolor", highlight=False
    )
    console.print(draw_frame(snapshot, console, height=height))
    text = console.export_text()
    assert max(map(cell_len, text.splitlines())) <= width
    return text


def line_of(text: str, label: str) -> str:
    [line] = [line for line in text.splitlines() if line.startswith(label)]
    return line


def test_a_running_run(tmp_path):
    folder = begin(tmp_path / "run")
    add(folder, "metrics.jsonl", *(metrics(update) for update in range(1, 9)))
    text = drawn(snapshot_of(folder))
    assert text.startswith("ppo  ")
    assert "● running, wrote 0:00 ago" in text
    # Eight updates of two seconds are done, thirty-two are left.
    progress = line_of(text, "update 8/40")
    assert progress.rstrip().endswith("0:16 so far, 1:04 left")
    # From 0.25 to 2 in equal steps: every block once.
    assert line_of(text, "score").split() == ["score", "2.00", "▁▂▃▄▅▆▇█", "0.250", "to", "2.00"]
    assert "nothing wrong in 30 checks" in text


def test_the_time_left_follows_recent_updates(tmp_path):
    folder = begin(tmp_path / "run")
    slow, fast = ([metrics(update, **{"time/update": seconds}) for update in updates]
                  for seconds, updates in ((60.0, range(1, 3)), (1.0, range(3, 31))))  # fmt: skip
    add(folder, "metrics.jsonl", *slow, *fast)
    assert line_of(drawn(snapshot_of(folder)), "update 30/40").rstrip().endswith("2:28 so far, 0:10 left")


def test_a_run_that_died_and_one_that_finished(tmp_path):
    folder = begin(tmp_path / "run")
    add(folder, "metrics.jsonl", metrics(1))
    hour_ago = time.time() - 3600
    os.utime(folder / "metrics.jsonl", (hour_ago, hour_ago))
    text = drawn(snapshot_of(folder))
    assert "✕ stopped, wrote 1:00:00 ago" in text
    assert " left" not in text
    (folder / "finished.json").write_text('{"stage": "ppo", "updates": 1}')
    assert "■ finished" in drawn(snapshot_of(folder))


def test_a_run_that_ended_early_says_why(tmp_path):
    folder = begin(tmp_path / "run")
    add(folder, "metrics.jsonl", metrics(1))
    (folder / "finished.json").write_text('{"ended": "the KL is 21"}')
    assert "ended early: the KL is 21" in drawn(snapshot_of(folder))


def test_a_run_without_a_row_yet(tmp_path):
    text = drawn(snapshot_of(begin(tmp_path / "run")))
    assert "no metrics yet" in text
    assert "update 0/40" in text


@pytest.mark.parametrize("config", ["", "# stage: ppo\n", "# stage: ppo\nppo: 3\n", "# stage: sft\nsft: {}\n", "[1]\n"])
def test_an_incomplete_configuration(tmp_path, config):
    folder = begin(tmp_path / "run", config)
    add(folder, "metrics.jsonl", {"update": 3, "loss": 0.5, "time/update": None, "reward/score_mean": "high"})
    assert "3  0:00 so far" in drawn(snapshot_of(folder))


def test_terms_of_the_score_and_the_supervised_stages(tmp_path):
    folder = begin(tmp_path / "run")
    add(folder, "metrics.jsonl", metrics(1, **{"score/gold": 1.0, "score/a_name_that_is_much_too_long": 2.0}))
    text = drawn(snapshot_of(folder))
    assert line_of(text, "gold").split()[1] == "1.00"
    assert line_of(text, "…").split()[:2] == ["…_is_much_too_long", "2.00"]
    other = begin(tmp_path / "other", "# stage: reward\n")
    add(other, "metrics.jsonl", {"update": 1, "loss": 0.7, "accuracy": 0.5}, {"update": 2, "loss": 0.6, "accuracy": 1})
    text = drawn(snapshot_of(other))
    assert line_of(text, "loss").split()[:3] == ["loss", "0.600", "█▁"]
    assert line_of(text, "accuracy").split()[:3] == ["accuracy", "1.00", "▁█"]


def test_a_control_run(tmp_path):
    sizes = "control: {total_steps: 1000, num_envs: 2, num_steps: 64}"
    folder = begin(tmp_path / "run", f"# stage: control\n{sizes}\n")
    row = {"episode/return_mean": 20.0, "policy/entropy": 0.5, "time/update": 2.0}
    add(folder, "metrics.jsonl", {"update": 1, **row}, {"update": 2, **row, "episode/return_mean": 30.0})
    text = drawn(snapshot_of(folder))
    assert line_of(text, "return").split()[:3] == ["return", "30.0", "▁█"]
    assert "update 2/7" in text  # of 128 steps
    assert "0:10 left" in text


def test_findings_with_what_to_try_about_the_first(tmp_path):
    folder = begin(tmp_path / "run")
    add(folder, "metrics.jsonl", metrics(1))
    found = [finding("kl_exploding"), finding("reward_flat", severity="warning"), *map(finding, "abcdef")]
    text = drawn(snapshot_of(folder, *found))
    assert "serious kl_exploding  0.9 at update 3" in text
    assert "try     ppo.kl_coef=0.1" in text
    assert text.count("ppo.kl_coef=0.1") == 1
    assert "warning reward_flat" in text
    assert f"and 2 more: kedge doctor {folder}"[:60] in text


def test_model_output_is_shown_literally(tmp_path):
    folder = begin(tmp_path / "run")
    add(folder, "metrics.jsonl", metrics(3))
    response = "[bold]no[/bold] [/] :smile: \x1b[2J\x07\r\u202e\u200b\n second line"
    add(folder, "samples.jsonl", sample(3, response, prompt="\x1b]0;title\x07[red]"))
    text = drawn(snapshot_of(folder))
    assert "newest response, update 3: score 1.25" in text
    assert "▶ [bold]no[/bold] [/] :smile: \\x1b[2J\\x07\\r\\u202e\\u200b\n second line" in text
    assert "\\x1b]0;title\\x07[red]\n" in text
    assert "\x07" not in text
    assert "\x1b" not in text


def test_names_are_shown_literally(tmp_path):
    folder = begin(tmp_path / "[red]run\x1b[2J")
    add(folder, "metrics.jsonl", metrics(1, **{"score/[b]\x07": 1.0, "score/other": 1.0}))
    add(
        folder, "incidents.jsonl", {"update": 1, "kind": "nonfinite", "what": "NaN\x1b[2J [red]", "consequence": "skip"}
    )
    text = drawn(snapshot_of(folder, finding("x", seen="\x1b[2J[red]")), width=200)
    for shown in ("[red]run\\x1b[2J", "[b]\\x07", "NaN\\x1b[2J [red]; skip", "x  \\x1b[2J[red]"):
        assert shown in text
    assert "\x1b" not in text


def test_the_first_response_of_the_newest_update(tmp_path):
    folder = begin(tmp_path / "run")
    add(
        folder,
        "samples.jsonl",
        sample(1, "older"),
        sample(2, "this"),
        sample(2, "another"),
        sample(2, "again", fixed=0),
    )
    assert "▶ this" in drawn(snapshot_of(folder))
    add(folder, "samples.jsonl", sample(3, "asked again", fixed=0, score=None, stopped=False))
    assert "update 3: no score, cut at the token limit" in drawn(snapshot_of(folder))


def test_incidents_are_shown(tmp_path):
    folder = begin(tmp_path / "run")
    add(folder, "incidents.jsonl", {"update": 1, "what": "first"}, {"update": 7, "what": "NaN in the loss"})
    text = drawn(snapshot_of(folder))
    assert "2 incidents, the newest" in text
    assert "update 7: NaN in the loss\n" in text


@pytest.mark.parametrize(("width", "height"), [(60, 24), (60, 50), (80, 24), (100, 40), (200, 30), (200, 60)])
def test_a_frame_fits_its_terminal(tmp_path, width, height):
    folder = begin(tmp_path / "run")
    names = ("policy/entropy", "policy/clip_fraction", "policy/approx_kl", "policy/ratio_max", "policy/grad_norm",
             "value/explained_variance", "value/loss", "response/length", "response/eos_rate",
             "tokens_per_second")  # fmt: skip
    rows = [metrics(update, **dict.fromkeys(names, 1e-7 * update)) for update in range(1, 500)]
    add(folder, "metrics.jsonl", *rows)
    add(folder, "samples.jsonl", sample(499, "word " * 900, prompt="line\n" * 40))
    text = drawn(snapshot_of(folder, *map(finding, ("one", "two", "three"))), width=width, height=height)
    assert len(text.splitlines()) <= height
    assert "▶ word" in text
    assert "more lines" in text
    assert ("to 125" in line_of(text, "score")) == (width >= 72)  # the range, if there is room


def test_a_wide_terminal_has_two_columns_of_figures(tmp_path):
    folder = begin(tmp_path / "run")
    add(folder, "metrics.jsonl", metrics(1))
    assert "KL to the reference" not in line_of(drawn(snapshot_of(folder), width=119), "score")
    assert "seconds per update" in line_of(drawn(snapshot_of(folder), width=120), "score")


def test_the_doctor_examines_new_rows_only(tmp_path):
    folder, looks = begin(tmp_path / "run"), list[int]()
    follower = Follower(folder, lambda record: looks.append(len(record.metrics)) or Examination((), 0))
    follower.look()
    follower.look()
    assert looks == [0]
    add(folder, "metrics.jsonl", metrics(1))
    follower.look()
    assert looks == [0, 1]


def test_a_resumed_runs_configuration_is_read_again(tmp_path):
    folder = begin(tmp_path / "run")
    follower = Follower(folder, lambda record: Examination((), 0))
    assert follower.look().record.setting("ppo.num_updates") == 40
    begin(folder, CONFIG.replace("40", "80"))
    os.utime(folder / "config.yaml", (time.time() + 5, time.time() + 5))
    assert follower.look().record.setting("ppo.num_updates") == 80

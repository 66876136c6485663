"""The figures and tables of `python -m bench.defaults`, on rows written by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from bench.defaults import __main__ as command
from bench.defaults.page import critic_tables, tables
from bench.defaults.trials import Trial, figures_of, read_trials, save_trials
from kedge.config import load_config


def row(score: float, kl: float, explained: float, **more: float) -> dict[str, Any]:
    return {
        "policy/clip_fraction": 0.1, "policy/approx_kl": 0.01, "policy/ratio_max": 3.0, "reward/score_mean": score,
        "reward/score_std": 2.0, "objective/kl": kl, "value/explained_variance": explained, "value/mean": 1.0,
        "value/returns_mean": 4.0, "value/returns_std": 2.0, **more,
    }  # fmt: skip


ROWS = [
    row(1.0, 0.0, 0.0, **{"policy/ratio_max": 7.0}),
    row(1.5, 1.0, -0.5),
    *(row(score, kl, explained) for score, kl, explained in [(3.0, 2.0, 0.1), (5.0, 4.0, 0.2), (4.0, 3.0, 0.3)]),
]


def trial(seed: int = 0, **changed: float) -> Trial:
    figures = {**figures_of(ROWS), **changed}
    settings = {"ppo.learning_rate": 1e-4, "ppo.value_head_rate": 10.0, "ppo.critic": "shared"}
    return Trial("a start", settings, seed, figures)


def separate(rate: float, **changed: float) -> Trial:
    figures = {**figures_of(ROWS), "cost": 9.3, **changed}
    return Trial("a start", {"ppo.critic": "separate", "ppo.critic_learning_rate": rate}, 0, figures)


def test_the_figures_of_a_run() -> None:
    assert figures_of(ROWS) == {
        "clip_1": 0.1,
        "kl_1": 0.01,
        "ratio_1": 7.0,
        "explained_2": -0.5,
        "explained": 0.2,
        "bias": 1.5,
        "gain": 1.5,
        "kl": 3.0,
    }


def test_a_row_is_the_mean_over_seeds_and_the_values_in_use_are_bold(tmp_path: Path) -> None:
    save_trials([trial(), trial(1, gain=0.5, ratio_1=9.0)], tmp_path / "record.json")
    [table] = tables(read_trials(tmp_path / "record.json"))
    assert table.rows[0][:5] == ["**0.0001**", "**10**", "**10.0 %**", "**0.010**", "**9.0**"]
    assert table.rows[0][-3:] == ["**1.00**", "**3.00**", "**0.33**"]


def test_a_separate_critics_rates_stand_below_the_value_head_in_use() -> None:
    [table] = critic_tables([separate(1e-3, explained=0.6), trial(), separate(1e-4)])
    assert [row[:4] for row in table.rows] == [
        ["value head", "0.0001 × 10", "-0.50", "0.20"],
        ["separate", "0.0001", "-0.50", "0.20"],
        ["separate", "0.001", "-0.50", "0.60"],
    ]
    assert [row[-1] for row in table.rows] == ["–", "9.3", "9.3"]
    assert len(tables([separate(1e-3), trial()])[0].rows) == 1
    assert critic_tables([trial()]) == []


def test_recorded_runs_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    record = tmp_path / "record.json"
    save_trials([trial()], record)
    monkeypatch.setattr(command, "run_trial", lambda *_, **__: pytest.fail("repeated"))
    own = ["--model", "m", "--prompts", "p", "--reward", "r.py:f", "--name", "a start"]
    grid = ["--rates", "1e-4", "--head-rates", "10", "--critic-rates", "--seeds", "0", "--record", str(record)]
    monkeypatch.setattr(sys, "argv", ["bench.defaults", *own, *grid])
    assert command.main() == 0
    assert "### a start" in capsys.readouterr().out


def test_the_page_describes_the_values_in_use() -> None:
    config = load_config(preset="small-cpu")
    assert (config.ppo.learning_rate, config.ppo.value_head_rate) == (1e-4, 10.0)

"""Results at a prompt and in a notebook, from runs written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from kedge.stages.ppo.result import PpoResult
from kedge.stages.reward import RewardResult
from kedge_base.errors import RewardError
from kedge_base.intervals import Interval
from kedge_inspect.doctor import diagnose
from kedge_lab.evaluate import EvaluateResult
from tests.inspect.page.judged import evaluation_record, write_judged
from tests.inspect.page.records import ppo_record, reward_record, write_run


def test_a_ppo_result_shows_its_report_and_the_next_call(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<b>story", ppo_record())
    (folder / "model").mkdir()
    result = PpoResult(folder, [])
    first, files, following = repr(result).splitlines()
    assert first.startswith(
        f"PpoResult in {folder}: PPO ran 5 updates (20 s, 40 responses): the score rose from 1 to 5"
    )
    assert files == f"  model: {folder / 'model'}"
    assert following.startswith(f"  next: kedge.evaluate(model='{folder / 'model'}'")
    html = result._repr_html_()
    assert "&lt;b&gt;story" in html
    assert "the score rose from 1 to 5" in html
    assert "<td>Score</td>" in html
    assert all(word not in html for word in ("<b>", "<script", "<img"))


def test_every_stage_is_at_most_three_lines(tmp_path: Path) -> None:
    rate = Interval(0.5, 0.4, 0.6)
    reward = RewardResult(write_run(tmp_path / "reward", reward_record()), {})
    evaluation = EvaluateResult(write_judged(tmp_path / "evaluate", evaluation_record()), rate, {})
    assert all(1 <= len(repr(result).splitlines()) <= 3 for result in (reward, evaluation))
    assert "won 2, tied 1 and lost 1 of 4 prompts against runs/sft/model" in repr(evaluation)


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    gone = PpoResult(tmp_path / "gone", [])
    assert "not the folder of a run" in repr(gone)
    assert "not the folder of a run" in gone._repr_html_()


def test_an_error_is_one_line_in_ipython() -> None:
    with pytest.raises(RewardError) as caught:
        raise RewardError("brief raised ZeroDivisionError: division by zero\n(rewards.py:3)")
    assert caught.value._render_traceback_() == [
        "RewardError: brief raised ZeroDivisionError: division by zero\\n(rewards.py:3)"
    ]


def test_a_finding_is_one_line() -> None:
    _, finding = diagnose(evaluation_record())
    assert repr(finding) == "<note win_rate_undecided: the win rate is 62% (25% to 100%) on 4 prompts>"

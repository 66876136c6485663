"""Results in a notebook and as text, from runs written by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kedge.errors import RewardError
from kedge.inspect.doctor import diagnose
from kedge.inspect.notebook.curve import svg_curve
from kedge.inspect.notebook.runs import shown_run
from kedge.stages.evaluate import EvaluateResult
from kedge.stages.ppo.result import PpoResult
from kedge.system.intervals import Interval
from tests.inspect.page.judged import evaluation_record, generation_record, judgment, write_judged
from tests.inspect.page.records import ppo_record, reward_record, sample, write_run
from tests.inspect.page.test_document import NASTY


def test_a_ppo_result_shows_figures_curves_samples_and_the_next_call(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "story", ppo_record(samples=[sample(5, tokens=NASTY, prompt="".join(NASTY))]))
    (folder / "model").mkdir()
    result = PpoResult(folder, [])
    lines = repr(result).splitlines()
    assert lines[0] == f"PpoResult in {folder}: updates 5, score 1.00 to 5.00, KL 25.0, tokens 10.0"
    assert lines[1] == f"  model: {folder / 'model'}"
    assert lines[2].startswith(f"  next: kedge.evaluate(model='{folder / 'model'}'")
    html = result._repr_html_()
    assert html.count("<svg") == 3
    assert "<script" not in html
    assert "<img" not in html
    assert "&lt;script&gt;window.caught" in html
    assert "\x1b" not in html


def test_every_stage_is_at_most_three_lines(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "reward", reward_record())]
    folders += [write_judged(tmp_path / each.stage, each) for each in (evaluation_record(), generation_record())]
    texts = [shown_run("Result", folder).text() for folder in folders]
    assert all(1 <= len(text.splitlines()) <= 3 for text in texts)
    assert "held-out accuracy 0.75 (0.70 to 0.80)" in texts[0]
    assert "win rate 0.62 (0.25 to 1.00) over runs/sft/model, won / tied / lost 2 / 1 / 1" in texts[1]
    assert "responses 3, score 2.00 (1.00 to 3.00)" in texts[2]


def test_an_evaluation_shows_a_pair_of_each_outcome(tmp_path: Path) -> None:
    rows = [judgment(number, winner) for number, winner in enumerate(["model", "model", "against"])]
    folder = write_judged(tmp_path / "run", evaluation_record(rows))
    html = EvaluateResult(folder, Interval(0.5, 0.4, 0.6), {})._repr_html_()
    assert re.findall(r"model \((\w+)\)", html) == ["won", "lost"]
    assert "ours 0" in html
    assert "ours 1" not in html


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    assert "not the folder of a run" in repr(PpoResult(tmp_path / "gone", []))


def test_a_curve_goes_through_its_values() -> None:
    # 240 by 72 with a margin of 4: from (4, 68) for the lowest to (236, 4) for the highest value.
    assert 'points="4.0,68.0 120.0,36.0 236.0,4.0"' in svg_curve("score", [1.0, 2.0, 3.0])
    assert 'points="4.0,36.0 236.0,36.0"' in svg_curve("score", [2.0, 2.0])
    assert svg_curve("score", [1.0, float("nan")]) == ""
    assert svg_curve("a<b", list(map(float, range(10_000)))).count(",") < 260
    assert "a&lt;b: 1.00 to 3.00" in svg_curve("a<b", [1.0, 3.0])


def test_an_error_is_one_line_in_ipython() -> None:
    with pytest.raises(RewardError) as caught:
        raise RewardError("brief raised ZeroDivisionError: division by zero\n(rewards.py:3)")
    assert caught.value._render_traceback_() == [
        "RewardError: brief raised ZeroDivisionError: division by zero\\n(rewards.py:3)"
    ]


def test_a_finding_is_one_line_of_text_and_a_block_of_html() -> None:
    _, finding = diagnose(evaluation_record())
    assert repr(finding) == "<note win_rate_undecided: the win rate is 62% (25% to 100%) on 4 prompts>"
    assert "<b>win_rate_undecided</b> (note)" in finding._repr_html_()
    assert "judge about 36 prompts" in finding._repr_html_()  # 4 times (0.375 / 0.125)²

"""Whatever is in a run's folder, `report` and `doctor` show it, or say in one line why not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from kedge_base.errors import DataError
from kedge_inspect.diagnosis import examine_run
from kedge_inspect.page.document import render_page
from kedge_inspect.report import collect_page
from tests.fuzz.outcome import case_counts, fuzz, line_or_result
from tests.inspect.page.records import critic_check, ppo_record, reward_record, write_run

BAD = ["[1]", "null", "7", '"x"', "{}", "1e999", "NaN", "true", "9" * 5000, "9" * 400, "-1", "[" * 9000, "[" * 3000
       + "]" * 3000, '{"update": 1', '{"update": "x"}', '{"update": 2, "time/update": "x"}', "\0", ""]  # fmt: skip


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each kind, with every file that it can have."""
    base = tmp_path_factory.mktemp("runs")
    runs = {"ppo": write_run(base / "ppo", ppo_record()), "reward": write_run(base / "reward", reward_record())}
    incident = {"update": 2, "kind": "nonfinite", "what": "loss", "consequence": "skip", "row": 1, "token": 2}
    files = {
        "incidents.jsonl": [incident],
        "evaluations.jsonl": [{"update": update, "eval/score": 1.0 * update, "eval/kl": 0.1} for update in (0, 5)],
        "critic_checks.jsonl": [critic_check(update, 0.1) for update in (0, 5)],
        "data.json": [{"prompts": {"sources": ["a"], "rows": 3, "used": 2, "dropped": {"x": 1}, "line": "3 rows"}}],
        "checkpoints/best.json": [{"update": 2, "metric": "reward/score_mean", "value": 1.0}],
    }
    (base / "ppo" / "checkpoints" / "update-000002").mkdir(parents=True)
    for name, rows in files.items():
        (base / "ppo" / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return runs


@st.composite
def damages(draw: st.DrawFn, healthy: dict[str, Path]) -> tuple[str, str, str]:
    """A run, a file of it, and other contents of that file."""
    stage = draw(st.sampled_from(sorted(healthy)))
    names = sorted(path.relative_to(healthy[stage]).as_posix() for path in healthy[stage].rglob("*") if path.is_file())
    name = draw(st.sampled_from(names))
    text = (healthy[stage] / name).read_text(encoding="utf-8")
    head, body = text.split("\n\n", 1) if name == "config.yaml" else ("", text)
    lines = body.splitlines() or ["{}"]
    place = draw(st.integers(0, len(lines) - 1))
    if draw(st.booleans()):
        lines[place] = draw(st.sampled_from([*BAD, lines[place][: draw(st.integers(0, len(lines[place])))]]))
    else:
        lines[place] = _with_another_entry(draw, json.loads(lines[place]))
    return stage, name, f"{head}\n\n" * bool(head) + "\n".join(lines) + "\n"


def _with_another_entry(draw: st.DrawFn, value: Any) -> str:
    """A JSON value, one entry of which is left out or has another value."""
    inner, whole = value, value
    while isinstance(inner, (dict, list)) and inner:
        key = draw(st.sampled_from(sorted(inner))) if isinstance(inner, dict) else draw(st.integers(0, len(inner) - 1))
        if not isinstance(inner[key], (dict, list)) or draw(st.integers(0, 2)) == 0:
            new = draw(st.sampled_from([None, *BAD]))
            if new is None:
                del inner[key]
                return json.dumps(whole)
            inner[key] = "PLACE"
            return json.dumps(whole).replace('"PLACE"', new or "null")
        inner = inner[key]
    return json.dumps(whole)


@case_counts(12, 1500)
def test_a_damaged_run_is_shown_or_named_in_one_line(healthy, tmp_path, num_cases, record_property):
    def check(case: tuple[str, str, str]) -> None:
        stage, name, text = case
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(healthy[stage], folder)
        (folder / name).write_text(text, encoding="utf-8")
        line_or_result(lambda: render_page(collect_page([folder])))
        line_or_result(examine_run, folder)

    fuzz(num_cases, damages(healthy), check, record_property)


# libyaml reads ahead; since 0.2.6 it stops by itself at a thousand levels.
LEVELS = "(more than 100 levels|exceeded maximum nesting depth)"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: " + "[" * 10**6, LEVELS),
        ("- " * 10**5 + "a", LEVELS),
        ("".join(" " * level + "a:\n" for level in range(300)), "more than 100 levels"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "it has aliases"),
        ("&a a: *a", "it has aliases"),
        ("a: !!timestamp x", ""),
        ("a: !!bool x", ""),
        ("a: !!int ''", ""),
        ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("a: " + "9" * 5000, "Exceeds the limit"),
    ],
    ids=["lists", "one line", "mappings", "aliases", "itself", "time", "truth", "no number", "code", "digits"],
)
def test_a_configuration_that_no_run_wrote_is_named(healthy, tmp_path, text, fault):
    folder = Path(shutil.copytree(healthy["ppo"], tmp_path / "run"))
    (folder / "config.yaml").write_text(text)
    for read in (examine_run, lambda run: collect_page([run])):
        with pytest.raises(DataError, match=rf"config\.yaml' is damaged: .*{fault}"):
            read(folder)


def test_lines_that_are_no_rows_are_left_out_counted_and_said(healthy, tmp_path, capsys):
    folder = Path(shutil.copytree(healthy["ppo"], tmp_path / "run"))
    whole = collect_page([folder])["runs"][0]["first_and_last"]
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([rows[0], "[1]", '{"upd', *rows[1:], "null", "", '{"half']))
    assert collect_page([folder])["runs"][0]["first_and_last"] == whole
    assert "metrics.jsonl: 3 lines, first line 2: damaged, left out" in capsys.readouterr().err.replace("\n", "")
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    line_or_result(lambda: render_page(collect_page([folder])))

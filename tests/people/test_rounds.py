"""Rounds of `kedge rlhf` labeled by people: they wait, and are resumed with the same result after any kill."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kedge.config import load_config, with_values
from kedge.runs.run import Resume
from kedge.stages import rlhf
from kedge.stages.rlhf import run_rlhf
from kedge_base.errors import DataError, RewardError
from kedge_base.run_folder.output import waiting_for
from kedge_base.run_folder.record_format import read_json_lines
from kedge_inspect.report import collect_page, report_as_text
from kedge_people.labels import Answer, AnswerFile, Labels, read_labels, write_items
from kedge_people.rounds import human_labels
from tests.forking import forked_kedge
from tests.stages.test_rlhf import ROWS, SETTINGS, config_for

ROUNDS = ["rlhf.num_rounds=2", "rlhf.labeler=human"]
SAMPLED = [
    {"prompt": "Deck 1:", "responses": ["a", "b", "c"], "model": "ppo", "post": "p"},
    {"prompt": "Deck 2:", "responses": ["a"], "model": "ppo"},
    {"prompt": "Deck 3:", "responses": ["a", "b"], "model": "ppo"},
]


def answer(labels: Labels, item: str, name: str = "", **values) -> Answer:
    """The answer of a person who likes vowels."""
    texts = labels.items[item].responses
    ranks = tuple(float(-sum(text.count(vowel) for vowel in "aeiou")) for text in texts)
    given = {"verdict": "ranked", "ranks": ranks, **values}
    return Answer(name or f"answer-{item}", item, "ana", "2026-01-01T00:00:00Z", 2.0, tuple(range(len(texts))), **given)


def label(folder: Path, count: int | None = None, **values) -> None:
    labels = read_labels(folder)
    with AnswerFile(folder) as file:
        for item in list(labels.items)[:count]:
            file.add(answer(labels, item, **values))


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def test_items_wait_until_enough_are_answered(tmp_path):
    folder = tmp_path / "labels"
    assert human_labels(folder, SAMPLED) == ([], 2)  # an item without a choice is not asked
    labels = read_labels(folder)
    assert [(item.prompt, item.models) for item in labels.items.values()] == [
        ("Deck 1:", ("ppo",) * 3),
        ("Deck 3:", ("ppo",) * 2),
    ]
    assert labels.items["1"].columns == {"post": "p"}
    with AnswerFile(folder) as file:
        file.add(answer(labels, "1"))
    rows, missing = human_labels(folder)
    assert ([row["responses"] for row in rows], missing) == ([["a", "b", "c"]], 1)
    assert human_labels(folder, least=1)[1] == 0
    with AnswerFile(folder) as file:
        file.add(answer(labels, "3", verdict="skipped", ranks=()))
    assert human_labels(folder)[1] == 0  # a skip is an answer
    with AnswerFile(folder) as file:
        file.add(answer(labels, "1", "b", verdict="skipped", ranks=(), replaces="answer-1"))
    assert human_labels(folder, least=9)[1] == 1  # an undone one is not
    with pytest.raises(DataError, match="nothing to compare"):
        human_labels(tmp_path / "other", SAMPLED[1:2])


def test_a_round_waits_for_people_and_goes_on_where_it_was_moved(tmp_path, capsys):
    config = config_for(tmp_path, *ROUNDS)
    run = tmp_path / "run"
    result = run_rlhf(config, **ROWS)
    assert (len(result.rounds), result.summary["missing_labels"]) == (1, len(read_labels(run / "labels-2").items))
    assert waiting_for(run) == run / "labels-2"
    said = capsys.readouterr()
    assert f"kedge label {run / 'labels-2'}" in said.out + said.err
    assert report_as_text(run).startswith("waiting for labels; PPO ran")
    assert collect_page([run])["title"] == "run: waiting for labels"
    assert not (run / "finished.json").exists()
    assert (run / "model" / "model.safetensors").read_bytes() == weights(run / "ppo")
    label(run / "labels-2", 1)
    again = run_rlhf(config, **ROWS, resume=Resume())
    assert again.summary["missing_labels"] == result.summary["missing_labels"] - 1

    moved = tmp_path / "elsewhere"
    shutil.copytree(run, moved)
    finished = []
    for folder in (run, moved):
        label(folder / "labels-2")
        finished.append(run_rlhf(with_values(config, {"out": str(folder)}), **ROWS, resume=Resume()))
        assert waiting_for(folder) is None
        assert json.loads((folder / "finished.json").read_text())["stage"] == "rlhf"
    assert weights(run) == weights(moved)
    assert len(finished[0].rounds) == 2
    rows = read_json_lines(run / "comparisons-2.jsonl")
    assert {row["label"]["person"] for row in rows} == {"ana"}
    # The rankings are those that a function with the same taste gives.
    for row in rows:
        counts = [sum(text.count(vowel) for vowel in "aeiou") for text in row["responses"]]
        assert [-rank for rank in row["ranks"]] == counts


FIRST = {name: rows for name, rows in ROWS.items() if name != "comparisons"}
"""The data of a run without comparisons, whose first reward model is trained on labels."""


def test_without_comparisons_the_first_round_waits_for_labels_of_the_sft_policy(tmp_path, capsys):
    config = config_for(tmp_path, "rlhf.labeler=human")
    run = tmp_path / "run"
    result = run_rlhf(config, **FIRST)
    items = read_labels(run / "labels").items
    assert (result.rounds, result.summary["missing_labels"]) == ([], len(items))
    assert {model for item in items.values() for model in item.models} == {"sft"}
    assert waiting_for(run) == run / "labels"
    assert f"kedge label {run / 'labels'}" in "".join(capsys.readouterr())
    assert not (run / "reward").exists()
    assert weights(run) == weights(run / "sft")
    assert report_as_text(run).startswith("waiting for labels; Fine-tuning ran")
    assert collect_page([run])["title"] == "run: waiting for labels"
    label(run / "labels")
    result = run_rlhf(config, **FIRST, resume=Resume())
    assert (len(result.rounds), waiting_for(run)) == (1, None)
    # The first reward model knows these labels only, and which step is trained on whose.
    rows = read_json_lines(run / "comparisons.jsonl")
    assert {row["label"]["person"] for row in rows} == {"ana"}
    assert load_config(run / "reward" / "config.yaml").data.comparisons == [str(run / "comparisons.jsonl")]
    assert {row["label"]["answer"] for row in rows} <= {f"answer-{item}" for item in items}


def test_a_round_after_the_first_labels_keeps_them(tmp_path):
    config = config_for(tmp_path, *ROUNDS)
    run = tmp_path / "run"
    for folder in ("labels", "labels-2"):
        assert run_rlhf(config, **FIRST, resume=Resume()).summary["missing_labels"]
        label(run / folder)
    assert len(run_rlhf(config, **FIRST, resume=Resume()).rounds) == 2
    used = load_config(run / "reward-2" / "config.yaml").data.comparisons
    assert used == [str(run / "comparisons.jsonl"), str(run / "comparisons-2.jsonl")]


def test_fewer_labels_suffice_if_the_resumed_run_says_so(tmp_path):
    config = config_for(tmp_path, *ROUNDS)
    run_rlhf(config, **ROWS)
    label(tmp_path / "run" / "labels-2", 2)
    result = run_rlhf(with_values(config, {"rlhf.min_labels": 2}), **ROWS, resume=Resume())
    assert len(result.rounds) == 2
    assert len(read_json_lines(tmp_path / "run" / "comparisons-2.jsonl")) <= 2


def test_answers_without_a_preference_are_an_error_that_labels_mend(tmp_path):
    config = config_for(tmp_path, *ROUNDS)
    run_rlhf(config, **ROWS)
    folder = tmp_path / "run" / "labels-2"
    label(folder, verdict="bad", ranks=())
    with pytest.raises(RewardError, match=r"no answer in .*labels-2 prefers a response"):
        run_rlhf(config, **ROWS, resume=Resume())
    labels = read_labels(folder)
    with AnswerFile(folder) as file:
        item = next(iter(labels.items.values()))
        file.add(answer(labels, item.id, "more", ranks=(1, 2, 3)[: len(item.responses)]))
    assert len(run_rlhf(config, **ROWS, resume=Resume()).rounds) == 2


WAITS = {"labels-2": (ROUNDS, ROWS), "labels": (["rlhf.labeler=human"], FIRST)}
"""Settings and data of a run by the folder of its labels."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, bytes]:
    """The weights of runs that wait for people and are not killed."""
    found = {}
    for labels, (settings, rows) in WAITS.items():
        folder = tmp_path_factory.mktemp("whole")
        config = config_for(folder, *settings)
        run_rlhf(config, **rows)
        label(folder / "run" / labels)
        run_rlhf(config, **rows, resume=Resume())
        found[labels] = weights(folder / "run")
    return found


@pytest.mark.parametrize("labels", WAITS)
@pytest.mark.parametrize("point", ["write_items", "write_rows", "run_reward"])
def test_a_kill_at_any_point_changes_nothing(tmp_path, monkeypatch, whole, point, labels):
    settings, rows = WAITS[labels]
    config = config_for(tmp_path, *settings)
    calls: list[object] = []

    class Killed(BaseException):
        pass

    place = "kedge_people.rounds" if point == "write_items" else "kedge.stages.rlhf"
    original = {"write_items": write_items, "write_rows": rlhf.write_rows, "run_reward": rlhf.run_reward}[point]

    def kill(*args, **kwargs):
        calls.append(args)
        last = {"write_items": 1, "write_rows": 2, "run_reward": 3}[point]
        if len(calls) == (1 if labels == "labels" else last):
            raise Killed
        return original(*args, **kwargs)

    monkeypatch.setattr(f"{place}.{point}", kill)
    is_labeled = False
    for _ in range(6):
        try:
            result = run_rlhf(config, **rows, resume=Resume())
        except Killed:
            continue
        if "missing_labels" not in result.summary:
            break
        assert not is_labeled
        label(tmp_path / "run" / labels)
        is_labeled = True
    assert is_labeled
    assert weights(tmp_path / "run") == whole[labels]


@pytest.mark.parametrize("labels", WAITS)
def test_the_command_ends_well_and_the_doctor_says_what_is_missing(tmp_path, labels):
    settings, given = WAITS[labels]
    config_for(tmp_path)
    for name, rows in given.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [part for name in given for part in (f"--{name}", f"{name}.jsonl")]
    command = ["rlhf", "--model", "base", *data, "--out", "run", *SETTINGS, *settings]
    ended = forked_kedge(*command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout + ended.stderr
    assert "Waiting for labels: " in said
    assert "Resume: kedge rlhf --resume run" in said
    found = forked_kedge("doctor", "run", cwd=tmp_path)
    assert f"Waiting for labels: kedge label run/{labels}, then" in found.stdout
    label(tmp_path / "run" / labels)
    written = forked_kedge("label", f"run/{labels}", "--write", cwd=tmp_path)
    assert "Next:    kedge rlhf --resume run\n" in written.stdout
    assert "kedge reward" not in written.stdout
    resumed = forked_kedge("rlhf", "--resume", "run", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert (tmp_path / "run" / "finished.json").exists()

"""Rounds of `kedge rlhf` labeled by people: they wait, and are resumed with the same result after any kill."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import pytest

from kedge.config import load_config, with_values
from kedge.runs.run import Resume
from kedge.stages.rlhf import run_rlhf
from kedge_base.errors import DataError, RewardError
from kedge_base.run_folder.output import waiting_for
from kedge_base.run_folder.record_format import read_json_lines
from kedge_inspect.report import collect_page, report_as_text
from kedge_people.labels import Answer, AnswerFile, Labels, read_labels
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


FIRST = {name: rows for name, rows in ROWS.items() if name != "comparisons"}
"""The data of a run without comparisons, whose first reward model is trained on labels."""

WAITS = {"labels-2": (ROUNDS, ROWS), "labels": (["rlhf.labeler=human"], FIRST)}
"""Settings and data of a run by the folder of its labels."""


@pytest.fixture(scope="module")
def waiting(tmp_path_factory):
    """By the folder of its labels, a function that copies a run which waits for them and returns its settings."""
    made = {}

    def copied(labels: str, root: Path):
        settings, rows = WAITS[labels]
        if labels not in made:
            config = config_for(tmp_path_factory.mktemp("waiting"), *settings)
            made[labels] = config, run_rlhf(config, **rows)
        config, result = made[labels]
        shutil.copytree(config.out, root / "run")
        return with_values(config, {"out": str(root / "run")}), result

    return copied


def test_a_round_waits_for_people_and_goes_on_where_it_was_moved(tmp_path, waiting, capsys):
    run = tmp_path / "run"
    config, result = waiting("labels-2", tmp_path)
    assert (len(result.rounds), result.summary["missing_labels"]) == (1, len(read_labels(run / "labels-2").items))
    assert waiting_for(run) == run / "labels-2"
    assert report_as_text(run).startswith("waiting for labels; PPO ran")
    assert collect_page([run])["title"] == "run: waiting for labels"
    assert not (run / "finished.json").exists()
    assert weights(run) == weights(run / "ppo")
    label(run / "labels-2", 1)
    capsys.readouterr()
    again = run_rlhf(config, **ROWS, resume=Resume())
    assert again.summary["missing_labels"] == result.summary["missing_labels"] - 1
    assert f"kedge label {run / 'labels-2'}" in "".join(capsys.readouterr())

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


def test_without_comparisons_the_first_round_waits_for_labels_of_the_sft_policy(tmp_path, waiting):
    run = tmp_path / "run"
    config, result = waiting("labels", tmp_path)
    items = read_labels(run / "labels").items
    assert (result.rounds, result.summary["missing_labels"]) == ([], len(items))
    assert {model for item in items.values() for model in item.models} == {"sft"}
    assert waiting_for(run) == run / "labels"
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


def test_fewer_labels_suffice_if_the_resumed_run_says_so(tmp_path, waiting):
    config, _ = waiting("labels-2", tmp_path)
    label(tmp_path / "run" / "labels-2", 2)
    result = run_rlhf(with_values(config, {"rlhf.min_labels": 2}), **ROWS, resume=Resume())
    assert len(result.rounds) == 2
    assert len(read_json_lines(tmp_path / "run" / "comparisons-2.jsonl")) <= 2


def test_answers_without_a_preference_are_an_error_that_labels_mend(tmp_path, waiting):
    config, _ = waiting("labels", tmp_path)
    folder = tmp_path / "run" / "labels"
    label(folder, verdict="bad", ranks=())
    with pytest.raises(RewardError, match=r"no answer in .*labels prefers a response"):
        run_rlhf(config, **FIRST, resume=Resume())
    labels = read_labels(folder)
    with AnswerFile(folder) as file:
        for item in labels.items.values():
            file.add(answer(labels, item.id, f"more-{item.id}", ranks=(1, 2, 3)[: len(item.responses)]))
    assert len(run_rlhf(config, **FIRST, resume=Resume()).rounds) == 1


class Killed(BaseException):
    pass


def killed_at(monkeypatch, name: str, call: int, config, rows) -> None:
    """Resume a run, and kill it at a call of a function."""
    calls: list[object] = []
    place, _, function = name.rpartition(".")
    original = getattr(importlib.import_module(place), function)

    def kill(*args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            raise Killed
        return original(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(name, kill)
        with pytest.raises(Killed):
            run_rlhf(config, **rows, resume=Resume())


@pytest.mark.parametrize("labels", WAITS)
def test_a_kill_before_the_labels_changes_nothing(tmp_path, monkeypatch, waiting, labels):
    settings, rows = WAITS[labels]
    whole, _ = waiting(labels, tmp_path / "whole")
    config = config_for(tmp_path, *settings)
    killed_at(monkeypatch, "kedge_people.rounds.write_items", 1, config, rows)
    assert run_rlhf(config, **rows, resume=Resume()).summary["missing_labels"]
    assert weights(tmp_path / "run") == weights(Path(whole.out))
    items = [(folder / labels / "items.jsonl").read_bytes() for folder in (tmp_path / "run", Path(whole.out))]
    assert items[0] == items[1]


@pytest.mark.parametrize("labels", WAITS)
def test_a_kill_after_the_labels_changes_nothing(tmp_path, monkeypatch, waiting, labels):
    rows = WAITS[labels][1]
    found = []
    for kills in ({}, {"write_rows": 1, "run_reward": 2 if labels == "labels-2" else 1}):
        config, _ = waiting(labels, tmp_path / f"{len(kills)}")
        label(Path(config.out) / labels)
        for name, call in kills.items():
            killed_at(monkeypatch, f"kedge.stages.rlhf.{name}", call, config, rows)
        assert "missing_labels" not in run_rlhf(config, **rows, resume=Resume()).summary
        found.append(weights(Path(config.out)))
    assert found[0] == found[1]


def test_the_command_ends_well_and_the_doctor_says_what_is_missing(tmp_path):
    settings, given = WAITS["labels"]
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
    assert "Waiting for labels: kedge label run/labels, then" in found.stdout
    label(tmp_path / "run" / "labels")
    written = forked_kedge("label", "run/labels", "--write", cwd=tmp_path)
    assert "Next:    kedge rlhf --resume run\n" in written.stdout
    assert "kedge reward" not in written.stdout
    resumed = forked_kedge("rlhf", "--resume", "run", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert (tmp_path / "run" / "finished.json").exists()

"""What people are asked: sampled and finished responses, without what is evaluated; and the command that serves it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import kedge.cli  # noqa: F401  # imports the commands, which import parts of it
from kedge.config import load_config
from kedge.stages.reward import run_reward
from kedge.stages.sft import run_sft
from kedge_base.errors import DataError, KedgeError
from kedge_people.assignments import read_assignments
from kedge_people.commands import label
from kedge_people.items import read_items, sample_items
from kedge_people.labels import Answer, AnswerFile, Item, read_labels, write_data_sets, write_items
from tests.forking import forked_kedge
from tests.people.test_server import answer, ask, give, send, serving
from tests.tiny import CHAT_TEMPLATE, save_tiny_policy, save_tiny_reward_model, tiny_tokenizer

GIVEN = {"num_prompts": 100, "num_responses": 2, "seed": 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("models")
    chat = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    return SimpleNamespace(
        first=str(save_tiny_policy(folder / "first", tokenizer=chat)),
        second=str(save_tiny_policy(folder / "second", seed=1, tokenizer=chat)),
        third=str(save_tiny_policy(folder / "third", seed=2, tokenizer=chat)),
    )


def rows(path: Path, given) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return str(path)


@pytest.fixture
def questions(tmp_path) -> str:
    asked = [{"messages": [{"role": "user", "content": f"question {number}"}]} for number in range(8)]
    return rows(tmp_path / "questions.jsonl", [*asked, asked[0]])


def config(prompts: str, *overrides: str):
    fixed = ["generate.max_new_tokens=6", "runtime.num_threads=1", "runtime.device=cpu"]
    return load_config(None, [*fixed, *overrides], {"data.prompts": [prompts]}, stage="generate")


def test_two_policies_meet_in_every_prompt_and_three_in_some(models, questions):
    two = sample_items(config(questions), [models.first, models.second], **GIVEN)
    assert [item.prompt[0]["content"] for item in two] == [f"question {number}" for number in range(8)]
    assert all(set(item.models) == {models.first, models.second} for item in two)
    assert len({item.models for item in two}) == 2, "either one can be first"
    assert len({item.id for item in two}) == 8
    assert two == sample_items(config(questions), [models.first, models.second], **GIVEN)
    three = sample_items(config(questions), list(vars(models).values()), **GIVEN)
    assert len({frozenset(item.models) for item in three}) == 3
    four = sample_items(config(questions), [models.first], **{**GIVEN, "num_responses": 4})
    assert {len(set(item.responses)) for item in four} == {4}


def test_prompts_are_drawn_each_once_and_not_those_of_an_evaluation(models, questions, tmp_path, capsys):
    evaluated = rows(tmp_path / "eval.jsonl", [{"prompt": " question\n0 "}, {"question": "question 1"}, "question 2"])
    told = [{"messages": [{"role": "user", "content": "question 3"}, {"role": "assistant", "content": "yes"}]}]
    called = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [{"name": "look"}]}]
    more = rows(tmp_path / "more.jsonl", [*told, {"messages": called}])
    given = {**GIVEN, "num_prompts": 3, "not_in": [evaluated, more]}
    items = sample_items(config(questions), [models.first], **given)
    assert len(items) == 3
    assert {item.prompt[0]["content"] for item in items} <= {f"question {number}" for number in range(4, 8)}
    assert "Prompts in the data of --not-in are left out: 4" in capsys.readouterr().err
    with pytest.raises(DataError, match="all prompts are in the data of --not-in"):
        sample_items(config(questions), [models.first], **{**GIVEN, "not_in": [questions]})


ALPACA = [{"instruction": "Add.", "input": f"{number} and 1"} for number in range(4)]
PAIRS = [
    {
        name: [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": name}]
        for name in ("chosen", "rejected")
    }
    for number in range(4)
]


@pytest.mark.parametrize(
    ("asked", "evaluated", "fields"),
    [
        (ALPACA, ALPACA, ()),
        ([{"prompt": f"Text {number}. Who wrote it?", "question": "Who wrote it?"} for number in range(4)], None, ()),
        ([{"asked": f"q{number}"} for number in range(4)], None, ["data.columns.prompt=asked"]),
        ([{"conversations": [{"from": "human", "value": f"q{number}"}]} for number in range(4)], None, ()),
        ([{"prompt": f"q{number}"} for number in range(4)], PAIRS, ()),
    ],
    ids=["Alpaca", "a column alike", "a column's name", "ShareGPT", "pairs"],
)
def test_prompts_of_every_form_differ_and_are_known_in_an_evaluation(models, tmp_path, asked, evaluated, fields):
    given = config(rows(tmp_path / "asked.jsonl", asked), *fields)
    assert len(sample_items(given, [models.first], **GIVEN)) == 4
    others = evaluated or [{**row, "question": ""} for row in asked]
    not_in = rows(tmp_path / "eval.jsonl", others[:3])
    [item] = sample_items(given, [models.first], **GIVEN, not_in=[not_in])
    assert "3" in str(item.prompt)


def test_a_question_about_many_finished_texts_is_many_prompts(tmp_path):
    asked = [{"prompt": f"Text {n}. Who?", "question": "Who?", "responses": ["a", "b"]} for n in range(4)]
    assert len(read_items([rows(tmp_path / "r.jsonl", asked)], **GIVEN)) == 4


def test_equal_responses_are_nothing_to_compare(models, questions):
    with pytest.raises(DataError, match="two different responses"):
        sample_items(config(questions, "generate.temperature=0"), [models.first], **GIVEN)
    single = sample_items(config(questions), [models.first], **{**GIVEN, "num_responses": 1})
    assert {len(item.responses) for item in single} == {1}


def test_posts_keep_their_columns(models, tmp_path):
    post = {"subreddit": "sail", "title": "Rope", "post": "It broke."}
    posts = rows(tmp_path / "posts.jsonl", [{**post, "summary": "broke", "extra": 1}])
    [item] = sample_items(config(posts, "data.template=tldr"), [models.first], **GIVEN)
    assert item.columns == post
    assert item.prompt.startswith("SUBREDDIT: r/sail")


def test_finished_responses_to_the_same_prompt_are_compared(tmp_path):
    first = rows(tmp_path / "first.jsonl", [{"prompt": f"p{n}", "completion": f"first {n}"} for n in range(3)])
    chat = [{"role": "user", "content": "hi"}]
    second = rows(
        tmp_path / "second.jsonl",
        [
            {"prompt": "p0", "completion": "second 0", "model": "m"},
            {"prompt": "p1", "completion": "first 1"},
            {"prompt": "p2", "responses": ["x", "y", "x", " "], "models": ["a", "b", "c", "d"], "post": "long"},
            {"prompt": chat, "chosen": [{"role": "assistant", "content": "good"}], "rejected": "bad"},
            {"prompt": "<|user|>\nhi", "messages": chat, "completions": ["one", "two"]},
        ],
    )
    items = read_items([first, second], **{**GIVEN, "num_responses": 3})
    found = {json.dumps(item.prompt): dict(zip(item.responses, item.models, strict=True)) for item in items}
    assert found == {
        '"p0"': {"first 0": first, "second 0": "m"},
        '"p2"': {"first 2": first, "x": "a", "y": "b"},
        json.dumps(chat): items and found[json.dumps(chat)],
    }
    assert len(found[json.dumps(chat)]) == 3
    assert set(found[json.dumps(chat)]) <= {"good", "bad", "one", "two"}


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"completion": "x"}, "1: the row has no prompt"),
        ({"prompt": "x"}, "1: the row has no responses"),
        ({"prompt": "x", "responses": ["a", 7]}, "1: the row has no responses"),
        ({"prompt": "x", "responses": ["a", "b"], "models": ["m"]}, "1: 'models' must be a list of 2 names"),
        ({"prompt": "x", "responses": ["a", "b"], "models": 7}, "1: 'models' must be a list of 2 names"),
        ({"prompt": "x", "responses": "ab"}, "1: 'responses' must be a list of texts"),
        ({"prompt": "x", "completions": 7}, "1: 'responses' must be a list of texts"),
        ("text", "1: not a JSON object"),
    ],
)
def test_rows_that_cannot_be_labeled_are_named(tmp_path, row, fault):
    with pytest.raises(DataError, match=fault):
        read_items([rows(tmp_path / "rows.jsonl", [row])], **GIVEN)


def test_what_people_answer_trains_a_reward_model_and_a_policy(models, questions, tmp_path):
    items = sample_items(config(questions), [models.first, models.second], **GIVEN)
    folder = tmp_path / "labels"
    folder.mkdir()
    with serving(folder, ["ana"], items=items) as server:
        for number in range(8):
            texts = {"edits": [f"fixed {number}", None]} if number % 2 else {"thumbs": [1, -1]}
            give(server, "ana", f"answer-{number}", **texts)
    write_data_sets(folder)
    given = ["runtime.num_threads=1", "runtime.device=cpu", "runtime.report=false", f"model={models.first}"]
    trained = run_reward(
        load_config(
            None,
            [*given, "num_epochs=1", f"out={tmp_path / 'reward'}", f"data.comparisons={folder / 'comparisons.jsonl'}"],
            stage="reward",
        )
    )
    assert (
        json.loads((trained.folder / "data.json").read_text())["comparisons"]["used"] == 12
    )  # 8 rankings, 4 corrections
    tuned = run_sft(
        load_config(
            None,
            [
                *given,
                "num_epochs=1",
                f"out={tmp_path / 'sft'}",
                f"data.demonstrations={folder / 'demonstrations.jsonl'}",
            ],
            stage="sft",
        )
    )
    assert json.loads((tuned.folder / "data.json").read_text())["demonstrations"]["used"] == 8


def test_prompts_without_enough_different_responses_are_counted(tmp_path, monkeypatch, capsys):
    finished = [["a", "b", "c"], ["a", "a", "b"], ["c", "b", "a"]]
    rows(tmp_path / "finished.jsonl", [{"prompt": str(n), "responses": each} for n, each in enumerate(finished)])
    monkeypatch.setattr("kedge_people.commands._serve", lambda *_: None)
    scorer = str(save_tiny_reward_model(tmp_path / "scorer"))
    given = {"responses_from": [str(tmp_path / "finished.jsonl")], "select": "gap", "scorer": [scorer]}
    with pytest.raises(KedgeError, match="no prompt has 4 different responses"):
        label(**given, out=str(tmp_path / "none"), responses=4)
    assert not (tmp_path / "none").exists()
    label(**given, out=str(tmp_path / "new"), responses=3)
    assert len(read_labels(tmp_path / "new").items) == 2
    assert "2 of 3 prompts: only these have 3 different responses" in capsys.readouterr().err


def test_answers_that_a_round_has_taken_are_named_when_they_are_withdrawn(tmp_path, capsys):
    folder = tmp_path / "run" / "labels-2"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("# stage: rlhf\n")
    rows(tmp_path / "run" / "comparisons.jsonl", [{"prompt": "p", "label": {"person": "ana"}}])
    rows(tmp_path / "run" / "comparisons-2.jsonl", [{"prompt": "p"}, {"prompt": "p", "label": {"person": "ana"}}])
    write_items(folder, [Item("1", "p", ("a", "b"), ("m", "m"))])
    with AnswerFile(folder) as file:
        for person in ("ana", "ben"):
            file.add(Answer(f"{person}-1", "1", person, "2026-01-01T00:00:00Z", 1.0, (0, 1), "ranked", (1, 2)))
    label([str(folder)], withdraw="ben", runs=tmp_path)
    assert "still has" not in capsys.readouterr().out
    label([str(folder)], withdraw="ana", runs=tmp_path)
    said = capsys.readouterr().out
    assert f"{tmp_path / 'run' / 'comparisons-2.jsonl'} still has their answers" in said
    assert "comparisons.jsonl still" not in said


MISTAKES = [
    ({}, "--out is needed"),
    ({"out": "new"}, "give models that answer the prompts"),
    ({"sources": ["m"], "responses_from": ["f"], "out": "new"}, "give models that answer the prompts"),
    ({"sources": ["m"], "out": "new"}, "models need --prompts"),
    ({"responses_from": ["f"], "prompts": ["p"], "out": "new"}, "--prompts needs a model"),
    ({"sources": ["m"], "prompts": ["questions.jsonl"], "out": "new"}, "model 'm': no such folder"),
    ({"sources": ["labels"], "overlap": 0.5}, "leave out --overlap"),
    ({"sources": ["labels", "generate.temperature=1"]}, "leave out FIELD=VALUE"),
    ({"sources": ["labels"], "out": "new"}, "leave out --out"),
    ({"sources": ["m"], "write": True}, "--write needs a folder of labels"),
    ({"sources": ["labels"], "people": "ana,"}, "'' is not a name"),
    ({"sources": ["labels"], "report": True, "people": "ana"}, "--report serves no page: leave out --people"),
    ({"sources": ["labels"], "write": True, "port": 0}, "--write serves no page: leave out --port"),
    ({"sources": ["labels"], "withdraw": "zoe"}, "--withdraw zoe: no answer is theirs"),
    ({"sources": ["m"], "prompts": ["p"], "out": "labels"}, "labels is not empty"),
    ({"sources": ["m"], "prompts": ["p"], "out": "new", "scorer": ["r"]}, "--scorer needs --select"),
    ({"sources": ["m"], "prompts": ["questions.jsonl"], "out": "new", "select": "gap"}, "model 'm': no such folder"),
    ({"responses_from": ["questions.jsonl"], "out": "new", "select": "gap"}, "--select gap needs --scorer"),
    (
        {"responses_from": ["questions.jsonl"], "out": "new", "select": "gap", "scorer": ["labels"], "responses": 1},
        "--responses must be at least 2",
    ),
    ({"sources": ["labels"], "trace": "zoe"}, "zoe"),
    ({"sources": ["m"], "prompts": ["p"], "out": "new", "axes": "a/b"}, "--axes: 'a/b'"),
]


@pytest.mark.parametrize(("given", "fault"), MISTAKES)
def test_mistakes_are_one_line_and_leave_nothing(questions, tmp_path, monkeypatch, given, fault):
    monkeypatch.chdir(tmp_path)
    rows(tmp_path / "finished.jsonl", [{"prompt": "p", "responses": ["a", "b"]}])
    with serving_folder(tmp_path / "labels"), pytest.raises(KedgeError, match=fault):
        label(**given)
    assert not Path("new").exists()


def serving_folder(folder: Path):
    folder.mkdir()
    return serving(folder)


def test_the_command_serves_and_continues(models, questions, tmp_path):
    def run(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kedge", "label", *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)

    def links(process: subprocess.Popen[str], count: int) -> SimpleNamespace:
        assert process.stdout is not None
        urls = dict(process.stdout.readline().strip().split(": ", 1) for _ in range(count))
        assert "Only this machine" in process.stdout.readline()
        port = int(next(iter(urls.values())).split("/")[2].split(":")[1])
        return SimpleNamespace(urls=urls, port=port)

    def end(process: subprocess.Popen[str], signum: int = signal.SIGINT) -> str:
        process.send_signal(signum)
        out, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
        return out

    first = run(
        *(models.first, "generate.max_new_tokens=6", "runtime.device=cpu", "--prompts", questions, "--out", "out"),
        *("--people", "ana", "--axes", "stiennon", "--num-prompts", "6", "--repeats", "0", "--seed", "4"),
    )
    server = links(first, 1)
    assert ask(server, "ana")["axes"] == ["overall", "accuracy", "coverage", "coherence"]
    state = give(server, "ana", "answer-1", ranks=[1, 1], edits=["fixed", None])
    assert state["total"] == 6
    out = end(first)
    assert "Answers in out: ana 1\n" in out
    assert f"kedge reward --model {models.first} --comparisons out/comparisons.jsonl reward_model.ties=davidson" in out
    assert f"kedge sft --model {models.first} --demonstrations out/demonstrations.jsonl" in out
    assert read_assignments(tmp_path / "out").seed == 4
    second = run("out", "--people", "ben")
    both = links(second, 2)
    assert both.urls["ana"] == server.urls["ana"]
    assert ask(both, "ana", 0)["question"] == state["question"]
    assert send(both, "ben", "answer", answer(ask(both, "ben")))[0] == 200
    assert "Answers in out: ana 1, ben 1\n" in end(second, signal.SIGTERM)
    assert len((tmp_path / "out" / "comparisons.jsonl").read_text().splitlines()) == 3
    assert [each.person for each in read_labels(tmp_path / "out").answers] == ["ana", "ben"]
    written = forked_kedge("label", "out", "--write", cwd=tmp_path)
    assert "Answers in out: ana 1, ben 1" in written.stdout
    assert len((tmp_path / "out" / "comparisons.jsonl").read_text().splitlines()) == 3


def test_a_folder_is_reported_traced_and_withdrawn_from(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "labels"
    with serving_folder(folder) as server:
        for person in ("ana", "ben"):
            for number in range(6):
                give(server, person, f"answer-{number}")
    label([str(folder)], report=True)
    assert (folder / "labels.html").is_file()
    assert "12 answers by 2 people" in capsys.readouterr().out
    label([str(folder)], trace="ana-answer-1")
    label([str(folder)], trace="ben")
    assert "ana-answer-1" in capsys.readouterr().out
    label([str(folder)], withdraw="ben")
    out = capsys.readouterr().out
    assert f"Answers in {folder}: ana 6\n" in out
    assert {answer.person for answer in read_labels(folder).answers} == {"ana"}
    assert len((folder / "comparisons.jsonl").read_text().splitlines()) == 6


def test_the_responses_to_compare_are_selected(models, questions, tmp_path, monkeypatch):
    scorer = str(save_tiny_reward_model(tmp_path / "scorer", tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE)))
    served: list[Path] = []
    monkeypatch.setattr("kedge_people.commands._serve", lambda folder, *_: served.append(folder))
    given = {"prompts": [questions], "out": str(tmp_path / "out"), "num_prompts": 3, "responses": 3}
    fields = ["generate.max_new_tokens=6", "runtime.device=cpu", "runtime.num_threads=1"]
    label([models.first, *fields], **given, select="gap", scorer=[scorer])
    [folder] = served
    items = read_labels(folder).items.values()
    assert [len(set(item.responses)) for item in items] == [3, 3, 3]
    assert (folder / "assignments.json").is_file()


def test_judges_answer_their_share_once(tmp_path, monkeypatch, capsys):
    asked: list[str] = []

    class Judge:
        def __init__(self, name: str, *, file: str, limits: dict, **_: object) -> None:
            assert name == JUDGE
            assert Path(file).parent == folder
            assert limits["max_requests"] == 50

        def rank(self, prompt, responses):
            if len(asked) == 3:
                raise KeyboardInterrupt
            asked.append(prompt)
            return [2.0, 1.0]

    checked: list[str] = []
    monkeypatch.setattr("kedge_tasks.judge.Judge", Judge)
    monkeypatch.setattr("kedge.runs.judges.check_judge", lambda name, config: checked.append(name))
    folder = tmp_path / "labels"
    with serving_folder(folder):
        pass
    (folder / "assignments.json").unlink()
    label([str(folder), "judge.max_requests=50"], people=JUDGE)
    asked.clear()
    label([str(folder), "judge.max_requests=50"])
    assert checked == [JUDGE]
    found = read_labels(folder).answers
    assert [each.item for each in found] == list(read_labels(folder).items), "the second call went on"
    assert {each.ranks for each in found} == {(2.0, 1.0)}
    assert {each.person for each in found} == {JUDGE}
    assert f"Answers in {folder}: {JUDGE} 6" in capsys.readouterr().out


def test_an_item_without_a_usable_answer_of_a_judge_is_skipped(tmp_path, monkeypatch):
    class Judge:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def rank(self, prompt, responses):
            return None

    monkeypatch.setattr("kedge_tasks.judge.Judge", Judge)
    monkeypatch.setattr("kedge.runs.judges.check_judge", lambda name, config: None)
    folder = tmp_path / "labels"
    with serving_folder(folder):
        pass
    (folder / "assignments.json").unlink()
    for _ in range(2):
        label([str(folder)], people=JUDGE)
    found = read_labels(folder)
    assert [(each.verdict, each.ranks) for each in found.answers] == [("skipped", ())] * len(found.items)


JUDGE = "openai:org/llama3:8b@http://127.0.0.1:8000/v1"

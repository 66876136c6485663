"""The examples: their files fit each other, and they run, here with a tiny model."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
from pathlib import Path

import pytest

import kedge
from kedge.config import load_config
from kedge.stages.ppo import run_ppo
from kedge_base.run_folder.record_format import EVALUATIONS_FILE, read_json_lines
from kedge_tasks.environments.client import Environment
from kedge_tasks.verify import code
from tests.tiny import CHAT_TEMPLATE, save_tiny_policy, tiny_tokenizer

ROOT = Path(__file__).parents[1]
BRIEF = Path("examples/brief")
GUESS = ROOT / "examples/guess/guess.py"
GRID = ROOT / "examples/grid/grid.py"
CALCULATOR = ROOT / "examples/calculator/calculator.py"
PROGRAMS = ROOT / "examples/programs/tasks.py"
FEW = {"sft.num_epochs": 1, "report": False}


def subjects(name: str) -> set[str]:
    """What the questions of a file are about."""
    patterns = r"for|about|explain"
    rows = [json.loads(line)["prompt"][0]["content"] for line in (ROOT / BRIEF / name).read_text().splitlines()]
    return {
        re.split(rf" (?:{patterns}) ", row, maxsplit=1)[1].split("?")[0].removesuffix(" to a child") for row in rows
    }


def test_the_held_out_questions_are_about_other_subjects():
    trained, held_out = subjects("prompts.jsonl"), subjects("held_out.jsonl")
    assert (len(trained), len(held_out)) == (40, 12)
    assert not trained & held_out


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Swimming keeps you fit.", "right"),
        (" It is fun!\n", "right"),
        ("one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen.", "right"),
        (
            "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen.",
            "too long",
        ),
        ("Two words.", "too short"),
        ("Swimming keeps you fit", "not finished"),
        ("Swimming keeps you fit. It is fun.", "several sentences"),
        ("Swimming\nkeeps you fit.", "several sentences"),
        ("", "not finished"),
    ],
)
def test_one_short_sentence(text, reason):
    assert runpy.run_path(str(ROOT / BRIEF / "reward.py"))["one_short_sentence"]([text]) == [
        {"score": float(reason == "right"), "reason": reason}
    ]


def test_the_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    policy = save_tiny_policy(tmp_path / "policy", tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE))
    small = ["num_updates=2", "eval_every=1", "ppo.eval_every.num_prompts=3", "max_new_tokens=6"]
    flags = {"model": str(policy), "out": str(tmp_path / "run")}
    run_ppo(load_config(BRIEF / "run.yaml", small, flags, stage="ppo"))
    rows = read_json_lines(tmp_path / "run" / EVALUATIONS_FILE)
    assert [(row["update"], len(row["responses"])) for row in rows] == [(0, 3), (1, 3), (2, 3)]
    assert all(response["reason"] for row in rows for response in row["responses"])


def run_small(example: str, folder: Path, prompts: str, *settings: str):
    """An update by an example's `run.yaml`, on the first rows of a file that its script has written."""
    few = folder / f"few_{prompts}"
    few.write_text("".join((folder / prompts).read_text().splitlines(keepends=True)[:64]))
    data = [f"data.prompts={few}", f"data.eval_prompts={few}"]
    flags = {"model": str(folder / "start"), "out": str(folder / "run")}
    small = ["num_updates=1", "num_prompts=8", "ppo.eval_every.num_prompts=8", *data, *settings]
    return run_ppo(load_config(Path(example) / "run.yaml", small, flags, stage="ppo"))


@pytest.mark.parametrize(
    ("most", "in_turns"), [(15, [1, *[2] * 2, *[3] * 4, *[4] * 8]), (31, [1, *[2] * 2, *[3] * 4, *[4] * 8, *[5] * 16])]
)
def test_halving_finds_every_number_up_to_a_power_of_two(most, in_turns):
    game = runpy.run_path(str(GUESS))["Guess"]()
    turns = []
    for secret in range(1, most + 1):
        game.secret = secret
        low, high = 1, most
        count = 1
        while not (step := game.step(str((low + high) // 2))).terminated:
            assert step.reward == 0
            middle = (low + high) // 2
            low, high = (middle + 1, high) if step.messages == "higher" else (low, middle - 1)
            count += 1
        assert step.reward == 1
        turns.append(count)
    assert sorted(turns) == in_turns


def test_the_turns_are_enough_to_find_every_number_but_those_of_the_largest_range():
    games = runpy.run_path(str(GUESS))["GAMES"]
    found = {name: [2 ** game["turns"] > most for most in game["ranges"]] for name, game in games.items()}
    assert found == {
        "guess": [True],
        "ranges": [True, True, True, True, False],
        "numbered": [True, True, True, True, False],
        "liar": [True],
        "tens": [True, True, False, False],
    }


@pytest.mark.parametrize("name", ["guess", "ranges"])
def test_careless_games_keep_the_rules(name):
    example = runpy.run_path(str(GUESS))
    most, turns = max(example["GAMES"][name]["ranges"]), example["GAMES"][name]["turns"]
    for number in range(200):
        _, *texts = example["careless_game"](f"game {number}", example["prompt_row"](most), turns)
        guesses = [int(turn["content"]) for turn in texts[::2]]
        answers = [*(turn["content"] for turn in texts[1::2]), None]
        assert 1 <= len(guesses) <= turns
        possible = set(range(1, most + 1))
        for guess, answer in zip(guesses, answers, strict=True):
            if answer:
                possible &= {each for each in possible if (each > guess) == (answer == "higher") and each != guess}
        assert possible
        assert guesses[-1] in possible or len(guesses) == turns


def test_the_guess_that_recorded_runs_started_from_is_made_of_the_same_games():
    example = runpy.run_path(str(GUESS))
    games = [example["careless_game"](f"game {number}", example["prompt_row"](15), 4) for number in range(12_000)]
    digest = hashlib.sha256(json.dumps(games).encode()).hexdigest()
    assert digest[:12] == "5c0e8cdfa55e"


def test_a_liar_lies_as_often_as_the_row_says():
    game = runpy.run_path(str(GUESS))["Guess"]()
    told = []
    for seed in range(200):
        game.reset({"most": 63, "lies": 0.1}, seed)
        told += [game.step("0").messages == "lower" for _ in range(7)]
    assert sum(told) / len(told) == pytest.approx(0.1, abs=0.02)  # 1,400 draws: 2.5 standard errors


def test_careless_games_go_on_after_a_lie():
    example = runpy.run_path(str(GUESS))
    row = example["prompt_row"](63, lies=0.5)
    games = [example["careless_game"](f"game {number}", row, 7) for number in range(100)]
    assert {len(messages) for messages in games} <= {2 * turn for turn in range(1, 8)}


def test_the_steps_that_are_left_on_the_grids():
    example = runpy.run_path(str(GRID))
    windy, maze = (tuple(example["GAMES"][name]["map"]) for name in ("windy", "maze"))
    left = example["steps_left"](windy)
    assert left == {((row, column), key): row + 4 - column for row in range(5) for column in range(5) for key in (0, 1)}
    # To the key: 35, 34, 33, 32, 31, 21, 11, 12, 13; back to 33; then 43, 53, 54.
    left = example["steps_left"](maze)
    assert (left[(4, 2), False], left[(2, 0), True], left[(2, 2), True]) == (8 + 6 + 3, 6 + 3, 3)
    starts = {left[at, False] for at, key in left if not key and left[at, False] >= 15}
    assert (min(starts), max(starts)) == (15, 19)
    game = example["Grid"]()
    assert {game.reset(example["prompt_row"]("maze"), seed) for seed in range(100)} == {"15", "25", "33", "34", "35"}


def test_a_walk_through_the_maze():
    example = runpy.run_path(str(GRID))
    game = example["Grid"]()
    game.reset(example["prompt_row"]("maze"), 0)
    game.at = (2, 2)
    assert game.step("r").messages == game.step("?").messages == "33"  # a closed door, and no direction
    said = [game.step(move) for move in "uulldd"]
    assert [each.messages for each in said] == ["32", "31", "21", "11", "12", "13 key"]
    for move in "uurrddr":
        assert game.step(move).reward == 0
    assert game.seen() == "43 key"
    assert game.step("r").messages == "53 key"
    last = game.step("d")
    assert last.terminated
    assert last.reward == 1


def test_gusts_push_one_cell_down():
    example = runpy.run_path(str(GRID))
    game, row = example["Grid"](), example["prompt_row"]("windy")
    pushed = []
    for seed in range(2000):
        game.reset(row, seed)
        game.at = (2, 2)
        pushed.append({"23": 0, "24": 1}[game.step("l").messages])
    assert sum(pushed) / len(pushed) == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("name", ["windy", "maze", "corridor", "vault"])
def test_careless_walks_keep_the_rules(name):
    example = runpy.run_path(str(GRID))
    row, about = example["prompt_row"](name), example["GAMES"][name]
    for number in range(100):
        opening, *texts = example["careless_game"](f"game {number}", row, about["turns"], 0.5)
        game = example["Grid"]()
        assert opening["content"] == f"{row['prompt'][0]['content']}\n{game.reset(row, f'game {number}')}"
        steps = [game.step(turn["content"]) for turn in texts[::2]]
        assert [step.messages for step in steps[:-1]] == [turn["content"] for turn in texts[1::2]]
        assert steps[-1].terminated or len(steps) == about["turns"]


@pytest.mark.parametrize(("name", "turns"), [("windy", 10), ("maze", 24)])
def test_the_walks_run(name, turns, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(GRID))["main"](tmp_path, 64, game=name, **FEW)
    result = run_small(f"examples/{name}", tmp_path, "games.jsonl")
    for row in result.metrics:
        assert row["episode/completed"] + row["episode/max_turns"] == pytest.approx(1)
        assert row["episode/completed"] == pytest.approx(row["score/Grid"])
        assert 1 <= row["episode/turns"] <= turns


@pytest.mark.parametrize(("name", "turns"), [("guess", 4), ("ranges", 5), ("liar", 7)])
def test_the_guessing_game_runs(name, turns, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(GUESS))["main"](tmp_path, 64, game=name, **FEW)
    result = run_small(f"examples/{name}", tmp_path, "games.jsonl")
    for row in result.metrics:
        assert row["episode/completed"] + row["episode/max_turns"] == pytest.approx(1)
        assert row["episode/completed"] == pytest.approx(row["score/Guess"])  # what is found is paid
        assert 1 <= row["episode/turns"] <= turns


def test_the_calculator_answers_a_demonstrated_call():
    example = runpy.run_path(str(CALCULATOR))
    environment = Environment(f"{CALCULATOR}:Calculator")
    try:
        environment.open({0: ({}, 0)})
        [turn] = environment.step({0: example["call"](37, 64)}).values()
        assert (turn.messages[0]["content"], turn.ending) == ("2368", None)
        assert environment.step({0: "2368"})[0].ending == "completed"
    finally:
        environment.close()
    texts = ['<multiply>{"a": 37, "b": 64}</multiply>2368\n2368', "2368", "2367", "2368\n", ""]
    assert example["right"](texts, ["2368"] * 5) == [1, 1, 0, 0, 0]


def test_the_calculator_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(CALCULATOR))["main"](tmp_path, 64, **FEW)
    result = run_small("examples/calculator", tmp_path, "prompts.jsonl")
    for row in result.metrics:
        assert 0 <= row["score/right"] <= 1
        assert 1 <= row["episode/turns"] <= 2


def test_the_agent_calls_its_tool():
    pytest.importorskip("openai")
    environment = Environment(f"{ROOT}/examples/agent/agent.py:run")
    row = {"messages": [{"role": "user", "content": "37*64="}], "answer": "2368"}
    try:
        [opened] = environment.open({0: (row, 0)}).values()
        assert opened.context == row["messages"]
        call = runpy.run_path(str(CALCULATOR))["call"](37, 64)
        assert environment.step({0: call})[0].context[1:] == [
            {"role": "assistant", "content": call, "answer": 0},
            {"role": "tool", "name": "multiply", "content": "2368"},
        ]
        wrong = environment.step({0: "<multiply>{}</multiply>"})[0].context[-1]
        assert wrong["content"].startswith("Error: multiply() missing 2 required")
        last = environment.step({0: "2368"})[0]
        assert (last.ending, last.rewards) == ("completed", [0, 0, 1])
    finally:
        environment.close()


def test_the_agent_runs(tmp_path, monkeypatch):
    pytest.importorskip("openai")
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(CALCULATOR))["main"](tmp_path, 64, **FEW)
    result = run_small("examples/agent", tmp_path, "prompts.jsonl")
    for row in result.metrics:
        assert 0 <= row["score/run"] <= 1
        assert 1 <= row["episode/turns"] <= 2
        assert row["policy/first_ratio_max"] == pytest.approx(1, abs=1e-3)


def test_the_programs_to_write_have_tests_that_a_right_one_passes(tmp_path):
    runpy.run_path(str(PROGRAMS))["main"](tmp_path)
    trained, held_out = (read_json_lines(tmp_path / f"{name}.jsonl") for name in ("prompts", "held_out"))
    assert (len(trained), len(held_out)) == (133, 44)
    assert not {row["kind"] for row in trained} & {row["kind"] for row in held_out}
    tests = {
        re.findall(r"function (\w+)", row["prompt"][0]["content"])[0]: row["test_list"] for row in trained + held_out
    }
    assert len(tests) == 177
    written = {
        "distance_to_7": "def distance_to_7(x): return max(x - 7, 7 - x)",
        "first_3_multiples": "def first_3_multiples(x): return [x, x + x, x + x + x]",
        "is_palindrome": "def is_palindrome(s): return all(a == b for a, b in zip(s, reversed(s)))",
        "count_above_2": "def count_above_2(a):\n  n = 0\n  for x in a:\n    if x > 2: n += 1\n  return n",
        "spread": "def spread(a): return sorted(a)[-1] - sorted(a)[0]",
        "sort_down": "def sort_down(a): return a",
        "append_5": "def append_5(a): return a + [6]",
    }
    scores = code(list(written.values()), test_list=[tests[name] for name in written], sandbox="none")
    assert [float(each) for each in scores] == [1, 1, 1, 1, 1, 0, 0]


def test_learning_to_write_programs_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(PROGRAMS))["main"](tmp_path)
    save_tiny_policy(tmp_path / "start", tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE))
    result = run_small(
        "examples/programs", tmp_path, "held_out.jsonl", "max_new_tokens=6", "reward_functions.retries=0"
    )
    assert [row["score/code"] for row in result.metrics] == [0]


def test_learning_sums_runs(tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(ROOT)
    policy = save_tiny_policy(tmp_path / "policy", tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE))
    small = ["num_updates=2", "num_prompts=4", "num_responses=2", "eval_every=1", "ppo.eval_every.num_prompts=3"]
    flags = {"model": str(policy), "out": str(tmp_path / "run")}
    run_ppo(load_config(Path("examples/sums/run.yaml"), small, flags, stage="ppo"))
    rows = read_json_lines(tmp_path / "run" / EVALUATIONS_FILE)
    assert [(row["update"], len(row["responses"])) for row in rows] == [(0, 3), (1, 3), (2, 3)]
    assert all("final answer" in response["prompt"] for row in rows for response in row["responses"])


NOTES = ROOT / "examples/notes/notes.py"


def test_a_game_of_notes_is_won_by_noting_the_larger_number():
    """And by nothing less: the largest number of 16 is seldom the last."""
    example = runpy.run_path(str(NOTES))
    won = {"larger": 0, "next": 0}
    for seed in range(40):
        for way in won:
            game = example["Notes"]()
            note, seen = "0", game.reset({}, seed)
            for _ in range(example["NUMBERS"]):
                noted, shown = (int("".join(filter(str.isdigit, part))) for part in seen.split("Next"))
                note = str(max(noted, shown) if way == "larger" else shown)
                step = game.step(note)
                seen = step.context
            assert step.terminated
            won[way] += step.reward
    assert won["larger"] == 40
    assert won["next"] < 20


def test_notes_are_learned(tmp_path):
    """A small start, and two updates of it: each turn reads a context of its own."""
    example = runpy.run_path(str(NOTES))
    example["main"](tmp_path, num_turns=400, num_epochs=1)
    rows = read_json_lines(tmp_path / "games.jsonl")
    settings = {"environment.max_turns": 16, "max_turn_tokens": 3, "max_new_tokens": 400, "kl_coef": 0.0}
    result = kedge.ppo(
        model=tmp_path / "start", prompts=rows, environment=example["Notes"], out=tmp_path / "ppo", num_prompts=4,
        num_updates=2, missing_eos_score=None, **settings,
    )  # fmt: skip
    for row in result.metrics:
        assert row["episode/contexts"] == 16
        assert row["policy/first_ratio_max"] == pytest.approx(1, abs=1e-3)

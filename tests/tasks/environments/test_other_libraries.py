"""The adapters of docs/episodes.md, with the real packages where they are installed."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from kedge_tasks.environments.client import Environment

PAGE = Path(__file__).parents[3] / "docs" / "episodes.md"
LISTINGS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def adapter(tmp_path):
    """The environment of a listing, by the class that it defines, in a worker process."""
    started = []

    def start(name, instead=("", "")):
        [listing] = [each for each in LISTINGS if f"class {name}:" in each or f"def {name}(row, client)" in each]
        file = tmp_path / f"{name.lower()}_adapter.py"
        file.write_text(listing.replace(*instead), encoding="utf-8")
        started.append(Environment(f"{file}:{name}", timeout=60.0))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_the_game_of_the_page(adapter):
    game = adapter("Guess")
    assert game.open({1: ({}, 3)})[1].messages[0]["content"] == "Guess my number, from 1 to 10."
    secret = random.Random(3).randint(1, 10)
    assert game.step({1: f"Is it {secret - 1}?"})[1].messages[0]["content"] == "Higher."
    turn = game.step({1: str(secret)})[1]
    assert (turn.reward, turn.ending) == (1.0, "completed")


def test_the_tools_of_the_page(adapter):
    calculator = adapter("Calculator")
    calculator.open({1: ({"answer": 6}, 0)})
    turn = calculator.step({1: '<multiply>{"a": 2, "b": 3}</multiply>'})[1]
    assert [message["content"] for message in turn.messages] == ["6"]
    turn = calculator.step({1: "It is 6."})[1]
    assert (turn.reward, turn.ending) == (1.0, "completed")


def test_the_agent_of_the_page(adapter):
    pytest.importorskip("openai")
    pytest.importorskip("aiohttp")
    agent = adapter("run")
    agent.open({1: ({"question": "2 + 2?", "answer": "4"}, 0)})
    second = agent.step({1: "Count."})[1]
    assert second.context == [{"role": "user", "content": "2 + 2? Notes: Count. Answer:"}]
    assert second.max_tokens == 20
    turn = agent.step({1: "It is 4."})[1]
    assert (turn.rewards, turn.ending) == ([0.0, 1.0], "completed")


TASKSET = """
class Product(vf.TaskData):
    answer: str


class Multiply(vf.Task[Product]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


tasks = [Multiply(Product(idx=0, prompt="37*64=", answer="2368"))]
"""


def test_verifiers(adapter):
    pytest.importorskip("verifiers.v1", exc_type=ImportError)
    pytest.importorskip("aiohttp")
    loading = 'tasks = list(vf.load_taskset(taskset_config_type("my-taskset")(id="my-taskset")))\n'
    agent = adapter("rollout", (loading, TASKSET))
    opened = agent.open({number: ({"task": 0}, 0) for number in (1, 2)})
    assert [turn.context for turn in opened.values()] == [[{"role": "user", "content": "37*64="}]] * 2
    turns = agent.step({1: "2368", 2: "2367"})
    assert {number: (turn.rewards, turn.ending) for number, turn in turns.items()} == {
        1: ([1.0], "completed"),
        2: ([0.0], "completed"),
    }


def test_gymnasium(adapter):
    pytest.importorskip("gymnasium")
    lake = adapter("Lake")
    assert "Walk to G" in lake.open({1: ({}, 0)})[1].messages[0]["content"]
    turns = [lake.step({1: f"I go {word}."})[1] for word in ("down", "down", "right", "right", "down", "right")]
    assert [turn.reward for turn in turns] == [0.0] * 5 + [1.0]
    assert [turn.ending for turn in turns] == [None] * 5 + ["completed"]
    lake.open({1: ({}, 0)})
    lake.step({1: "down"})
    assert lake.step({1: "right"})[1].ending == "completed"  # into a hole


def test_textarena(adapter):
    pytest.importorskip("textarena")
    numbers = adapter("Numbers")
    assert "between 1 and 20" in numbers.open({1: ({}, 3)})[1].messages[0]["content"]
    low, high, rewards = 1, 20, []
    while True:
        guess = (low + high) // 2
        turn = numbers.step({1: f"[{guess}]"})[1]
        rewards.append(turn.reward)
        if turn.ending:
            break
        hint = turn.messages[0]["content"].rsplit("The target number is ", 1)[1]
        low, high = (guess + 1, high) if hint.startswith("higher") else (low, guess - 1)
    assert (turn.ending, sum(rewards)) == ("completed", 1.0)
    assert len(rewards) <= 5


def test_skyrl_gym(adapter):
    pytest.importorskip("skyrl_gym")
    gsm8k = adapter("GSM8K")
    gsm8k.open({1: ({"answer": "7"}, 0), 2: ({"answer": "8"}, 0)})
    turns = gsm8k.step({1: "It is #### 7", 2: "It is #### 7"})
    assert {number: (turn.reward, turn.ending) for number, turn in turns.items()} == {
        1: (1.0, "completed"),
        2: (0.0, "completed"),
    }

"""Environments in worker processes: both shapes, tools, and every fault in one line and in time."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from types import SimpleNamespace
from typing import Literal

import numpy
import pytest
import torch

from kedge.training.runtime import Terminated, stopping
from kedge_base.environment_turn import EnvironmentTurn
from kedge_base.errors import DataError, EnvError
from kedge_tasks.environments.client import Environment
from kedge_tasks.environments.session import Session
from kedge_tasks.environments.shapes import Step
from kedge_tasks.environments.tools import Tools
from tests.processes import all_end
from tests.tasks.environments import worlds

FILE = worlds.__file__


@pytest.fixture
def world(tmp_path):
    """Starts environments; at the end closes them, and checks that no process is left."""
    started = []

    def start(name, *, timeout=20.0, local=False):
        given = getattr(worlds, name) if local else f"{FILE}:{name}"
        started.append(Environment(given, timeout=timeout, log=tmp_path / "reward.log"))
        return started[-1]

    yield start
    groups = [each._worker._process.pid for each in started if each._worker is not None]
    for each in started:
        each.close()
    assert all_end(*groups)


@pytest.mark.parametrize("local", [False, True])
def test_a_game_is_played_by_several_at_a_time(world, local):
    guess = world("Guess", local=local)
    opened = guess.open({7: ({"most": 9}, 3), 8: ({}, 4), 9: ({}, 3)})
    assert [each.messages[0]["content"] for each in opened.values()] == [
        "From 1 to 9.\n",
        "From 1 to 5.\n",
        "From 1 to 5.\n",
    ]
    assert opened[7].messages[0]["role"] == "user"
    # By hand: random.Random(3).randint(1, 5) is 2, and of 4 it is 2.
    turns = guess.step({9: "1", 7: "12", 8: "no digit"})
    assert (turns[9].reward, turns[9].ending, turns[9].messages[0]["content"]) == (0.25, None, "no.\n")
    assert (turns[7].reward, turns[7].ending) == (1.0, "completed")
    assert guess.finish([8, 9]) == dict.fromkeys((8, 9), EnvironmentTurn(ending="completed"))
    assert guess.open({7: ({"most": 2}, 0)})[7].messages[0]["content"] == "From 1 to 2.\n"


def test_the_global_generator_gives_an_episode_the_same_numbers_whatever_runs_beside_it(world):
    drawn = world("Drawn")
    [alone] = drawn.open({1: ({}, 5)}).values()
    after = drawn.step({1: "x"})[1].messages
    both = drawn.open({2: ({}, 6), 3: ({}, 5)})
    assert both[3] == alone != both[2]
    assert drawn.step({2: "x", 3: "x"})[3].messages == after


@pytest.mark.parametrize("local", [False, True])
def test_privileged_information_may_be_of_numpys_types(world, local):
    [opened] = world("Knows", local=local).open({1: ({}, 0)}).values()
    assert opened.privileged == {"number": 7, "board": [[1.0, 1.0]], "moves": [3], "words": "{'a'}"}


def test_a_step_may_be_a_tuple_as_in_gymnasium(world):
    environment = world("Tuple")
    assert environment.open({1: ({}, 0)}) == {1: EnvironmentTurn()}
    assert environment.step({1: "go"})[1].messages == [{"role": "user", "content": "again"}]
    turn = environment.step({1: "cut"})[1]
    assert (turn.reward, turn.ending) == (0.5, "truncated")


@pytest.mark.parametrize("local", [False, True])
def test_public_methods_are_tools_and_an_answer_without_a_call_ends_it(world, local):
    environment = world("Calculator", local=local)
    assert environment.tools.names == ["add", "fail", "shout"]
    assert "add(a: number, b: number): Add two numbers." in environment.tools.description
    environment.open({1: ({"answer": 7, "prompt": "3 + 4?"}, 0)})
    turn = environment.step({1: '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'})[1]
    assert turn.messages == [{"role": "tool", "content": "7", "name": "add"}]
    assert (turn.ending, turn.num_calls, turn.num_errors, turn.reward) == (None, 1, 0, 0.0)
    turn = environment.step({1: "It is 7."})[1]
    assert (turn.ending, turn.reward) == ("completed", 1.0)


class Tally:
    def __init__(self):
        self.calls = 0

    def count(self) -> None:
        """Count."""
        self.calls += 1

    def get_reward(self):
        return self.calls


def test_tools_without_reset_keep_nothing_of_an_earlier_episode():
    environment = Environment(Tally)
    for episode in (1, 2, 2):  # the last one starts again
        environment.open({episode: ({}, 0)})
        environment.step({episode: "<count>{}</count>"})
        if episode == 1:
            assert environment.step({1: "done"})[1].reward == 1.0
    assert environment.finish([2]) == {2: EnvironmentTurn(reward=1.0, ending="completed")}


FUNCTION, PARAMETER, END = "<tool_call>\n<function=", "<parameter=", "</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "results"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call> and more', ["3"]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', ["3"]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>' * 2, ["3", "3"]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}', []),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b"', []),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}', ["Error: the call cannot be read as JSON"]),
        ('[TOOL_CALLS] [{"name": "shout", "arguments": {"text": "a [b]"}}] or [c]', ["A [B]"]),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}', ["Error: the call cannot be read as JSON"]),
        ("<shout>land h", []),
        ("<shout>land</sho", []),
        ("With <shout> I can be heard.", []),
        ("I use <shout> for it: <shout>ahoy</shout>", ["AHOY"]),
        ('I use <tool_call>, as: <tool_call>{"name": "shout", "arguments": {"text": "a"}}</tool_call>', ["A"]),
        ("```\n<shout>ahoy</shout>\n```", ["AHOY"]),
        ("<think>Maybe <shout>ahoy</shout>, but", []),
        ("<thinking>Maybe <shout>ahoy</shout>", []),
        ("[THINK]<shout>ahoy</shout>[/THINK]<shout>land</shout>", ["LAND"]),
        ("<|channel|>analysis<|message|><shout>ahoy</shout>", []),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}', ["3"]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', ["3"]),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]', ["3"]),
        ('I add. <add>{"a": 1, "b": 2}</add>', ["3"]),
        ("<shout>land ho</shout> <shout>12</shout>", ["LAND HO", "12"]),
        ('<shout>{"text": "aye"}</shout>', ["AYE"]),
        ("<fail></fail>", ["Error: the wire is cut"]),
        ("<tool_call>{oops}</tool_call>", ["Error: the call cannot be read as JSON (Expecting property name"]),
        ("<tool_call>[1]</tool_call>", ['Error: a call is {"name": ..., "arguments": {...}}']),
        ('<tool_call>{"name": "sub"}</tool_call>', ["Error: there is no tool 'sub'; the tools are add, fail, shout"]),
        ('<add>{"a": 1}</add>', ["Error: add: missing a required argument: 'b'"]),
        ('<add>{"a": 1, "b": 2, "c": 3}</add>', ["Error: add: got an unexpected keyword argument 'c'"]),
        (
            '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>',
            ["Error: add: the arguments are a JSON object"],
        ),
        ('<tool_call>{"name": "__class__", "arguments": {}}</tool_call>', ["Error: there is no tool '__class__'"]),
        ('<tool_call>{"name": "get_reward"}</tool_call>', ["Error: there is no tool 'get_reward'"]),
        ('<think>Maybe <add>{"a": 5, "b": 5}</add>?</think><add>{"a": 1, "b": 2}</add>', ["3"]),
        ('<think>Maybe <tool_call>{"name": "fail"}</tool_call>?</think>No.', []),
        ("No call: <addition>3</addition>, {name}.", []),
        # Qwen 3.5 and Nemotron; GLM. A text argument is as it is written, all others are JSON.
        (f"{FUNCTION}add>\n{PARAMETER}a>\n1.5\n</parameter>\n{PARAMETER}b>\n2\n</parameter>{END}", ["3.5"]),
        (f"Well.\n\n{FUNCTION}shout>\n{PARAMETER}text>\n12\n<b>\nay\n</parameter>\n{END}", ["12\n<B>\nAY"]),
        (f"{FUNCTION}shout>\n{PARAMETER}text>\n\n</parameter>\n{END}", [""]),
        (f"{FUNCTION}fail>\n{END}{FUNCTION}fail>{END}", ["Error: the wire is cut"] * 2),
        (f"{FUNCTION}add>\n{PARAMETER}a>\none\n</parameter>\n{END}", ["Error: add: missing a required argument: 'b'"]),
        (f"{FUNCTION}add>\n<a>1</a>\n{END}", ["Error: the call cannot be read as JSON"]),
        (f"{FUNCTION}sub>\n{END}", ["Error: there is no tool 'sub'"]),
        (f"{FUNCTION}add>\n{PARAMETER}a>\n1\n", []),
        (
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key><arg_value>2</arg_value>\n"
            "</tool_call>",
            ["3"],
        ),
        ("<tool_call>shout\n<arg_key>text</arg_key>\n<arg_value>true</arg_value>\n</tool_call>", ["TRUE"]),
        ("<tool_call>fail</tool_call>", ["Error: the wire is cut"]),
        ("<tool_call>fail\n<arg_key></arg_key><arg_value></arg_value></tool_call>", ["Error: fail: got an unexpected"]),
        ("<tool_call>add it up</tool_call>", ["Error: the call cannot be read as JSON"]),
    ],
)
def test_calls_are_read_as_models_write_them_and_errors_are_told(text, results):
    session = Session(worlds.Calculator, "Calculator")
    session.call("open", [{"episode": 1, "row": {"answer": 0}, "seed": 0}])
    [turn] = session.call("step", [{"episode": 1, "text": text}])
    found = [message["content"] for message in turn["messages"]]
    assert len(found) == len(results)
    assert all(content.startswith(expected) for content, expected in zip(found, results, strict=True)), found
    assert turn["num_errors"] == sum(content.startswith("Error") for content in found)
    assert turn["ending"] == (None if results else "completed")


@pytest.mark.parametrize(
    ("before", "repeated", "after"),
    [
        ("", "\n", ""),
        ("", " ", "x"),
        ("", '{"parameters"}', " x"),
        ("<tool_call><function=add>", " ", "x</function></tool_call>"),
        ("<tool_call><function=add>", "<parameter=a>", "</function></tool_call>"),
        ("<tool_call>add", "<arg_key>", "</tool_call>"),
        ("<tool_call>add", "<arg_key>a</arg_key><arg_value>1", "</tool_call>"),
    ],
)
def test_a_turn_that_repeats_itself_is_read_in_linear_time(before, repeated, after):
    """As policies repeat themselves early in training; squares of such a length took from seconds to hours."""
    tools = Session(worlds.Calculator, "Calculator").tools
    assert tools is not None
    text = before + repeated * (100_000 // len(repeated)) + after
    started = time.process_time()
    calls = tools.calls_in(text)
    tools.text_before_calls(text)
    assert time.process_time() - started < 1
    assert all(call.fault for call in calls)


def test_async_environments_run_at_the_same_time(world):
    together = world("Together")
    together.open({number: ({}, 0) for number in range(10)})
    turns = together.step(dict.fromkeys(range(10), "x"))
    assert all(turn.ending == "completed" for turn in turns.values())


@pytest.mark.parametrize(("name", "text"), [("Sleeps", "30"), ("Slow", "30")])
def test_a_late_answer_ends_the_episode_and_the_next_one_is_played(world, name, text):
    environment = world(name, timeout=0.5)
    environment.open({1: ({}, 0), 2: ({}, 0)})
    turns = environment.step({1: text, 2: "0"})
    assert (turns[1].ending, turns[2].ending) == ("timeout", "completed")
    environment.open({1: ({}, 0)})
    assert environment.step({1: "0"})[1].ending == "completed"


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("Raises", "x", r"^Raises raised KeyError: 'no such move\\nat all' \(worlds.py:\d+\)$"),
        ("Nonsense", "none", r"^Nonsense.step returned None \(of type NoneType\); expected a kedge.Step"),
        ("Nonsense", "number", r"^Nonsense.step returned 3 \(of type int\); expected a kedge.Step"),
        ("Nonsense", "nan", "^Nonsense.step gave the reward nan; expected a finite number$"),
        ("Nonsense", "role", "^Nonsense gave the message {'role': 'me'}; expected one with role and content$"),
        ("Nonsense", "array", r"^Nonsense said array\(\[1., 1.\]\) \(of type ndarray\); expected a text, or messages$"),
        ("Nonsense", "else", "^Nonsense raised KeyError: 'else'"),
        ("Cancels", "x", r"^Cancels raised CancelledError \(worlds.py:\d+\)$"),
    ],
)
@pytest.mark.parametrize("local", [False, True])
def test_a_fault_of_the_environment_is_one_line(world, tmp_path, local, name, text, line):
    environment = world(name, local=local)
    environment.open({1: ({}, 0), 2: ({}, 0)})
    assert environment.step({1: text})[1].ending == "failed"
    assert re.search(line, environment.failure)
    assert "\n" not in environment.failure
    log = (tmp_path / "reward.log").read_text()
    assert f"[{environment.failure}]" in log
    assert "Traceback" in log
    # The others are in no way harmed.
    assert environment.finish([2]) == {2: EnvironmentTurn(ending="completed")}
    assert environment.open({1: ({}, 0)}) == {1: EnvironmentTurn()}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("Exits", "^Exits: its process exited with status 3$"),
        ("Hangs", "^Hangs: a call took over 0.8 s; it was killed$"),
    ],
)
def test_a_process_that_is_lost_is_one_line(world, monkeypatch, name, line):
    monkeypatch.setattr("kedge_tasks.environments.client.GRACE", 0.3)  # of a loop in C, which cannot be interrupted
    environment = world(name, timeout=0.5 if name == "Hangs" else 20.0)
    environment.open({1: ({}, 0)})
    with pytest.raises(EnvError, match=line):
        environment.step({1: "x"})


def test_what_opens_an_episode_is_checked(world, monkeypatch):
    monkeypatch.setattr("kedge_tasks.environments.client.PAUSE", 0.01)
    for name, row, line in (
        ("Nonsense", {"says": 3}, r"^Nonsense said 3 \(of type int\); expected a text, or messages$"),
        ("SleepsAtReset", {}, r"^SleepsAtReset took longer than its limit to open or end an episode"),
    ):
        environment = world(name, timeout=0.5)
        assert environment.open({1: (row, 0)}) == {1: None}
        assert re.search(line, environment.failure)
    with pytest.raises(DataError, match="the prompts have a value that cannot be sent to the process of Guess"):
        world("Guess").open({1: ({"most": object()}, 0)})


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        (f"{FILE}:Needs", "^Needs cannot be made without arguments: "),
        (f"{FILE}:Nothing", "^Nothing is not an environment: it has neither reset.*, nor is it an agent: a function"),
        (
            f"{FILE}:Undescribed",
            "^Undescribed.tool is not a tool: .*; a tool has type hints and a docstring with Args:",
        ),
        (f"{FILE}:Gues", "the module has no 'Gues'; did you mean 'Guess'"),
        ("nowhere.py:Guess", "environment file 'nowhere.py' does not exist"),
        ("nowhere", "environment 'nowhere' is not the name of a class"),
    ],
)
def test_what_is_no_environment_is_refused_in_one_line(spec, line):
    with pytest.raises(EnvError, match=line) as caught:
        Environment(spec)
    assert "\n" not in str(caught.value)


def test_private_and_reserved_methods_are_no_tools():
    assert Tools.of(worlds.Calculator(), "Calculator").names == ["add", "fail", "shout"]


@pytest.mark.parametrize("name", ["Remote", "remote"])
@pytest.mark.parametrize("local", [False, True])
def test_what_an_async_environment_keeps_is_of_one_event_loop(world, local, name, monkeypatch):
    monkeypatch.setattr(worlds.Remote, "client", None)
    remote = world(name, local=local, timeout=5.0)
    opened = remote.open({1: ({}, 5), 2: ({}, 6), 3: ({}, 5)})
    assert opened[1] == opened[3] != opened[2], "each draws from its own stream, although all run at the same time"
    for text in ("abc", "de"):
        turns = remote.step({1: text, 2: text, 3: text})
        assert {turn.messages[0]["content"] for turn in turns.values()} == {text[::-1]}
        assert turns[1].reward == turns[3].reward != turns[2].reward
    turns = remote.step({1: "late", 2: "abc"})
    assert (turns[1].ending, turns[2].ending) == ("failed", None)
    assert re.search(r"^\w+ raised TimeoutError: the server does not answer \(worlds\.py:\d+\)$", remote.failure)


@pytest.mark.parametrize("local", [False, True])
def test_an_async_environment_is_made_in_its_event_loop(world, local):
    client = world("OwnClient", local=local)
    assert [turn.messages[0]["content"] for turn in client.open({1: ({}, 5), 2: ({}, 6)}).values()] == ["og", "og"]
    assert client.step({1: "abc", 2: "de"})[2].messages[0]["content"] == "ed"


def test_an_async_environment_runs_where_a_notebook_already_runs_a_loop(world, monkeypatch):
    monkeypatch.setattr(worlds.Remote, "client", None)

    async def cell():
        remote = world("Remote", local=True)
        remote.open({1: ({}, 5)})
        return remote.step({1: "abc"})

    assert asyncio.run(cell())[1].messages == [{"role": "user", "content": "cba"}]


def answering(answer):
    """A game whose step returns this."""

    class Given:
        def reset(self, row, seed): ...

        def step(self, text):
            return answer

    return Given


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (("o", 1.0, {"info": 1}, False), r"^Given\.step gave terminated=\{'info': 1\}; expected True or False$"),
        (Step(terminated="no"), r"^Given\.step gave terminated='no'; expected True or False$"),
        (Step(terminated=torch.tensor([True, False])), r"^Given\.step gave terminated=tensor"),
        ({"message": "x", "reward": 1}, r"^Given\.step returned .*expected a kedge\.Step, or messages, reward"),
        (Step(reward=1e39), r"^Given\.step gave the reward 1e\+39; expected a finite number$"),
    ],
    ids=["swapped", "text", "two", "misspelt", "too large for float32"],
)
def test_a_step_that_would_be_misread_is_refused(answer, line):
    environment = Environment(answering(answer))
    environment.open({1: ({}, 0)})
    assert environment.step({1: "x"})[1].ending == "failed"
    assert re.search(line, environment.failure)


@pytest.mark.parametrize(
    ("is_done", "info", "ending"),
    [
        (False, {"lives": 3}, None),
        (True, {}, "completed"),
        (True, {"TimeLimit.truncated": True}, "truncated"),
        (True, {"TimeLimit.truncated": False}, "completed"),
    ],
)
def test_a_step_may_be_the_tuple_of_four_of_gym(is_done, info, ending):
    """Gym's TimeLimit sets `done` of an episode that it cuts off, and says so in `info`."""
    environment = Environment(answering(("You see a door.", 0.5, is_done, info)))
    environment.open({1: ({}, 0)})
    turn = environment.step({1: "x"})[1]
    assert (turn.messages[0]["content"], turn.reward, turn.ending) == ("You see a door.", 0.5, ending)


@pytest.mark.parametrize("flag", [True, 1, torch.tensor(True), numpy.bool_(True)])
def test_a_truth_value_may_come_from_torch_or_numpy(flag):
    environment = Environment(answering(Step(truncated=flag)))
    environment.open({1: ({}, 0)})
    assert environment.step({1: "x"})[1].ending == "truncated"


@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_a_step_may_have_the_names_of_openenv(kind):
    environment = Environment(answering(kind(observation="You won", reward=1.0, done=True)))
    environment.open({1: ({}, 0)})
    turn = environment.step({1: "x"})[1]
    assert (turn.messages[0]["content"], turn.reward, turn.ending) == ("You won", 1.0, "completed")
    cut = Environment(answering(kind(observation="Late", reward=0.0, terminated=False, truncated=True, done=True)))
    cut.open({1: ({}, 0)})
    assert cut.step({1: "x"})[1].ending == "truncated", "its last state has a value"
    cut = Environment(answering(kind(observation="Late", truncated=True, done=True)))
    cut.open({1: ({}, 0)})
    assert cut.step({1: "x"})[1].ending == "truncated"


def test_a_tool_that_exits_is_an_error_for_the_policy():
    class Py:
        def run(self, code: str) -> None:
            """Run a program.

            Args:
                code: The program.
            """
            exec(code, {})

    environment = Environment(Py)
    environment.open({1: ({}, 0)})
    turn = environment.step({1: "<run>raise SystemExit(3)</run>"})[1]
    assert (turn.messages[0]["content"], turn.num_errors, turn.ending) == ("Error: 3", 1, None)


class Signaled:
    """Its methods get SIGTERM in the middle, as a run does that a cluster ends."""

    went_on = False

    def reset(self): ...

    def wait(self) -> str:
        """Wait."""
        return self._interrupted()

    def get_reward(self):
        return self._interrupted()

    def _interrupted(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
        Signaled.went_on = True


class SignaledGame:
    def reset(self, row, seed): ...

    def step(self, text):
        Signaled()._interrupted()


class SignaledReset(SignaledGame):
    def reset(self, row, seed):
        Signaled()._interrupted()


@pytest.mark.parametrize(
    ("kind", "text"),
    [(Signaled, "<wait></wait>"), (Signaled, "an answer"), (SignaledGame, "x"), (SignaledReset, "")],
    ids=["tool", "get_reward", "step", "reset"],
)
def test_a_signal_that_ends_the_run_is_not_the_environments_error(kind, text):
    environment = Environment(kind)

    def play():
        environment.open({1: ({}, 0)})
        environment.step({1: text})

    with pytest.raises(Terminated), stopping(grace_seconds=0.2):
        play()
    assert not Signaled.went_on


def test_an_interrupt_ends_the_calls_of_an_async_environment():
    """Otherwise a tool would act after the interrupt."""
    reached = []

    class Waiting:
        async def act(self) -> str:
            """Act after a while."""
            reached.append("call")
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
            try:
                await asyncio.sleep(5)
            except asyncio.CancelledError:
                reached.append("cancelled")
                raise
            reached.append("acted")
            return "done"

    def interrupt(*_):
        raise KeyboardInterrupt

    session = Session(Waiting, "Waiting")
    session.call("open", [{"episode": 1, "row": {}, "seed": 0}])
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            session.call("step", [{"episode": 1, "text": "<act></act>"}])
    finally:
        signal.signal(signal.SIGALRM, before)
    deadline = time.monotonic() + 10
    while len(reached) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reached == ["call", "cancelled"]


def test_a_call_that_opens_an_episode_is_made_again():
    """By hand: every second instance's `reset` is refused, as by a sandbox that is full."""
    made = []

    class Full(worlds.Guess):
        def __init__(self):
            made.append(self)

        def reset(self, row, seed):
            if len(made) % 2:
                raise ConnectionResetError("no sandbox is free")
            return super().reset(row, seed)

    environment = Environment(Full)
    assert environment.open({1: ({}, 3)})[1].messages[0]["content"] == "From 1 to 5.\n"
    assert len(made) == 2


def test_a_property_is_not_computed_and_a_description_says_what_an_argument_may_be():
    class Weather:
        def reset(self):
            self.days = []

        @property
        def count(self):
            return len(self.days)

        def forecast(self, town: str, unit: Literal["c", "f"] = "c", days: int | None = None) -> str:
            """The weather.

            Args:
                town: Where.
                unit: Of the temperature.
                days: How many.
            """
            return town

    tools = Tools.of(Weather(), "Weather")
    assert tools.names == ["forecast"]
    assert 'forecast(town: string, unit?: "c" | "f", days?: integer): The weather.' in tools.description
    assert tools.sample_text == '<forecast>{"town": "...", "unit": "c", "days": 1}</forecast>'


def test_methods_that_take_something_else_and_objects_are_refused_before_a_row_is_read():
    class Other:
        def reset(self, example, number): ...

        def step(self, text): ...

    class Short:
        def reset(self): ...

        def step(self): ...

    expected = r"expected reset\(row, seed\) and step\(text\)$"
    with pytest.raises(EnvError, match=rf"^Other: missing a required argument: 'example'; {expected}"):
        Environment(Other)
    with pytest.raises(EnvError, match=rf"^Short: too many positional arguments; {expected}"):
        Environment(Short)
    with pytest.raises(EnvError, match=r"^Guess is an object; expected its class, or a function that makes one"):
        Environment(worlds.Guess())


def test_what_reset_gets_is_said_where_a_class_with_tools_takes_something_else():
    class Tools:
        def reset(self, row, seed): ...

        def say(self) -> str:
            """Say something."""
            return "yes"

    environment = Environment(Tools)
    environment.open({1: ({"prompt": "Six times seven?", "answer": 42}, 0)})
    expected = "missing a required argument: 'row'; expected arguments named seed, prompt, answer"
    assert environment.failure == f"Tools.reset: {expected}"


def test_what_a_tool_says_can_be_encoded_and_a_row_keeps_its_seed():
    class Odd:
        def reset(self, seed):
            self.seed = seed

        def say(self) -> str:
            """Say something."""
            return f"\ud800{self.seed}"

    environment = Environment(Odd)
    environment.open({1: ({"seed": "mine"}, 0)})
    assert environment.step({1: "<say></say>"})[1].messages[0]["content"] == "?mine"

"""Environments on OpenEnv servers: the protocol, every fault of a server in one line, and a run of PPO."""

from __future__ import annotations

import random
import re
import threading
import time

import pytest

from kedge.stages.ppo import run_ppo
from kedge_base.environment_turn import EnvironmentTurn
from kedge_base.errors import EnvError
from kedge_tasks.environments.client import Environment
from tests.stages.ppo.test_episodes import EPISODES, GAMES, assert_same
from tests.stages.ppo.test_ppo import configure
from tests.tasks.environments import worlds
from tests.tasks.environments.openenv_servers import BAD, GUESS, NUMBER, TEXT, Server, running, schema_of
from tests.tiny import save_tiny_policy


@pytest.fixture(autouse=True)
def short_pause(monkeypatch):
    monkeypatch.setattr("kedge_tasks.environments.client.PAUSE", 0.01)


@pytest.fixture
def served():
    """Starts an environment on a server in this process."""
    started = []

    def start(url, fields="", *, timeout=20.0):
        started.append(Environment(f"openenv:{url}{fields}", timeout=timeout))
        return started[-1]

    yield start
    for each in started:
        each.close()


def until(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


@pytest.mark.parametrize("form", ["{}", "{}/", "{}/ws", "{},action=message,observation=text"])
def test_a_game_is_played_in_sessions_that_are_used_again(served, form):
    with running() as (url, server):
        game = served(form.format(url))
        assert game.name == "openenv"
        opened = game.open({7: ({"most": 9, "prompt": "Play."}, 3), 8: ({}, 2**40 + 4)})
        assert opened == {
            7: EnvironmentTurn([{"role": "user", "content": "From 1 to 9.\n"}]),
            8: EnvironmentTurn([{"role": "user", "content": "From 1 to 5.\n"}]),
        }
        assert sorted(server.received, key=str) == [
            {"type": "reset", "data": {"seed": 3, "most": 9, "prompt": "Play."}},
            {"type": "reset", "data": {"seed": 4}},
        ]
        # By hand: random.Random(3).randint(1, 9) is 4, and random.Random(4).randint(1, 5) is 2.
        turns = game.step({7: "1234", 8: "1"})
        assert (turns[7].reward, turns[7].ending) == (1.0, "completed")
        assert (turns[8].reward, turns[8].ending, turns[8].messages[0]["content"]) == (0.25, None, "no.\n")
        assert server.received[-1]["data"] in ({"message": "1234"}, {"message": "1"})
        assert game.step({8: "unpaid"})[8].reward == 0.0, "null is no reward"
        game.finish([8])
        game.open({7: ({}, 5), 8: ({}, 6)})
        assert (server.opened, server.open) == (2, 2)
        for connection in server.connections:  # as servers do with sessions that rest for long
            connection.close()
        until(lambda: server.open == 0)
        time.sleep(0.2)
        assert game.open({7: ({}, 3)})[7].messages[0]["content"] == "From 1 to 5.\n"
        assert server.opened == 3


def test_sessions_answer_at_the_same_time(served):
    barrier = threading.Barrier(6, timeout=60)

    class Together(Server):
        def play(self, connection):
            connection.recv()
            barrier.wait()  # until all six have asked
            connection.send(
                '{"type": "observation", "data": {"observation": {"text": null}, "reward": 0, "done": false}}'
            )
            connection.recv()

    with running(Together()) as (url, _):
        assert served(url).open({number: ({}, 0) for number in range(6)}) == {
            number: EnvironmentTurn() for number in range(6)
        }


def test_a_late_answer_ends_the_episode_and_its_session(served):
    with running() as (url, server):
        game = served(url, timeout=0.6)
        game.open({1: ({}, 0), 2: ({}, 0)})
        turns = game.step({1: "hang", 2: "no digit"})
        assert (turns[1].ending, turns[2].ending) == ("timeout", None)
        until(lambda: server.open == 1)
        game.open({1: ({}, 3)})
        assert game.step({1: "12"})[1].ending == "completed"


def test_an_action_that_the_server_finds_invalid_is_answered_with_the_reason(served):
    with running() as (url, _):
        game = served(url)
        game.open({1: ({}, 0)})
        turn = game.step({1: ""})[1]
        assert (turn.reward, turn.ending) == (0.0, None)
        assert turn.messages == [{"role": "user", "content": "Invalid: String should have 1 character"}]


FAULTS = {
    "close": r"has ended the connection during a step \(received 1011 .*out of memory.*\)",
    "drop": r"has ended the connection during a step \(no close frame",
    "bytes": "answered a step with something other than JSON",
    "text": r"answered a step with something other than JSON \(Expecting value",
    "deep": r"answered a step with something other than JSON \(maximum recursion depth",
    "list": r"answered a step with '\[1, 2\]'; expected an object with type and data",
    "nothing": 'answered a step with \'{"type": "observation"}\'; expected an object with type and data',
    "state": 'answered with {"type": "state".*; expected an observation with a reward, and done as true or false',
    "no reward": "answered with .*; expected an observation with a reward",
    "no done": "answered with .*; expected an observation with a reward",
    "done null": "answered with .*; expected an observation with a reward",
    "done 1": "answered with .*; expected an observation with a reward",
    "list for observation": "answered with .*; expected an observation with a reward",
    "no text": "gave an observation without 'text': {\"turn\": 1}",
    "huge": "sent a message of more than 16 MiB",
    "raised": r"answered: the wire\\nis cut \(EXECUTION_ERROR\)",
    "strange error": r"answered: \['x'\] \(None\)",
}


@pytest.mark.parametrize("said", FAULTS)
def test_a_fault_of_the_server_is_one_line(served, said):
    with running() as (url, _):
        game = served(url)
        game.open({1: ({}, 0), 2: ({}, 0)})
        turns = game.step({1: said, 2: "no digit"})
        assert (turns[1].ending, turns[2].ending) == ("failed", None)
        assert re.search(f"^openenv:{re.escape(url)} {FAULTS[said]}", game.failure)
    assert "\n" not in game.failure
    assert len(game.failure) < 400


@pytest.mark.parametrize("said", ["raised", "no text", "reward nan"])
def test_a_failed_episode_ends_its_session(served, said):
    with running(Server(most_sessions=2)) as (url, server):
        game = served(url)
        for number in range(4):
            assert game.open({number: ({}, 0)})[number] is not None, game.failure
            assert game.step({number: said})[number].ending == "failed"
            until(lambda: server.open == 0)


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("reward text", "^openenv.step gave the reward 'much'; expected a finite number$"),
        ("reward nan", "^openenv.step gave the reward nan; expected a finite number$"),
        ("long", "^openenv gave a message of 1,000,001 characters; at most 1,000,000$"),
    ],
)
def test_what_a_server_says_is_checked_as_that_of_any_environment(served, said, line):
    with running() as (url, _):
        game = served(url)
        game.open({1: ({}, 0)})
        assert game.step({1: said})[1].ending == "failed"
        assert re.search(line, game.failure)


def test_every_fault_is_tried():
    assert set(BAD) <= {*FAULTS, "reward text", "reward nan", "long"}


def test_a_full_server_an_episode_that_is_over_and_a_row_that_is_not_json(served):
    with running(Server(most_sessions=1)) as (url, _):
        line = r"answered: Server at capacity.* \(CAPACITY_REACHED\); .* raise the server's max_concurrent_envs$"
        game = served(url)
        opened = game.open({1: ({}, 0), 2: ({}, 0)})
        assert [messages is None for messages in opened.values()].count(True) == 1
        assert re.search(line, game.failure)
    for row, line in (
        ({"says": "over"}, r"has opened an episode that is over \(done\)$"),
        ({"most": float("nan")}, r"takes JSON, and a reset has another value \(Out of range float values"),
    ):
        with running() as (url, _):
            game = served(url)
            assert game.open({1: (row, 0)}) == {1: None}
            assert re.search(line, game.failure)


@pytest.mark.parametrize(
    ("schema", "fields", "line"),
    [
        (GUESS, ",action=mesage", r"has no field 'mesage'; name one by action=FIELD; .* message \(string\)$"),
        (GUESS, ",observation=message", r"has no field 'message'; .* are text \(string\), turn \(integer\)$"),
        (
            schema_of({"code": TEXT, "note": {"anyOf": [TEXT, {"type": "null"}]}}, {"text": TEXT}, ["code"]),
            "",
            r"the action has 2 text fields; .* the fields are code \(string\), note \(string or null\)$",
        ),
        (schema_of({"move": NUMBER}, {"text": TEXT}), "", r"has 0 text fields; .* the fields are move \(integer\)$"),
        (schema_of({}, {"text": TEXT}), "", "the action has 0 text fields; .* the fields are none$"),
        (
            schema_of({"kind": TEXT, "price": NUMBER}, {"text": TEXT}, ["kind", "price"]),
            "",
            "an action also needs price; write a function that builds it$",
        ),
        (
            schema_of({"type": {**TEXT, "const": "call_tool"}, "tool_name": TEXT, "arguments": {"type": "object"}}, {}),
            "",
            "has tools by MCP, which kedge does not call$",
        ),
        ("[]", "", "the action has 0 text fields; .* the fields are none$"),
        ("<html>", "", r"has no schema at http.*/schema \(Expecting value.*\); is it an OpenEnv server"),
        (GUESS, "/elsewhere", r"has no schema at http.*/elsewhere/schema \(HTTP Error 404: Not Found\); is it"),
        (GUESS, ",act=message", "is misspelt; expected openenv:URL,action=FIELD,observation=FIELD$"),
        (GUESS, ",action=", "is misspelt; expected openenv:URL,action=FIELD,observation=FIELD$"),
        (GUESS, "?action=message", "has no address; expected such as openenv:http://localhost:8000$"),
    ],
)  # fmt: skip
def test_fields_that_cannot_be_told_are_listed(served, schema, fields, line):
    with running(Server(schema)) as (url, _), pytest.raises(EnvError, match=line) as caught:
        served(url, fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://localhost", "http://", "http://localhost:eighty", "http://me:word@host"]
)
def test_what_is_no_address_is_refused(served, url):
    with pytest.raises(EnvError, match=r"has no address; expected such as openenv:http://localhost:8000$"):
        served(url)


def test_a_server_that_is_not_there_is_refused_at_once_and_later_when_it_has_left(served):
    with running() as (url, _):
        game = served(url)
    assert game.open({1: ({}, 0)}) == {1: None}
    assert re.search(r"accepts no session \(.*Connect call failed.*\)$", game.failure)
    with pytest.raises(
        EnvError, match=r"has no schema at http.*/schema \(.*Connection refused.*\); is it an OpenEnv server"
    ):
        served(url)


def test_other_actions_and_observations_are_functions(tmp_path):
    file = tmp_path / "maze.py"
    with running(Server(schema_of({"move": NUMBER}, {"turn": NUMBER}))) as (url, server):
        file.write_text(
            "from kedge_tasks.environments.openenv import OpenEnv\n"
            "def Maze():\n"
            f"    return OpenEnv({url!r}, action=lambda text: {{'message': text * 2, 'move': len(text)}},\n"
            "                   observation=lambda seen: f\"turn {seen['turn']}\")\n"
        )
        maze = Environment(f"{file}:Maze")
        assert maze.open({1: ({}, 0)})[1].messages[0]["content"] == "turn 1"
        assert maze.step({1: "go"})[1].messages[0]["content"] == "turn 1"
        assert server.received[-1] == {"type": "step", "data": {"message": "gogo", "move": 2}}
        maze.close()


class openenv(worlds.Guess):
    """The server's game, in kedge's process and under the server's name."""

    def reset(self, row, seed):
        return super().reset(row, seed % 2**31)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


def test_a_run_with_a_server_is_that_with_the_same_game_here(tmp_path, policy):
    settings = {name: value for name, value in EPISODES.items() if name != "environment.source"}
    with running() as (url, server):
        far = configure(policy, tmp_path / "far", **settings, **{"environment.source": f"openenv:{url}"})
        rows = run_ppo(far, prompts=GAMES).metrics
        assert server.opened == 4, "a session for each episode of a batch"
    run_ppo(configure(policy, tmp_path / "near", **settings), prompts=GAMES, environment=openenv)
    assert_same(tmp_path / "far", tmp_path / "near")
    assert {row["episode/completed"] + row["episode/max_turns"] for row in rows} == {1.0}


def test_a_server_that_leaves_in_mid_run_ends_it_with_one_line_and_the_policy_saved(tmp_path, policy):
    with running(Server(closing=range(30, 9999))) as (url, _):
        settings = EPISODES | {"environment.source": f"openenv:{url}", "num_updates": 50}
        with pytest.raises(
            EnvError, match=r"^openenv:http\S+ has ended the connection during a (step|reset) \(|accepts no session"
        ):
            run_ppo(configure(policy, tmp_path / "run", **settings), prompts=GAMES)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 1


def test_a_connection_that_is_lost_costs_its_episode(tmp_path, policy):
    with running(Server(closing=[30])) as (url, _):
        settings = EPISODES | {"environment.source": f"openenv:{url}", "num_updates": 5}
        rows = run_ppo(configure(policy, tmp_path / "run", **settings), prompts=GAMES).metrics
    assert sum(row["reward/environment_given_up"] for row in rows) == 1
    assert sum(row["reward/unscored"] for row in rows) == 1
    assert sorted({row["episode/failed"] for row in rows}) == [0.0, 0.25]
    assert "has ended the connection during a" in (tmp_path / "run" / "reward.log").read_text()


def test_the_packages_own_server(served):
    """Of the packages openenv and openenv-core, which are one another's successors; neither is an extra of kedge."""
    env_server = pytest.importorskip("openenv.core.env_server")
    from openenv.core.env_server.types import Action, Observation, State  # pyright: ignore[reportMissingImports]

    uvicorn = pytest.importorskip("uvicorn")

    class Said(Action):
        message: str

    class Heard(Observation):
        text: str = ""

    class Game(env_server.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        state = State()

        def reset(self, seed=None, episode_id=None, most=10):
            self.secret = random.Random(seed).randint(1, most)
            return Heard(text=f"From 1 to {most}.")

        def step(self, action, timeout_s=None, **more):
            if action.message == "break":
                raise RuntimeError("broken")
            if action.message == str(self.secret):
                return Heard(text="yes", reward=1.0, done=True)
            return Heard(text="no")

    app = env_server.create_fastapi_app(Game, Said, Heard, max_concurrent_envs=2)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        game = served(url)
        # Of the row, `most` is an argument of its reset; `prompt` is not, and no fault.
        opened = game.open({1: ({"most": 5, "prompt": "Play."}, 3), 2: ({}, 3)})
        assert [each.messages[0]["content"] for each in opened.values()] == ["From 1 to 5.", "From 1 to 10."]
        turns = game.step({1: str(random.Random(3).randint(1, 5)), 2: "x"})
        assert (turns[1].reward, turns[1].ending) == (1.0, "completed")
        assert (turns[2].reward, turns[2].ending, turns[2].messages[0]["content"]) == (0.0, None, "no")
        game.open({1: ({"most": 2}, 4)})
        assert game.open({3: ({}, 0)}) == {3: None}
        assert re.search(r"answered: Server at capacity: 2/2 .* raise the server's max_concurrent_envs$", game.failure)
        time.sleep(1.0)
        game = served(url)
        game.open({1: ({}, 0)})
        assert game.step({1: "break"})[1].ending == "failed"
        assert re.search(r"answered: broken \(EXECUTION_ERROR\)$", game.failure)
    finally:
        server.should_exit = True
        thread.join(10)

"""Agents that call the policy through OpenAI's client: the protocol, and every bad agent in one line and in time."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import threading
import time

import pytest

from kedge_base.environment_turn import EnvironmentTurn
from kedge_base.errors import EnvError
from kedge_base.workers.event_loop import event_loop
from kedge_tasks.environments.client import Environment
from kedge_tasks.environments.session import Session
from tests.processes import all_end, members
from tests.tasks.environments import worlds

pytest.importorskip("openai")
pytest.importorskip("aiohttp")

from tests.tasks.environments import agents

FILE = agents.__file__
USER = {"role": "user", "content": "hi"}


class Players:
    """Worker processes, one for each function and limit."""

    def __init__(self, folder):
        self.folder = folder
        self.environments = {}

    def __call__(self, function="run", timeout=20.0):
        key = function, timeout
        if key not in self.environments:
            log = self.folder / "reward.log"
            self.environments[key] = Environment(f"{FILE}:{function}", timeout=timeout, log=log)
        return self.environments[key]


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """Starts agents in worker processes; at the end closes them, and checks that no process is left."""
    players = Players(tmp_path_factory.mktemp("agents"))
    yield players
    groups = [each._worker._process.pid for each in players.environments.values()]
    for each in players.environments.values():
        each.close()
    assert all_end(*groups)


@pytest.fixture
def local():
    """Starts agents in this process; at the end closes them."""
    started = []

    def start(function, **settings):
        started.append(Session(function, function.__name__, **settings))
        return started[-1]

    yield start
    for each in started:
        each.close()


def play(environment, row=None, *, most=4, number=1, seed=0, text="x"):
    """Play an episode of at most some turns; return the turns."""
    [turn] = environment.open({number: (row or {}, seed)}).values()
    if turn is None:
        return []
    turns = [turn]
    while turns[-1].ending is None:
        if len(turns) > most:
            turns.append(environment.finish([number])[number])
            break
        said = {"text": text, "num_tokens": 2, "num_read": 7, "is_complete": True}
        turns.append(environment.step({number: said})[number])
    return turns


def scripted(session, texts, row=None, **said):
    """Play an episode in this process, with these answers; return the turns."""
    [turn] = session.call("open", [{"episode": 1, "row": row or {}, "seed": 0}])
    turns = [turn]
    for text in texts:
        said = {"num_tokens": 2, "num_read": 7, "is_complete": True, **said}
        turns += session.call("step", [{"episode": 1, "text": text, **said}])
    return turns


def paid(turn):
    """The reward of an episode."""
    return sum(turn["rewards"] if isinstance(turn, dict) else turn.rewards)


# What is sent and answered


def test_a_conversation_is_sent_with_the_answers_as_they_were_sampled(local):
    async def run(row, client):
        messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": row["question"]}]
        for _ in range(2):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, max_completion_tokens=5, stop=["\n"], temperature=1, top_p=1.0
            )
            assert answer.usage.model_dump(exclude_none=True) == {
                "prompt_tokens": 7,
                "completion_tokens": 2,
                "total_tokens": 9,
            }
            messages += [answer.choices[0].message, {"role": "user", "content": [{"type": "text", "text": "And?"}]}]
        return [0.5, 1]

    first, second, last = scripted(local(run), ["One.", "Two."], {"question": "Why?"})
    opening = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    assert (first["context"], first["max_tokens"], first["stop"], first["tools"]) == (opening, 5, ["\n"], None)
    answer = {"role": "assistant", "content": "One.", "answer": 0}
    assert second["context"] == [*opening, answer, {"role": "user", "content": "And?"}]
    assert (last["ending"], last["rewards"], last["reward"]) == ("completed", [0.5, 1.0], 0.0)


def test_the_reason_for_an_end_is_sent(local):
    async def run(row, client):
        answer = await agents.ask(client)
        return float(answer.choices[0].finish_reason == row["reason"])

    session = local(run)
    assert paid(scripted(session, ["x"], {"reason": "length"}, is_complete=False)[-1]) == 1
    assert paid(scripted(session, ["x"], {"reason": "stop"})[-1]) == 1


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


CALLS = [
    ('Well. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>', "Well.", 1),
    ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>\n', None, 1),
    ('<add>{"a": 1, "b": 2}</add><add>{"a": 1, "b": 2}</add>', None, 2),
    ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]', None, 1),
    ('{"name": "add", "parameters": {"a": 1, "b": 2}}', None, 1),
    (
        '<think>Is it <add>?</think>Yes. <add>{"a": 1, "b": 2}</add>',
        "<think>Is it <add>?</think>Yes.",
        1,
    ),
    ("<add>{oops}</add>", "<add>{oops}</add>", 0),
    ("I add.", "I add.", 0),
]


@pytest.mark.parametrize(("text", "content", "calls"), CALLS)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_tool_calls_are_parsed_and_found_again(local, text, content, calls, is_streamed):
    async def run(row, client):
        answer = await agents.ask(client, tools=[ADD], stream=is_streamed)
        if is_streamed:
            choices = [chunk.choices[0] async for chunk in answer]
            assert len(choices) == 1
            reason, message = choices[0].finish_reason, choices[0].delta
        else:
            reason, message = answer.choices[0].finish_reason, answer.choices[0].message
        called = message.tool_calls or []
        assert message.content == content
        assert [json.loads(call.function.arguments) for call in called] == [{"a": 1, "b": 2}] * calls
        assert reason == ("tool_calls" if calls else "stop")
        # As another client would write it.
        written = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": "add", "arguments": call.function.arguments.replace(" ", "")},
            }
            for call in called
        ]
        again = {"role": "assistant", "content": message.content or "", **({"tool_calls": written} if called else {})}
        results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in called]
        await agents.ask(client, messages=[USER, again, *results])
        return 1

    first, second, last = scripted(local(run), [text, "3"])
    assert first["tools"] == [ADD]
    assert second["tools"] is None
    result = {"role": "tool", "content": "3", "name": "add"}
    assert second["context"] == [USER, {"role": "assistant", "content": text, "answer": 0}, *[result] * calls]
    assert (paid(last), last["num_changed"]) == (1, 0)
    unread = int("oops" in text)
    assert (second["num_calls"], second["num_errors"]) == (calls + unread, unread)


@pytest.mark.parametrize(("text", "content", "calls"), CALLS)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_responses_are_answers_in_another_form(local, text, content, calls, is_streamed):
    tool = {"type": "function", **ADD["function"], "strict": True}

    async def run(row, client):
        named = {"model": "policy", "input": "hi", "instructions": "Add.", "tools": [tool], "max_output_tokens": 9}
        if is_streamed:
            async with client.responses.stream(**named) as stream:
                deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
                answer = await stream.get_final_response()
            assert "".join(deltas) == (content or "")
        else:
            answer = await client.responses.create(**named)
        assert (answer.status, answer.output_text) == ("completed", content or "")
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (7, 2)
        called = [item for item in answer.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in called] == [{"a": 1, "b": 2}] * calls
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in called]
        asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
        await client.responses.create(
            model="policy", input=[asked, *answer.output, *results], text={"verbosity": "low"}
        )
        return 1

    first, second, last = scripted(local(run), [text, "3"])
    assert (first["context"], first["max_tokens"]) == ([{"role": "system", "content": "Add."}, USER], 9)
    assert first["tools"] == [ADD]
    result = {"role": "tool", "content": "3", "name": "add"}
    assert second["context"] == [USER, {"role": "assistant", "content": text, "answer": 0}, *[result] * calls]
    assert (paid(last), last["num_changed"]) == (1, 0)


def test_a_response_that_was_cut_is_incomplete(local):
    async def run(row, client):
        answer = await client.responses.create(model="policy", input="hi")
        return float(answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens")

    assert paid(scripted(local(run), ["x"], is_complete=False)[-1]) == 1


@pytest.mark.parametrize(
    ("named", "line"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported; send all items of the conv"),
        ({"conversation": "conv_1"}, "conversation is not supported"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt is not supported"),
        ({"extra_body": {"n": 2}}, "n is not supported; a response is one answer"),
        ({"tools": [{"type": "web_search"}]}, "a tool of type 'web_search' is not supported; expected function"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "an item of type 'item_reference' is not supported"),
        ({"temperature": 0}, "temperature=0 is not rollout.temperature"),
        ({"text": {"format": {"type": "json_object"}}}, "response_format={'type': 'json_object'} is not supported"),
        ({"input": []}, "the list of messages is empty"),
        ({"input": 3}, "the request is not valid"),
        ({"input": [3]}, "the request is not valid"),
    ],
)
def test_a_response_that_cannot_be_sampled_is_refused_in_one_line(local, named, line):
    async def run(row, client):
        import openai

        try:
            await client.responses.create(**{"model": "policy", "input": "hi", **named})
        except openai.BadRequestError as error:
            await agents.ask(client, messages=[{"role": "user", "content": error.body["message"]}])
        return 0

    message = scripted(local(run), ["x"])[0]["context"][0]["content"]
    assert line in message
    assert "\n" not in message


def test_completions_read_a_message_of_a_user(local):
    async def run(row, client):
        one = await client.completions.create(model="policy", prompt="Once", stop="!")
        more = await client.completions.create(model="policy", prompt="a", n=2)
        streamed = [chunk async for chunk in await client.completions.create(model="policy", prompt="c", stream=True)]
        assert [choice.index for choice in more.choices] == [0, 1]
        assert (more.usage.prompt_tokens, more.usage.completion_tokens) == (7, 4)
        models = await client.models.list()
        assert [model.id for model in models.data] == ["policy"]
        return float(one.choices[0].text + "".join(choice.text for choice in more.choices) == "012") + len(streamed)

    turns = scripted(local(run), "0123")
    texts = [turn["context"][0]["content"] for turn in turns[:-1]]
    assert texts == ["Once", "a", "a", "c"]
    assert turns[0]["stop"] == ["!"]
    assert paid(turns[-1]) == 2


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize(
    ("conversation", "answers", "num_changed"),
    [
        ([USER, assistant("same"), {"role": "user", "content": "more"}], {1: 2}, 0),
        ([assistant("same")], {0: 0}, 0),
        ([{"role": "user", "content": "b"}, assistant("same")], {1: 1}, 0),
        ([{"role": "user", "content": "c"}, assistant("same")], {1: 2}, 0),
        ([USER, assistant("same "), USER, assistant("same")], {3: 2}, 1),
        ([USER, assistant("other"), assistant("other")], {}, 1),
        ([USER, {"role": "user", "content": "same"}], {}, 0),
        ([USER, assistant(None), assistant("", tool_calls=[])], {1: 3, 2: 3}, 0),
    ],
)
def test_an_answer_is_the_newest_equal_one_after_the_same_messages(local, conversation, answers, num_changed):
    async def run(row, client):
        # Of four answers, the first three are equal.
        await agents.ask(client, messages=[{"role": "system", "content": "a"}, assistant("shown")])
        await agents.ask(client, messages=[{"role": "user", "content": "b"}])
        await agents.ask(client)
        await agents.ask(client, messages=[{"role": "system", "content": "a"}, assistant("shown")])
        for _ in range(2):
            await agents.ask(client, messages=conversation)

    if conversation == [assistant("same")]:  # nothing was asked before it
        answers = {0: 2}
    *_, first, again = scripted(local(run), ["same", "same", "same", "", "done"])
    found = {place: entry["answer"] for place, entry in enumerate(first["context"]) if "answer" in entry}
    assert (found, first["num_changed"]) == (answers, num_changed)
    assert (again["context"], again["num_changed"]) == (first["context"], 0)


def test_requests_at_the_same_time_are_answered_one_after_another(worker):
    turns = play(worker(), {"kind": "many_at_once", "number": 30}, most=99)
    assert [turn.context[0]["content"] for turn in turns[:-1]] == list(map(str, range(30)))
    assert paid(turns[-1]) == 30


def test_an_episode_is_the_same_however_long_it_takes(worker):
    played = [play(worker("slow"), {"text": "go", "pause": pause}) for pause in (0.0, 0.1)]
    assert played[0] == played[1]
    assert played[0][-1].rewards == [1.0, 2.0, 3.0]
    assert [turn.num_changed for turn in played[0]] == [0, 0, 1, 0]


def test_a_function_without_async_and_one_with_a_seed(worker):
    assert paid(play(worker("plain"), {"kind": "talks"})[-1]) == 1
    first, _ = play(worker("seeded"), seed=41)
    assert first.context == [{"role": "user", "content": "41"}]


def test_many_episodes_run_at_the_same_time(worker):
    environment = worker("together")
    numbers = range(50)
    environment.open({number: ({"text": str(number), "count": 50}, 0) for number in numbers})
    turns = environment.step(dict.fromkeys(numbers, "x"))
    assert [turn.context[0]["content"] for turn in turns.values()] == list(map(str, numbers))
    assert [*environment.finish(numbers).values()] == [EnvironmentTurn(ending="completed")] * 50


@pytest.mark.parametrize(
    ("temperature", "asked", "is_accepted"), [(1.0, 1, True), (0.7, 0.7, True), (0.7, 1, False), (None, 1, False)]
)
def test_only_the_temperature_of_sampling_may_be_asked_for(local, temperature, asked, is_accepted):
    session = local(agents.run, temperature=temperature)
    [turn] = session.call("open", [{"episode": 1, "row": {"kind": "asks", "named": {"temperature": asked}}, "seed": 0}])
    assert (turn["context"] == [USER]) == is_accepted
    session.call("finish", [{"episode": 1}])


# What is refused


@pytest.mark.parametrize(
    ("named", "line"),
    [
        ({"model": "gpt-5"}, r"^404 model_not_found: the model 'gpt-5' does not exist; the only one is 'policy'$"),
        ({"temperature": 0.5}, r"^400 None: temperature=0.5 is not rollout.temperature, that of sampling; leave it"),
        ({"temperature": 0}, "temperature=0 is not"),
        (
            {"top_p": 0.9},
            r"^400 None: top_p=0.9 is not supported; leave it out, or set 1: the policy is sampled as it is trained",
        ),
        ({"top_p": 0}, "top_p=0 is not"),
        ({"presence_penalty": 0.1}, "presence_penalty=0.1 is not"),
        ({"frequency_penalty": -1}, "frequency_penalty=-1 is not"),
        ({"logit_bias": {"5": 1}}, "logit_bias={'5': 1} is not"),
        (
            {"logprobs": True},
            "logprobs=True is not supported; leave it out: .*the trainer keeps the log probabilities$",
        ),
        ({"response_format": {"type": "json_object"}}, "response_format="),
        ({"extra_body": {"top_k": 40}}, "top_k=40"),
        ({"extra_body": {"min_p": 0.1}}, "min_p=0.1"),
        ({"extra_body": {"repetition_penalty": 1.1}}, "repetition_penalty=1.1"),
        ({"extra_body": {"guided_regex": "a*"}}, "guided_regex"),
        (
            {"tool_choice": "required", "tools": [ADD]},
            "tool_choice='required' is not supported; leave it out, or set 'auto'",
        ),
        ({"parallel_tool_calls": False, "tools": [ADD]}, "parallel_tool_calls=False is not supported"),
        ({"tools": [{"type": "function", "function": {"parameters": 3}}]}, "^400 None: the request is not valid"),
        ({"n": 129}, "n=129 is not an integer from 1 to 128"),
        ({"n": 0}, "n=0 is not"),
        ({"max_tokens": 0}, "max_tokens=0 is not"),
        ({"max_tokens": "many"}, "max_tokens='many' is not"),
        ({"stop": [1]}, r"the request is not valid \(TypeError: "),
        ({"messages": []}, "the list of messages is empty"),
        ({"messages": "hi"}, "the request is not valid"),
        ({"messages": [{"role": "critic", "content": "no"}]}, "the role 'critic' is not one of system"),
        ({"messages": [{"role": "user", "content": 3}]}, "the content 3 is not a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "not valid"),
        ({"messages": [{"role": "user", "content": "x" * 1_000_001}]}, "a message has 1,000,001 characters; at most"),
    ],
)
def test_what_cannot_be_sampled_is_refused_in_one_line(worker, named, line):
    turns = play(worker(), {"kind": "asks", "named": named})
    message = turns[0].context[0]["content"]
    assert re.search(line, message), message
    assert "\n" not in message
    assert turns[-1].ending == "completed"


def test_what_changes_nothing_is_accepted(worker):
    named = {
        **{"seed": 3, "user": "me", "metadata": {"a": "b"}, "store": False, "top_p": 1, "presence_penalty": 0},
        **{"logprobs": False, "response_format": {"type": "text"}, "tools": [], "logit_bias": {}, "stop": None},
        "extra_body": {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    }
    assert play(worker(), {"kind": "asks", "named": named})[0].context == [USER]


DEEP = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "x"}], "user": None})[:-5]


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"body": "{oops"}, r"^400: the request is not valid \(JSONDecodeError: Expecting property name"),
        ({"body": "[]"}, "^400: the request is not valid"),
        ({"body": DEEP + "[" * 60 + "]" * 60 + "}"}, "^400: the request nests deeper than 50 levels$"),
        (
            {"body": DEEP + "[" * 100_000 + "]" * 100_000 + "}"},
            r"^400: the request is not valid \(RecursionError: maximum recursion",
        ),
        ({"body": '{"model": "\\ud800"}'}, "^400: the request holds a lone surrogate"),
        ({"body": "{}", "key": "sk-foreign"}, "^401: the API key is not that of an episode; pass client.api_key$"),
        ({"body": "{}", "key": ""}, "^401: "),
        (
            {"body": "{}", "path": "/embeddings"},
            "^404: POST /v1/embeddings is not supported; there are chat/completions, completions, responses$",
        ),
        (
            {"path": "/chat/completions", "method": "GET"},
            "^404: GET /v1/chat/completions is not supported; there are chat/completions, completions, responses$",
        ),
        (
            {"path": "/models", "method": "DELETE"},
            "^404: DELETE /v1/models is not supported; there are chat/completions, completions, responses$",
        ),
        ({"path": "/models", "method": "GET"}, "^200: $"),
    ],
)
def test_what_is_no_request_is_refused_in_one_line(worker, row, line):
    turns = play(worker(), {"kind": "sends", **row})
    assert re.search(line, turns[0].context[0]["content"]), turns[0].context
    assert turns[-1].ending == "completed"


@pytest.mark.parametrize(
    ("size", "line"), [(10_000_000, "^400: a message has 10,000,000 characters"), (20_000_000, "^413: .* 16 MiB$")]
)
def test_large_requests_are_refused(worker, size, line):
    assert re.search(line, play(worker(), {"kind": "is_large", "size": size})[0].context[0]["content"])


# Bad agents


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"kind": "raises"}, r"^run raised KeyError: 'no such move' \(agents.py:\d+\)$"),
        ({"kind": "raises_odd"}, r"^run raised Odd: odd \(agents.py:\d+\)$"),
        ({"kind": "exits"}, r"^run raised SystemExit: 3 \(agents.py:\d+\)$"),
        ({"kind": "interrupts"}, r"^run raised KeyboardInterrupt \(agents.py:\d+\)$"),
        ({"kind": "cancels_itself"}, r"^run raised CancelledError \(agents.py:\d+\)$"),
        ({"kind": "stops_iteration"}, r"^run raised RuntimeError: coroutine raised StopIteration"),
        ({"kind": "returns", "value": "float('nan')"}, "^run returned the reward nan; expected a finite number$"),
        ({"kind": "returns", "value": "float('inf')"}, "^run returned the reward inf; expected a finite number$"),
        ({"kind": "returns", "value": "'1.0'"}, "^run returned the reward '1.0'; expected a finite number$"),
        ({"kind": "returns", "value": "{'reward': 1}"}, "^run returned the reward {'reward': 1}; expected a finite"),
        (
            {"kind": "returns", "value": "[1, 2]"},
            r"^run returned \[1, 2\] after 1 calls of the policy; expected a reward after one or more",
        ),
        ({"kind": "returns", "value": "[]"}, r"^run returned \[\] after 1 calls of the policy; expected"),
        ({"kind": "returns", "value": "[None]"}, "^run returned the reward None; expected a finite number$"),
        ({"kind": "returns_a_coroutine"}, "^run returned the reward <coroutine object said"),
        ({"kind": "closes_its_client"}, "^run raised "),
        (
            {"kind": "runs_a_loop"},
            r"^run raised RuntimeError: asyncio.run\(\) cannot be called from a running event loop",
        ),
    ],
)
def test_a_fault_of_an_agent_ends_its_episode_with_one_line(worker, row, line):
    environment = worker()
    turns = play(environment, row)
    assert [turn.ending for turn in turns] == [None, "failed"]
    assert re.search(line, environment.failure), environment.failure
    assert "\n" not in environment.failure


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"kind": "hangs_at_once"}, "^run took longer than its limit to open or end an episode"),
        ({"kind": "raises_at_once"}, r"^run raised ValueError: no such row \(agents.py:\d+\)$"),
        ({"kind": "exits_at_once"}, r"^run raised SystemExit: nothing to do \(agents.py:\d+\)$"),
        (
            {"kind": "makes_no_call"},
            "^run returned 1.0 after 0 calls of the policy; expected a reward after one or more calls",
        ),
        ({"kind": "returns", "calls": 0, "value": "None"}, "^run returned None after 0 calls"),
        ({"kind": "returns", "calls": 0, "value": "[]"}, r"^run returned \[\] after 0 calls"),
        ({"kind": "no_such_kind"}, "^run raised AttributeError: "),
    ],
)
def test_an_episode_that_cannot_open_is_tried_again_and_fails(worker, monkeypatch, row, line):
    monkeypatch.setattr("kedge_tasks.environments.client.PAUSE", 0.01)
    environment = worker(timeout=0.7)
    assert play(environment, row) == []
    assert re.search(line, environment.failure), environment.failure


@pytest.mark.parametrize(
    ("function", "kind"),
    [("run", "hangs_later"), ("run", "stops_the_loop"), ("plain", "hangs"), ("plain", "spins")],
)
def test_a_late_agent_ends_its_episode(worker, function, kind):
    environment = worker(function, timeout=0.7)
    assert play(environment, {"kind": kind})[-1].ending == "timeout"


@pytest.mark.parametrize(
    ("kind", "reward"),
    [
        ("floods", 0.0),
        ("floods_at_once", 0.0),
        ("floods_whatever_happens", 0.0),
        ("hangs_after_the_end", 0.0),
        ("pays_after_the_end", 4.0),
    ],
)
@pytest.mark.parametrize("most", [0, 4])
def test_kedge_ends_an_episode_of_too_many_calls(worker, kind, reward, most):
    turns = play(worker(timeout=0.7), {"kind": kind, "by_call": most == 4}, most=most)
    assert (len(turns), paid(turns[-1])) == (most + 2, min(reward, most))


@pytest.mark.parametrize(("most", "reward"), [(4, 3.0), (2, 0.0), (3, 3.0)])
def test_an_agent_pays_for_what_it_was_sent(worker, most, reward):
    """An episode may end in the middle of a request for several answers, the first of which it cannot know."""
    turns = play(worker(), {"kind": "pays_after_the_end", "by_call": True, "n": 3}, most=most)
    assert (len(turns), paid(turns[-1])) == (most + 2, reward)
    assert len(turns[-1].rewards) == most


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("blocks", "^run: a call took over 4 s; it was killed$"),
        ("leaves_the_process", "^run: its process exited with status 3$"),
        ("cancels_all", "^run(: a call took over 4 s; it was killed| raised CancelledError)$"),
    ],
)
def test_what_cannot_be_interrupted_ends_the_run_with_one_line(worker, monkeypatch, kind, line):
    monkeypatch.setattr("kedge_tasks.environments.client.GRACE", 1.0)
    environment = worker(timeout=3.0)  # enough to start again on a busy machine
    with pytest.raises(EnvError, match=line):
        play(environment, {"kind": kind})
    assert paid(play(environment, {"kind": "returns", "value": "1"})[-1]) == 1  # in another process


@pytest.mark.parametrize("kind", ["exits", "stops_iteration"])
def test_a_fault_in_a_thread_is_one_line(worker, kind):
    environment = worker("plain")
    assert play(environment, {"kind": kind})[-1].ending == "failed"
    assert re.search(r"^plain raised (SystemExit: 3|StopIteration) \(agents.py:\d+\)$", environment.failure)


def test_a_thread_that_never_ends_does_not_hold_up_others(worker):
    environment = worker("plain", timeout=0.7)
    assert paid(play(environment, {"kind": "asks_whatever_happens"})[-1]) == 0.0
    assert paid(play(environment, {"kind": "talks"})[-1]) == 1


@pytest.mark.parametrize(("function", "kind"), [("run", "forks"), ("plain", "forks")])
def test_a_fork_does_not_answer(worker, function, kind):
    environment = worker(function)
    for _ in range(2):
        assert paid(play(environment, {"kind": kind})[-1]) == 1
    until = time.monotonic() + 10
    while len(members(environment._worker._process.pid)) > 1 and time.monotonic() < until:
        time.sleep(0.05)
    assert len(members(environment._worker._process.pid)) == 1


def test_processes_that_are_left_end_with_the_worker(tmp_path):
    environment = Environment(f"{FILE}:run", timeout=20.0, log=tmp_path / "reward.log")
    assert paid(play(environment, {"kind": "leaves_processes"})[-1]) == 1
    group = environment._worker._process.pid
    assert len(members(group)) > 2
    environment.close()
    assert all_end(group)


def test_a_key_ends_with_its_episode(worker):
    environment = worker()
    play(environment, {"kind": "keeps_its_client"})
    turns = play(environment, {"kind": "uses_the_kept_client"})
    assert turns[0].context[0]["content"] == "closed, 410 episode_ended"


@pytest.mark.parametrize(
    ("row", "calls"),
    [
        ({"kind": "cancels_its_request"}, ["never", "again"]),
        ({"kind": "drops_its_stream"}, ["hi", "hi"]),
        ({"kind": "leaves_a_task"}, ["hi"]),
        ({"kind": "leaves_a_request"}, None),
        ({"kind": "prints", "times": 300_000}, ["hi"]),
    ],
)
def test_an_episode_goes_on_after_a_careless_agent(worker, row, calls):
    turns = play(worker(), row)
    assert turns[-1].ending == "completed"
    assert calls is None or [turn.context[0]["content"] for turn in turns[:-1]] == calls


def test_a_request_that_is_given_up_before_its_turn_is_not_sampled(local):
    async def run(row, client):
        first, second = (asyncio.create_task(agents.said(client, text)) for text in ("first", "second"))
        await asyncio.sleep(0.2)
        second.cancel()
        await first
        await asyncio.sleep(0.1)
        await agents.said(client, "third")

    session = local(run)
    [turn] = session.call("open", [{"episode": 1, "row": {}, "seed": 0}])
    turns = [turn]
    while turns[-1]["ending"] is None:
        time.sleep(0.4)  # until it is given up
        turns += session.call("step", [{"episode": 1, "text": "x"}])
    assert [turn["context"][0]["content"] for turn in turns[:-1]] == ["first", "third"]


def test_the_row_is_a_copy(local):
    row = {"kind": "changes_its_row", "deck": [1, 2, 3]}
    session = local(agents.run)
    for _ in range(2):
        turns = scripted(session, ["x"], row)
        assert turns[0]["context"][0]["content"] == "2 left"


def test_an_episode_that_starts_again_ends_the_earlier_one(local):
    session = local(agents.run)
    for _ in range(2):
        session.call("open", [{"episode": 1, "row": {"kind": "floods"}, "seed": 0}])
    assert len(session._endpoint.episodes) == 1
    session.call("finish", [{"episode": 1}])
    assert not session._endpoint.episodes


def test_nothing_is_left_of_many_episodes(local):
    session = local(agents.run)

    def left():
        async def tasks():
            await asyncio.sleep(0.3)
            return len(asyncio.all_tasks())

        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), event_loop().run(tasks())

    def play_some(number):
        for kind in ("floods", "raises", "closes_its_client", "returns", "cancels_its_request") * number:
            row = {"kind": kind, "value": "1", "after": 0.001}
            scripted(session, ["x"], row)
            session.call("finish", [{"episode": 1}])

    play_some(1)
    before = left()
    play_some(10)
    assert left() == before


def test_an_agent_of_this_process_ends_with_its_environment():
    environment = Environment(agents.run)
    environment.open({1: ({"kind": "floods"}, 0)})
    environment.close()
    environment.close()

    async def names():
        return [str(task.get_coro()) for task in asyncio.all_tasks()]

    assert not any("_played" in name for name in event_loop().run(names()))


# What is an agent


def test_a_function_of_other_arguments_is_told_so(worker, monkeypatch):
    monkeypatch.setattr("kedge_tasks.environments.client.PAUSE", 0.01)
    environment = worker("misses_its_client")
    assert play(environment) == []
    assert re.search(r"^misses_its_client raised TypeError: .* takes 1 positional argument", environment.failure)


def test_a_function_without_arguments_makes_an_environment():
    environment = Environment(lambda size=3: worlds.Guess())
    assert environment.open({1: ({}, 0)})[1].messages[0]["content"] == "From 1 to 5.\n"


@pytest.mark.parametrize("package", ["openai", "aiohttp"])
def test_the_packages_are_named(monkeypatch, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(EnvError, match=r"^agents need the packages openai and aiohttp: pip install .*agents"):
        Session(agents.run, "run")

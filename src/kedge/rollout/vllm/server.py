"""The servers of a fleet: those that kedge starts, and those that are already running."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Protocol

from kedge.rollout.vllm import supervisor
from kedge.rollout.vllm.client import Client
from kedge_base.errors import EngineError
from kedge_base.run_folder.output import writing

PLUGIN = Path(__file__).with_name("plugin")
"""The folder with the vLLM plugin, in the `PYTHONPATH` of every server that reads weights from a folder."""
POLL_SECONDS = 0.2
WAIT_FOR_GIVEN = 60.0
"""Seconds to wait until a server that kedge did not start is back."""
LONGEST_END = 2 * supervisor.GRACE + 5.0
TAIL_BYTES = 1 << 16
_ERROR = re.compile(r"\b\w*(?:Error|Exception|Interrupt)\b: .+|\berror: .+")


class Server(Protocol):
    """A server, and how to wait until it answers."""

    @property
    def client(self) -> Client:
        """Sends requests to the server."""
        ...

    def start(self, stopped: Event) -> None:
        """Return once the server answers, after starting it if kedge owns it.

        Raises:
            EngineError: It does not answer.
        """
        ...

    def close(self) -> None:
        """End the server, if kedge started it."""
        ...


@dataclass(frozen=True)
class ServerOptions:
    """How kedge starts a server.

    Attributes:
        python: Python of the server's environment.
        model: Folder with the model's configuration; the weights come later.
        log: The file for the server's output.
        scratch: Folder to remove if kedge is killed.
        dtype: Number format of weights and activations.
        memory: Share of the device's memory.
        devices: Value of CUDA_VISIBLE_DEVICES; None leaves it.
        arguments: Additional arguments, as in a shell.
        start_timeout: Seconds within which it must answer.
        trust_remote_code: Run Python code that comes with the model.
        eager: Disable compilation: the server starts faster and samples more slowly.
    """

    python: str
    model: Path
    log: Path
    scratch: Path
    dtype: str
    memory: float = 0.3
    devices: str | None = None
    arguments: Sequence[str] = ()
    start_timeout: float = 900.0
    trust_remote_code: bool = False
    eager: bool = False

    def command(self, port: int) -> list[str]:
        """The server's command line; the user's arguments come last, and so take precedence."""
        flags = {
            "--model": str(self.model),
            "--host": "127.0.0.1",
            "--port": str(port),
            "--dtype": self.dtype,
            "--load-format": "dummy",  # a weight that no update sent would show as a mismatch at once
            "--logprobs-mode": "processed_logprobs",  # after temperature and forbidden tokens
            "--generation-config": "vllm",  # no filters or penalties from the model's folder
            "--weight-transfer-config": json.dumps({"backend": "kedge_folder"}),
            "--gpu-memory-utilization": f"{self.memory:g}",
            "--max-model-len": "auto",
        }
        switches = {
            "--tokens-only": True,
            "--trust-remote-code": self.trust_remote_code,
            "--enforce-eager": self.eager,
        }
        return [
            *(self.python, "-m", "vllm.entrypoints.openai.api_server"),
            *(part for flag in flags.items() for part in flag),
            *(name for name, is_on in switches.items() if is_on),
            *(part for text in self.arguments for part in shlex.split(text)),
        ]

    def environment(self) -> dict[str, str]:
        """The trainer's environment, with the plugin's folder and the routes for weight updates."""
        added = {
            "PYTHONPATH": str(PLUGIN),  # instead of kedge's own: its packages are for a different environment
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            **({} if self.devices is None else {"CUDA_VISIBLE_DEVICES": self.devices}),
        }
        return {**os.environ, **added}


@dataclass
class OwnServer:
    """A server that kedge starts, and restarts if it has ended.

    Attributes:
        options: How it is started.
    """

    options: ServerOptions
    _process: ServerProcess | None = field(default=None, init=False)
    _client: Client | None = field(default=None, init=False)

    @property
    def client(self) -> Client:
        """See `Server`."""
        assert self._client is not None, "started"
        return self._client

    def start(self, stopped: Event) -> None:
        """See `Server`."""
        self.close()
        options = self.options
        port = _free_port()
        self._process = ServerProcess(options, port)
        self._client = Client(f"http://127.0.0.1:{port}")
        started = time.monotonic()
        while not self._client.is_healthy():
            if not self._process.is_running:
                raise EngineError(
                    f"vLLM does not start: {options.python} {self._process.ending()}; its output is in {options.log}"
                )
            if time.monotonic() - started > options.start_timeout:
                raise EngineError(
                    f"vLLM does not answer after {options.start_timeout:g} s; its output is in {options.log}"
                )
            if stopped.wait(POLL_SECONDS):
                raise EngineError("the start of vLLM was broken off")

    def close(self) -> None:
        """See `Server`."""
        if self._process is not None:
            self._process.close()
            self._process = None


@dataclass
class GivenServer:
    """A server that was already running.

    Attributes:
        url: Its address.
        patience: Seconds to wait for an answer.
        sleep: Waits for this many seconds, or until the event is set; returns True if it was set.
    """

    url: str
    patience: float = WAIT_FOR_GIVEN
    sleep: Callable[[Event, float], bool] = Event.wait

    def __post_init__(self) -> None:
        self._client = Client(self.url)

    @property
    def client(self) -> Client:
        """See `Server`."""
        return self._client

    def start(self, stopped: Event) -> None:
        """See `Server`."""
        waited = 0.0
        pause = POLL_SECONDS
        while not self._client.is_healthy():
            if waited >= self.patience:
                raise EngineError(f"{self.url} has not answered for {self.patience:g} s; start the server again")
            if self.sleep(stopped, pause):
                raise EngineError(f"the wait for {self.url} was broken off")
            waited = waited + pause
            pause = min(2 * pause, 10.0)

    def close(self) -> None:
        """Do nothing: the server keeps running."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A supervised server: it ends with `close`, with this object, or with kedge, even by SIGKILL.

    Args:
        options: How it is started.
        port: Its port.
    """

    def __init__(self, options: ServerOptions, port: int) -> None:
        self._log = options.log
        with writing(self._log), self._log.open("ab") as output:
            self._start = output.tell()
            self._process = subprocess.Popen(
                # -I: ignore the working directory, and PYTHONPATH, which is meant for the server.
                [sys.executable, "-I", str(supervisor.__file__), str(options.scratch), *options.command(port)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=options.environment(),
                start_new_session=True,  # so that Ctrl-C in a terminal does not reach the server
            )
        self._finalizer = weakref.finalize(self, _end, self._process, os.getpid())

    @property
    def is_running(self) -> bool:
        """True if the server's main process is running."""
        return self._process.poll() is None

    def ending(self) -> str:
        """The server's exit status and the error in its output, without line breaks."""
        status = self._process.poll()
        how = f"exited with status {status}" if status is None or status < 128 else f"was killed by {_name(status)}"
        with self._log.open("rb") as output:
            output.seek(max(self._start, output.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = output.read().decode("utf-8", "replace")
        errors = _ERROR.findall(text)
        # Later errors only repeat that the engine failed; the first one says why.
        return f"{how}{f': {errors[0].strip()}' if errors else ''}"

    def close(self) -> None:
        """End the server and all of its processes."""
        self._finalizer()


def _name(status: int) -> str:
    with suppress(ValueError):
        return signal.Signals(status - 128).name
    return f"signal {status - 128}"


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Close the supervisor's input, and wait until it has ended the server."""
    if os.getpid() != owner:
        return  # a fork of the owner is collecting its copy
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(LONGEST_END)

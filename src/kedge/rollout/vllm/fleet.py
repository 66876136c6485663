"""One or several servers with the same weights, which share the requests; a server that dies only costs time.

Weights get to the servers as safetensors files in a folder that trainer and servers can read, by vLLM's own protocol.
"""

from __future__ import annotations

import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kedge.rollout.vllm.client import Client, ServerGone, ServerRefused
from kedge.rollout.vllm.server import Server
from kedge_base.errors import EngineError
from kedge_base.machine.durable import replaced_folder

SHARD_BYTES = 2 * 2**30
"""Size in bytes from which copied tensors are written to a file, to avoid a second copy of the model in memory."""


@dataclass
class _Member:
    """A server and its history.

    Attributes:
        server: The server.
        lock: Held while it is being started again.
        starts: How often it was started; a request that failed under a lower number is simply sent again.
        failures: Restarts since its last answer.
    """

    server: Server
    lock: threading.Lock = field(default_factory=threading.Lock)
    starts: int = 0
    failures: int = 0


class Fleet:
    """Servers that sample with the last published weights.

    Args:
        servers: The servers; at least one.
        dtype: Number format of the weights in the files.
        scratch: Folder for the files that servers read; it is removed at the end.
        max_restarts: Maximum number of consecutive restarts of a server without an answer in between.
        max_requests: Requests in flight at a time.
        say: Prints a line to the user.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        dtype: torch.dtype,
        scratch: Path,
        say: Callable[[str], None],
        max_restarts: int = 3,
        max_requests: int = 256,
    ) -> None:
        self._clean_up = weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
        self._members = [_Member(server) for server in servers]
        self._dtype = dtype
        self._folder = scratch / "weights"
        self._max_restarts = max_restarts
        self._max_requests = max_requests
        self._say = say
        self._stopped = threading.Event()
        self._version = ""
        self._num_restarts = 0
        self._seconds_lost = 0.0

    def publish(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> dict[str, float]:
        """Make every server sample with these weights from now on, after starting the servers if necessary.

        Returns:
            Seconds, by metric.

        Raises:
            EngineError: A server cannot be started or refuses the weights.
        """
        for member in self._members:
            if not member.starts:
                member.server.start(self._stopped)
                member.starts = 1
        started = time.perf_counter()
        self._write(tensors, version)
        seconds = {"time/publish_write": time.perf_counter() - started}
        with ThreadPoolExecutor(len(self._members)) as pool:
            list(pool.map(self._update, self._members))
        return {"time/publish": time.perf_counter() - started, **seconds}

    def ask(self, path: str, bodies: Sequence[Mapping[str, Any]], places: Sequence[int]) -> list[Any]:
        """Post requests, and return the answers in the same order.

        Args:
            path: The endpoint.
            bodies: The requests.
            places: A number per request; requests with the same number go to the same server.

        Raises:
            EngineError: A server is gone for good, or refuses a request.
        """
        pairs = zip(bodies, places, strict=True)
        assigned = [(body, self._members[place % len(self._members)]) for body, place in pairs]
        pool = ThreadPoolExecutor(min(self._max_requests, max(1, len(bodies))), thread_name_prefix="vllm")
        try:
            calls = [pool.submit(self._ask, path, body, member) for body, member in assigned]
            done, _ = wait(calls, return_when=FIRST_EXCEPTION)
            for call in done:
                call.result()
            return [call.result() for call in calls]
        except BaseException:  # includes Ctrl-C: no one will read the answers
            self._break_off()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def metrics(self) -> dict[str, float]:
        """Number and seconds of restarts since the last call."""
        counted = {"rollout/restarts": float(self._num_restarts), "time/restarts": self._seconds_lost}
        self._num_restarts = 0
        self._seconds_lost = 0.0
        return counted

    def close(self) -> None:
        """End the servers that kedge started, and remove the files of the weights."""
        self._break_off()
        for member in self._members:
            member.server.close()
        self._clean_up()

    def _ask(self, path: str, body: Mapping[str, Any], member: _Member) -> Any:
        while True:
            starts = member.starts
            try:
                answer = member.server.client.post(path, body)
            except ServerGone as error:
                self._recover(member, starts, error)
            except ServerRefused as error:
                raise EngineError(f"vLLM refuses a request: {error}") from error
            else:
                member.failures = 0
                return answer

    def _update(self, member: _Member) -> None:
        """Make a server load the current weights, after a restart if it is gone."""
        if (error := self._send(member)) is not None:
            self._recover(member, member.starts, error)

    def _recover(self, member: _Member, starts: int, error: Exception) -> None:
        """Restart a server with the current weights, unless another thread has done so since `starts`."""
        with member.lock:
            while member.starts == starts:
                if self._stopped.is_set():
                    raise EngineError("the requests to vLLM were broken off")
                if member.failures >= self._max_restarts:
                    raise EngineError(
                        f"vLLM is gone again after {member.failures} restarts without an answer ({error}); see vllm.log"
                    ) from error
                member.failures += 1
                self._say(f"A vLLM server is gone ({error}); it gets the current weights as soon as it is back")
                started = time.perf_counter()
                member.server.start(self._stopped)
                gone = self._send(member)
                member.starts += gone is None
                error = gone or error
                self._seconds_lost += time.perf_counter() - started
                self._num_restarts += 1

    def _send(self, member: _Member) -> ServerGone | None:
        """Make a server load the files written last; return the error if it is gone."""
        client = member.server.client
        folder = self._folder / self._version
        try:
            _start_update(client)
            client.post("update_weights", {"update_info": {"path": str(folder.resolve())}})
            client.post("finish_weight_update", {"weight_version": self._version})
            client.post("resume")
        except ServerGone as error:
            return error
        except ServerRefused as error:
            raise EngineError(f"vLLM refuses the weights: {error}") from error
        return None

    def _write(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> None:
        """Write the files of a version, and delete the previous version's."""
        try:
            with replaced_folder(self._folder / version, forced=False) as part:
                self._write_files(tensors, part)
        except OSError as error:
            raise EngineError(
                f"the weights for vLLM cannot be written to {self._folder} ({error.strerror or error}); name another "
                "folder in rollout.engine.folder"
            ) from error
        if self._version not in ("", version):
            shutil.rmtree(self._folder / self._version, ignore_errors=True)
        self._version = version

    def _write_files(self, tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
        shard: dict[str, Tensor] = {}
        size = 0
        number = 0
        for name, tensor in tensors:
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            # A copy, because a file must not hold two tensors that share memory, as tied weights do.
            shard[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
            size += shard[name].nbytes
            if size >= SHARD_BYTES:
                save_file(shard, folder / f"{number:05}.safetensors")
                shard = {}
                size = 0
                number += 1
        save_file(shard, folder / f"{number:05}.safetensors")

    def _break_off(self) -> None:
        self._stopped.set()
        for member in self._members:
            if member.starts:
                member.server.client.abort()


def _start_update(client: Client) -> None:
    """Pause a server, once the responses in flight are complete, and start an update of its weights.

    An update that an earlier run did not finish is finished first.
    """
    client.post("pause?mode=wait")
    try:
        client.post("start_weight_update")
    except ServerRefused as refusal:
        if "already active" not in str(refusal):
            raise
        with suppress(ServerRefused):
            client.post("finish_weight_update")
        client.post("start_weight_update")

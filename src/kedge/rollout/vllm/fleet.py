"""One or several servers with the same weights: requests are shared out, and a server that dies costs only time."""

from __future__ import annotations

import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from kedge.errors import EngineError
from kedge.rollout.vllm.client import ServerGone, ServerRefused
from kedge.rollout.vllm.server import Server
from kedge.rollout.vllm.transfer import Transfer

__all__ = ["Fleet"]


@dataclass
class _Member:
    """A server with what happened to it.

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
    """Servers that sample with the weights published last.

    Args:
        servers: At least one.
        transfer: Sends them weights.
        scratch: Folder for what the servers read, removed at the end.
        max_restarts: Restarts of a server in a row without an answer in between.
        max_requests: Requests in flight at a time.
        say: Prints a line to the user.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        transfer: Transfer,
        *,
        scratch: Path,
        max_restarts: int,
        max_requests: int,
        say: Callable[[str], None],
    ) -> None:
        self._clean_up = weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
        self._members = [_Member(server) for server in servers]
        self._transfer, self._max_restarts, self._max_requests, self._say = transfer, max_restarts, max_requests, say
        self._stopped = threading.Event()
        self._restarting = threading.Lock()
        self._num_restarts, self._seconds_lost = 0, 0.0

    def publish(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> dict[str, float]:
        """Let every server sample with these weights from now on; starts the servers first if necessary.

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
        seconds = self._transfer.prepare(tensors, version)
        failures = 0
        while (error := self._send()) is not None:
            if failures == self._max_restarts:
                raise EngineError(f"the weights do not reach vLLM: {error}") from error
            failures += 1
            for member in self._members:  # which one is gone shows when it is asked
                if not member.server.client.is_healthy():
                    self._recover(member, member.starts, error)
        return {"time/publish": time.perf_counter() - started, **seconds}

    def ask(self, path: str, bodies: Sequence[Mapping[str, Any]], places: Sequence[int]) -> list[Any]:
        """Post requests; return the answers in the same order.

        Args:
            path: The endpoint.
            bodies: The requests.
            places: For each request, a number; those with the same one go to the same server.

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
        except BaseException:  # includes Ctrl-C: nobody waits for the answers any more
            self._break_off()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def metrics(self) -> dict[str, float]:
        """Restarts since the last call and their seconds."""
        counted = {"rollout/restarts": float(self._num_restarts), "time/restarts": self._seconds_lost}
        self._num_restarts, self._seconds_lost = 0, 0.0
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

    def _recover(self, member: _Member, starts: int, error: Exception) -> None:
        """Bring a server back with the current weights, unless another thread already has since `starts`."""
        with member.lock:
            while member.starts == starts:
                if self._stopped.is_set():
                    raise EngineError("the requests to vLLM were broken off")
                if member.failures >= self._max_restarts:
                    raise EngineError(
                        f"vLLM is gone again after {member.failures} restarts without an answer ({error}); "
                        "see vllm.log, or rollout.vllm.max_restarts"
                    ) from error
                member.failures += 1
                self._say(f"A vLLM server is gone ({error}); it gets the current weights as soon as it is back")
                began = time.perf_counter()
                member.server.start(self._stopped)
                error = self._send_to(member) or error
                self._seconds_lost += time.perf_counter() - began
                self._num_restarts += 1

    def _send_to(self, member: _Member) -> Exception | None:
        """Send the current weights to a server that is back; returns the error if it is gone again."""
        with self._restarting:  # an update by NCCL concerns all servers
            error = self._send(member)
        member.starts += error is None
        return error

    def _send(self, back: _Member | None = None) -> ServerGone | None:
        """Send the weights that were prepared last to all servers, or to one that is back; a server may be gone."""
        clients = [member.server.client for member in self._members]
        try:
            if back is None:
                self._transfer.send(clients)
            else:
                self._transfer.restore(back.server.client, clients)
        except ServerGone as error:
            return error
        except ServerRefused as error:
            raise EngineError(f"vLLM refuses the weights: {error}") from error
        return None

    def _break_off(self) -> None:
        self._stopped.set()
        for member in self._members:
            if member.starts:
                member.server.client.abort()

"""How weights get to the servers, by vLLM's own protocol: as files in a folder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from kedge.errors import EngineError
from kedge.rollout.vllm.client import Client, ServerRefused
from kedge.system.durable import replaced_folder

__all__ = ["FolderTransfer", "Transfer", "begin_update", "on_all"]

SHARD_BYTES = 2 * 2**30
"""Tensors are copied to the CPU and written in files of this size, so that no second copy of the model is in memory."""


class Transfer(Protocol):
    """Sends weights to servers."""

    @property
    def backend(self) -> str:
        """The backend of vLLM's weight updates that the servers must have."""
        ...

    def prepare(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> dict[str, float]:
        """Take the tensors, as far as that needs no server; return seconds by name."""
        ...

    def send(self, clients: Sequence[Client]) -> None:
        """Let servers sample with the weights that were prepared last.

        Raises:
            ServerGone, ServerRefused: See there.
        """
        ...

    def restore(self, client: Client, clients: Sequence[Client]) -> None:
        """The same for one server that was started again, among all of the fleet."""
        ...


class FolderTransfer:
    """Safetensors files in a folder that trainer and servers can read.

    The files of the last version stay, for a server that has to be started again.

    Args:
        folder: The folder; it is created.
        dtype: Number format of the weights on their way.
    """

    backend = "kedge_folder"

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder, self._dtype = folder, dtype
        self._current: Path | None = None
        self._version = ""

    def prepare(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> dict[str, float]:
        """Write the files; see `Transfer`."""
        started = time.perf_counter()
        target = self._folder / version
        try:
            with replaced_folder(target, forced=False) as part:
                self._write(tensors, part)
        except OSError as error:
            raise EngineError(
                f"the weights for vLLM cannot be written to {self._folder} ({error.strerror or error}); name another "
                "folder in rollout.vllm.folder"
            ) from error
        if self._current is not None and self._current != target:
            shutil.rmtree(self._current, ignore_errors=True)
        self._current, self._version = target, version
        return {"time/publish_write": time.perf_counter() - started}

    def send(self, clients: Sequence[Client]) -> None:
        """See `Transfer`."""
        assert self._current is not None, "prepared"
        update = {"update_info": {"path": str(self._current.resolve())}}

        def load(client: Client) -> None:
            begin_update(client)
            client.post("update_weights", update)
            client.post("finish_weight_update", {"weight_version": self._version})
            client.post("resume")

        on_all(load, clients)

    def restore(self, client: Client, clients: Sequence[Client]) -> None:
        """See `Transfer`."""
        self.send([client])

    def _write(self, tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
        shard: dict[str, Tensor] = {}
        size, number = 0, 0
        for name, tensor in tensors:
            floats = tensor.is_floating_point()
            # A copy, because a file must not hold two tensors that share memory, as tied weights do.
            shard[name] = tensor.detach().to("cpu", self._dtype if floats else tensor.dtype, copy=True).contiguous()
            size += shard[name].nbytes
            if size >= SHARD_BYTES:
                save_file(shard, folder / f"{number:05}.safetensors")
                shard, size, number = {}, 0, number + 1
        save_file(shard, folder / f"{number:05}.safetensors")


def begin_update(client: Client) -> None:
    """Pause a server, once the responses in flight are complete, and begin an update of its weights.

    An update that a former run began and did not finish is finished first.
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


def on_all(do: Any, clients: Sequence[Client]) -> None:
    """Call a function with every client at the same time; raises the first error."""
    if len(clients) == 1:
        do(clients[0])
        return
    with ThreadPoolExecutor(max(1, len(clients))) as pool:
        list(pool.map(do, clients))

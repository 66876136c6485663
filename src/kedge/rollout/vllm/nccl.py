"""Weights from GPU to GPU: a broadcast by NCCL from the trainer to all workers of all servers.

    rank 0: trainer   ranks 1 … n₁: workers of the first server   ranks n₁+1 …: of the second

The trainer makes the unique id of the group and sends it to the servers over HTTP, so that it needs nothing but torch:
no vLLM, and no rendezvous in which either side would have to unpickle.

Source: vLLM 0.32, distributed/weight_transfer/nccl_engine.py and nccl_common.py (`nccl_unique_id_b64`).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.cuda import nccl

from kedge.rollout.vllm.client import Client
from kedge.rollout.vllm.transfer import begin_update, on_all

__all__ = ["Group", "NcclTransfer", "TorchGroup"]


REFUSAL_SECONDS = 1.0
"""How long a server has to refuse a group before the trainer joins it, which cannot be interrupted."""


class Group(Protocol):
    """The trainer's end of a group of processes that it sends tensors to."""

    def unique_id(self) -> bytes:
        """A new id, which all members need."""
        ...

    def join(self, unique_id: bytes, size: int) -> None:
        """Join as rank 0; returns once all members have."""
        ...

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor to all members, in the same order everywhere."""
        ...

    def flush(self) -> None:
        """Wait until everything is sent."""
        ...


class TorchGroup:
    """The NCCL of torch.

    Args:
        device: The trainer's GPU, which no server may use: NCCL refuses two members on one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._communicator: Any = None

    def unique_id(self) -> bytes:
        """See `Group`."""
        return bytes(nccl.unique_id())

    def join(self, unique_id: bytes, size: int) -> None:
        """See `Group`."""
        with torch.cuda.device(self._device):
            self._communicator = nccl.init_rank(size, unique_id, 0)
            # vLLM's workers do the same after joining, and would wait for it.
            warm_up = torch.zeros(1, device=self._device)
            nccl.all_reduce([warm_up], [warm_up], comms=[self._communicator])
            torch.cuda.synchronize(self._device)

    def broadcast(self, tensor: Tensor) -> None:
        """See `Group`."""
        with torch.cuda.device(self._device):
            nccl.broadcast([tensor], 0, comms=[self._communicator])

    def flush(self) -> None:
        """See `Group`."""
        torch.cuda.synchronize(self._device)


@dataclass
class _Sent:
    """The weights to send: an iterable that can be read again while the trainer has not changed them."""

    tensors: Iterable[tuple[str, Tensor]]
    version: str


class NcclTransfer:
    """Sends every tensor by one broadcast; see `Transfer`.

    Args:
        group: The trainer's end.
        dtype: Number format of the weights on their way.
        device: The trainer's GPU.
    """

    backend = "nccl"

    def __init__(self, group: Group, dtype: torch.dtype, device: torch.device) -> None:
        self._group, self._dtype, self._device = group, dtype, device
        self._members: tuple[str, ...] = ()
        self._sent = _Sent((), "")

    def prepare(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> dict[str, float]:
        """Nothing is copied before it is sent; see `Transfer`."""
        self._sent = _Sent(tensors, version)
        return {}

    def send(self, clients: Sequence[Client]) -> None:
        """See `Transfer`."""
        names = tuple(client.url for client in clients)
        if names != self._members:
            self._members = ()
            self._connect(clients)
            self._members = names
        described = [(name, self._wire_dtype(tensor), tuple(tensor.shape)) for name, tensor in self._sent.tensors]
        info = {
            "names": [name for name, _, _ in described],
            "dtype_names": [str(dtype).removeprefix("torch.") for _, dtype, _ in described],
            "shapes": [list(shape) for _, _, shape in described],
        }
        on_all(begin_update, clients)
        try:
            self._broadcast(clients, {"update_info": info})
        except BaseException:
            self._members = ()  # a member may be stuck in a broadcast: the group is lost
            raise
        on_all(
            lambda client: client.post("finish_weight_update", {"weight_version": self._sent.version}),
            clients,
        )
        on_all(lambda client: client.post("resume"), clients)

    def restore(self, client: Client, clients: Sequence[Client]) -> None:
        """See `Transfer`. All servers join a new group with the one that was started again."""
        self._members = ()
        self.send(clients)

    def _wire_dtype(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype

    def _connect(self, clients: Sequence[Client]) -> None:
        """Make a group of the trainer and all workers."""
        sizes = [int(client.get("get_world_size")["world_size"]) for client in clients]
        unique_id = self._group.unique_id()
        shared = {
            "world_size": 1 + sum(sizes),
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "packed": False,
        }

        def enter(place: int) -> None:
            clients[place].post("shutdown_weight_transfer_engine")  # of a former group
            info = {**shared, "rank_offset": 1 + sum(sizes[:place])}
            clients[place].post("init_weight_transfer_engine", {"init_info": info})

        pool = ThreadPoolExecutor(len(clients))
        entering = [pool.submit(enter, place) for place in range(len(clients))]
        pool.shutdown(wait=False)
        wait(entering, timeout=REFUSAL_SECONDS, return_when=FIRST_EXCEPTION)
        _raise_early(entering)
        self._group.join(unique_id, 1 + sum(sizes))
        wait(entering)
        _raise_early(entering)

    def _broadcast(self, clients: Sequence[Client], update: dict[str, Any]) -> None:
        pool = ThreadPoolExecutor(len(clients))
        receiving = [pool.submit(client.post, "update_weights", update) for client in clients]
        pool.shutdown(wait=False)
        for _, tensor in self._sent.tensors:
            _raise_early(receiving)  # the others would wait for a member that has given up
            wire = tensor.detach().to(self._device, self._wire_dtype(tensor)).contiguous()
            self._group.broadcast(wire)
        for each in receiving:
            each.result()
        self._group.flush()


def _raise_early(calls: Sequence[Future[Any]]) -> None:
    """Raise the error of a call that has already failed; the others are still waiting for the trainer."""
    for call in calls:
        if call.done():
            call.result()

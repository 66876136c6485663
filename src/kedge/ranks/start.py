"""Joins the ranks of a run, and ends all of them when one fails.

    torchrun --nproc-per-node 2 -m kedge ppo …

torchrun, or another launcher, sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import atexit
import os
import time
from contextlib import suppress
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from kedge.ranks.ranks import ALONE, PATIENCE, Ranks
from kedge_base.errors import ConfigError, LostContactError
from kedge_base.machine.invocation import check_rank_variables, local_rank, num_ranks

Parallel = Literal["replicate", "shard"]

LAST_WORDS_SECONDS = 12.0
"""Maximum wait of a failed rank for the first one, which saves the run: torchrun ends all ranks once one has ended."""

FAILED = "kedge/failed"
ENDED = "kedge/ended"
"""Keys in the ranks' store: the number of failed ranks, and whether the first rank has ended."""

_store: Store | None = None


def join_ranks(parallel: Parallel = "replicate") -> Ranks:
    """Return the ranks of this run; the first call waits until all processes have joined.

    Args:
        parallel: `replicate`: every rank holds all weights. `shard`: a shard of each.

    Raises:
        ConfigError: The launcher's variables are incomplete, or the processes cannot reach each other.
    """
    if num_ranks() == 1:
        return ALONE
    check_rank_variables()
    _connect()
    return Ranks(dist.get_rank(), dist.get_world_size(), is_sharded=parallel == "shard")


def is_first_to_fail(error: BaseException) -> bool:
    """True if this rank should report why the run failed; always true for a single process.

    The rank with the error has priority; ranks that lost contact to it wait a moment before one of them reports that.
    """
    if _store is None:
        return True
    try:
        if is_lost_contact(error):
            _wait_for(FAILED, _store, seconds=1.0)
        return _store.add(FAILED, 1) == 1
    except (RuntimeError, ConnectionError):  # the store has ended with its process
        return False


def end_together(*, failed: bool) -> None:
    """The last call of a rank: a failed rank waits until the first one, which saves the run, has ended.

    Args:
        failed: The rank ends with an error, or by a signal.
    """
    if _store is None:
        return
    with suppress(RuntimeError, ConnectionError):
        if dist.get_rank() == 0:
            _store.set(ENDED, "1")
        _leave()  # so that ranks in the middle of an operation notice
        if failed:
            _wait_for(ENDED, _store, seconds=LAST_WORDS_SECONDS)


def is_lost_contact(error: BaseException) -> bool:
    """True if an error only says that another rank is gone."""
    texts = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
    return isinstance(error, LostContactError) or (
        isinstance(error, RuntimeError)
        and (isinstance(error, dist.DistError) or any(each in str(error) for each in texts))
    )


def _connect() -> None:
    global _store
    if _store is not None:
        return
    if torch.cuda.is_available():
        _check_device(torch.cuda.device_count())
    try:
        store, number, count = next(rendezvous("env://"))
        # torchrun keeps its store when it restarts all ranks, including addresses of ranks that are gone.
        store = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank() or 0)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=PATIENCE)
    except (ValueError, RuntimeError, ConnectionError) as error:
        raise ConfigError(f"the ranks of this run cannot join: {error}; start them with torchrun") from error
    _store = store
    atexit.register(_leave)  # gloo's threads would abort a process that ends without it


def _check_device(count: int) -> None:
    if (local_rank() or 0) >= count:
        raise ConfigError(
            f"LOCAL_RANK is {local_rank()}, and the last GPU of this machine is number {count - 1}: start one rank per "
            f"GPU (torchrun --nproc-per-node {count})"
        )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _wait_for(key: str, store: Store, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not store.check([key]):
        time.sleep(0.05)

"""Starts several ranks that have imported everything, where torchrun itself is not of interest."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from tests.forking import fork_context

LONGEST = 120.0
"""Seconds after which a rank counts as hanging."""


def forked_ranks(function: Callable[..., None], *arguments: Any, count: int = 2) -> list[int | None]:
    """Call a module's function on several ranks; the exit code of each, None for one that had to be killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        fork_context().Process(target=_as_rank, args=(number, count, port, function, arguments))  # type: ignore[attr-defined]
        for number in range(count)
    ]
    for rank in ranks:
        rank.start()
    codes = []
    for rank in ranks:
        rank.join(LONGEST)
        codes.append(rank.exitcode)
        rank.kill()
        rank.join()
    return codes


def _as_rank(number: int, count: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    function(*arguments)

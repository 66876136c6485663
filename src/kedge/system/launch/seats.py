"""The places on which a launcher starts ranks, and the variables that torchrun would set there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["News", "Place", "Seats", "in_order_of_ranks", "rank_variables"]


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        node: Identifies the machine.
        address: Of the machine, as the others reach it.
        devices: Numbers of the GPUs that belong to the rank; none on a CPU.
        visibility: The variables by which the machine's driver limits a process to GPUs.
    """

    node: str
    address: str
    devices: tuple[str, ...] = ()
    visibility: tuple[str, ...] = ()


@dataclass(frozen=True)
class News:
    """What a rank has written since the last time, and whether it has ended.

    Attributes:
        output: Standard output.
        errors: Standard error.
        status: Exit status, negative for a signal; None while it runs.
        is_lost: Its machine or the process that watches it is gone, and the rank with it.
    """

    output: bytes = b""
    errors: bytes = b""
    status: int | None = None
    is_lost: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self.is_lost or self.status is not None


class Seats(Protocol):
    """One process per rank, on any machines; in the order of the ranks."""

    @property
    def places(self) -> Sequence[Place]:
        """Where they are."""
        ...

    def free_port(self) -> int:
        """A port on the first rank's machine that nothing listens on."""
        ...

    def start(self, command: Sequence[str], variables: Sequence[Mapping[str, str]], folder: str) -> None:
        """Start the command on all, with each one's variables, in a working directory."""
        ...

    def news(self) -> list[News]:
        """The news of each rank."""
        ...

    def end(self, signum: int) -> None:
        """Send a signal to all that still run."""
        ...


def in_order_of_ranks(places: Sequence[Place]) -> list[int]:
    """The indices of the places, those on one machine together, by their devices."""
    nodes = list(dict.fromkeys(place.node for place in places))
    keys = [(nodes.index(place.node), [int(d) if d.isdecimal() else 0 for d in place.devices]) for place in places]
    return sorted(range(len(places)), key=lambda index: (keys[index], index))


def rank_variables(places: Sequence[Place], port: int) -> list[dict[str, str]]:
    """The variables that torchrun would set for each rank.

    All ranks of a machine see the GPUs of all of them, as with torchrun: rank n of a machine uses the n-th.

    Args:
        places: In the order of the ranks.
        port: A free port on the first rank's machine.
    """
    nodes = [place.node for place in places]
    is_single = len(set(nodes)) == 1
    all_variables = []
    for rank, place in enumerate(places):
        devices = [device for other in places if other.node == place.node for device in other.devices]
        all_variables.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_RANK": str(nodes[:rank].count(place.node)),
                "LOCAL_WORLD_SIZE": str(nodes.count(place.node)),
                "MASTER_ADDR": "127.0.0.1" if is_single else places[0].address,
                "MASTER_PORT": str(port),
                **({name: ",".join(devices) for name in place.visibility} if devices else {}),
            }
        )
    return all_variables

"""Ranks as children of Ray's actors: one actor per device, on any of the cluster's machines."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from kedge.errors import ConfigError, install_line
from kedge.system.launch.child import Child
from kedge.system.launch.seats import News, Place, in_order_of_ranks
from kedge.system.launch.supervise import Output, supervise

__all__ = ["RaySeats", "Seat", "launch_on_ray"]

FORWARDED = ("GLOO_", "NCCL_", "OMP_", "TOKENIZERS_PARALLELISM", "TORCH_", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
"""Beginnings of the variables that ranks on all machines take over from the launcher."""

VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

UNREACHABLE_SECONDS = 60.0
"""After which an actor that does not answer counts as lost. Ray notices a machine that is gone in about 30 s."""

PLACEMENT_SECONDS = 600.0
"""The longest wait for free devices, such as for a machine that comes back."""


class Seat:
    """An actor, which runs one rank as a child: a crash of CUDA does not take the actor along, and frees all memory.

    Ray runs its methods on the main thread, whose end the child notices.
    """

    _child: Child

    def place(self) -> Place:
        """Where this actor is."""
        import ray  # pyright: ignore[reportMissingImports]

        visibility = tuple(name for name in VISIBILITY if name in os.environ)
        devices = tuple(str(device) for device in ray.get_gpu_ids())
        return Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), devices, visibility)

    def free_port(self) -> int:
        """A port on this machine that nothing listens on."""
        with socket.socket() as place:
            place.bind(("", 0))
            return place.getsockname()[1]

    def start(self, command: Sequence[str], variables: Mapping[str, str], folder: str) -> str | None:
        """Start the rank; why that is impossible here, or None."""
        try:
            self._child = Child(command, variables, folder)
        except OSError as error:
            return str(error)

    def news(self) -> News:
        """As in `Child`."""
        return self._child.news()

    def end(self, signum: int) -> None:
        """As in `Child`."""
        self._child.end(signum)


class RaySeats:
    """One actor per rank.

    Args:
        ray: The module.
        actors: In any order.
    """

    def __init__(self, ray: Any, actors: Sequence[Any]) -> None:
        self._ray = ray
        places = ray.get([actor.place.remote() for actor in actors])
        order = in_order_of_ranks(places)
        self._actors = [actors[index] for index in order]
        self.places: Sequence[Place] = [places[index] for index in order]
        self._ended: dict[int, News] = {}

    def free_port(self) -> int:
        """As in `Seats`."""
        return self._ray.get(self._actors[0].free_port.remote())

    def start(self, command: Sequence[str], variables: Sequence[Mapping[str, str]], folder: str) -> None:
        """As in `Seats`.

        Raises:
            ConfigError: The command cannot be started on one of the machines, for example because a folder is missing.
        """
        calls = [
            actor.start.remote(list(command), dict(each), folder)
            for actor, each in zip(self._actors, variables, strict=True)
        ]
        for place, problem in zip(self.places, self._ray.get(calls), strict=True):
            if problem:
                raise ConfigError(f"a rank cannot be started on {place.address}: {problem}")

    def news(self) -> list[News]:
        """As in `Seats`."""
        calls = {rank: actor.news.remote() for rank, actor in enumerate(self._actors) if rank not in self._ended}
        answers = dict(self._ended)
        for rank, call in calls.items():
            answers[rank] = self._answer(call)
            if answers[rank].has_ended:
                self._ended[rank] = News(status=answers[rank].status, is_lost=answers[rank].is_lost)
        return [answers[rank] for rank in range(len(self._actors))]

    def end(self, signum: int) -> None:
        """As in `Seats`."""
        for rank, actor in enumerate(self._actors):
            if rank not in self._ended:
                actor.end.remote(signum)

    def _answer(self, call: Any) -> News:
        errors = self._ray.exceptions
        try:
            return self._ray.get(call, timeout=UNREACHABLE_SECONDS)
        except (errors.RayActorError, errors.GetTimeoutError):
            return News(is_lost=True)


def launch_on_ray(command: Sequence[str], *, address: str | None, actors: int | None, max_restarts: int) -> int:
    """Run a command as one rank per device of a Ray cluster; if one fails, all start again from the last checkpoint.

    Args:
        command: A stage with its options and --out.
        address: Of the cluster, or `auto` for the one on this machine; None: RAY_ADDRESS, or a new one on this machine.
        actors: Number of ranks; None: one per GPU of the cluster.
        max_restarts: How often they are started again, in all.

    Returns:
        Exit status.

    Raises:
        ConfigError: Ray is not installed or cannot be reached, or has too few devices.
    """
    ray = _connected(address, actors)
    output = Output()
    variables = {"OMP_NUM_THREADS": "1", **{k: v for k, v in os.environ.items() if k.startswith(FORWARDED)}}
    try:
        count, bundle = _layout(ray.cluster_resources(), actors)
        with _stopping() as stop:
            return supervise(
                lambda: _opened(ray, count, bundle, stop),
                command,
                folder=os.getcwd(),
                variables=variables,
                max_restarts=max_restarts,
                stop=stop,
                output=output,
            )
    finally:
        ray.shutdown()


def _connected(address: str | None, actors: int | None) -> Any:
    """Ray, connected to a cluster. Calls between its processes need its token; it uploads no statistics."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"--ray needs Ray: {install_line('ray')} ({error})") from error
    place = address or os.environ.get("RAY_ADDRESS") or "local"
    own = {"num_cpus": max(actors or 1, os.cpu_count() or 1), "include_dashboard": False} if place == "local" else {}
    try:
        ray.init(address=place, log_to_driver=False, logging_level="ERROR", **own)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        if place == "local":
            raise ConfigError(f"Ray cannot be started on this machine: {error}") from error
        raise ConfigError(f"the Ray cluster {place} cannot be reached: {error}") from error
    return ray


def _layout(resources: Mapping[str, float], actors: int | None) -> tuple[int, dict[str, float]]:
    """The number of actors, and what each needs: a GPU if the cluster has any, otherwise a CPU."""
    kind = "GPU" if resources.get("GPU") else "CPU"
    available = int(resources.get(kind, 0))
    if kind == "CPU" and actors is None:
        raise ConfigError("this Ray cluster has no GPUs; give the number of ranks, one per CPU: --actors 2")
    count = actors or available
    if count > available:
        raise ConfigError(f"--actors {count} needs {count} {kind}s; the Ray cluster has {available}")
    return count, {"GPU": 1.0, "CPU": 1.0} if kind == "GPU" else {"CPU": 1.0}


@contextmanager
def _opened(ray: Any, count: int, bundle: dict[str, float], stop: Callable[[], int | None]) -> Iterator[RaySeats]:
    """Actors in a placement group, on as few machines as possible; they end with the block."""
    from ray.util import scheduling_strategies as scheduling  # pyright: ignore[reportMissingImports]

    group = ray.util.placement_group([bundle] * count, strategy="PACK")
    actors: list[Any] = []
    try:
        _wait_for(group, count, bundle, stop)
        seat = ray.remote(Seat)
        for index in range(count):
            strategy = scheduling.PlacementGroupSchedulingStrategy(group, index)
            options = {"num_cpus": 1, "num_gpus": bundle.get("GPU", 0), "max_restarts": 0}
            actors.append(seat.options(**options, scheduling_strategy=strategy).remote())
        yield RaySeats(ray, actors)
    finally:
        for actor in actors:
            with suppress(ray.exceptions.RayError):
                ray.kill(actor)
        with suppress(ray.exceptions.RayError):
            ray.util.remove_placement_group(group)


def _wait_for(group: Any, count: int, bundle: Mapping[str, float], stop: Callable[[], int | None]) -> None:
    deadline = time.monotonic() + PLACEMENT_SECONDS
    while not group.wait(timeout_seconds=1):
        if signum := stop():
            raise SystemExit(128 + signum)
        if time.monotonic() > deadline:
            kind = "GPUs" if "GPU" in bundle else "CPUs"
            raise ConfigError(f"the Ray cluster has no {count} free {kind} after {PLACEMENT_SECONDS / 60:.0f} minutes")


@contextmanager
def _stopping() -> Iterator[Callable[[], int | None]]:
    """The signal by which the user asks to end, or None; a second one interrupts."""
    received: list[int] = []

    def on_signal(signum: int, _: FrameType | None) -> None:
        received.append(signum)
        if len(received) > 1:
            raise SystemExit(128 + signum)

    before = {signum: signal.signal(signum, on_signal) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0] if received else None
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)

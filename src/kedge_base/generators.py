"""The global random generators: their state, for checkpoints and repeated passes, and seeded calls."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a reward function's process imports this module, and needs no torch
    from torch import Tensor

_one_at_a_time = threading.RLock()
_switching = threading.Lock()
_outside: tuple[Mapping[str, Tensor], Mapping[str, Any]] | None = None
"""The state outside of the seeded call in progress, if any, which may run in another thread."""


def random_state() -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """Return the state of the global generators of Python and, if imported, NumPy and torch.

    A user's functions may use any of them. During a seeded call, this is the state outside the call.
    """
    with _switching:
        return _outside or _read()


def restore_random_state(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Restore the global generators; during a seeded call, it takes effect when the call ends."""
    global _outside
    with _switching:
        if _outside is None:
            _set(tensors, state)
        else:
            _outside = tensors, state


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the global generators after the block: a run reseeds them, but its caller may use them later."""
    import torch

    before = random_state()
    had_cuda = torch.cuda.is_initialized()
    try:
        yield
    finally:
        restore_random_state(*before)
        if torch.cuda.is_initialized() and not had_cuda:  # as if CUDA had been initialized with the caller's seed
            torch.cuda.manual_seed_all(torch.initial_seed())


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators for a user's call in the block, and restore them afterwards.

    The call's draws only depend on the seed, and its thread's later draws do not depend on the call. Calls from several
    threads take turns; draws that another thread makes at the same time outside of such a call are not protected.
    """
    global _outside
    with _one_at_a_time:
        with _switching:
            before = _read()
            is_inner = _outside is not None
            _outside = _outside or before
            seed_generators(seed)
        try:
            yield
        finally:
            with _switching:
                assert _outside is not None
                _set(*(before if is_inner else _outside))
                _outside = _outside if is_inner else None


def _reset_after_fork() -> None:
    """Reset the locks and the seeded call in a forked process, which lacks the thread that would end them."""
    global _one_at_a_time, _switching, _outside
    _one_at_a_time = threading.RLock()
    _switching = threading.Lock()
    _outside = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch; a library that is imported later is seeded on import."""
    global _latest
    _latest = seed
    random.seed(seed)
    for name in _SEEDED:
        if name in sys.modules:
            _seed(sys.modules[name])
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def _seed(library: Any) -> None:
    if library.__name__ == "torch":
        # `manual_seed` also notes the whole stack for every kind of accelerator that is not in use yet.
        has_accelerators = library.accelerator.current_accelerator() is not None
        (library if has_accelerators else library.default_generator).manual_seed(_latest)
    else:
        library.random.seed(_latest % 2**32)


class _SeedingFinder(MetaPathFinder):
    """Seeds a library as soon as it is imported, as in the middle of a user's call."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """The library's usual spec, with a loader that also seeds it; None for all other modules."""
        spec: Any = PathFinder.find_spec(name, path) if name in _SEEDED else None
        if spec is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), _seed(module))
        return spec


_SEEDED = ("numpy", "torch")
_FINDER = _SeedingFinder()
_latest = 0


def _read() -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(words), gauss]}
    tensors: dict[str, Tensor] = {}
    if numpy := sys.modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    if torch := sys.modules.get("torch"):
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        tensors = {"cpu": torch.get_rng_state(), **{f"cuda:{index}": each for index, each in enumerate(cuda)}}
    return tensors, state


def _set(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "numpy" in state:
        numpy = sys.modules["numpy"]
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "cpu" in tensors:
        torch = sys.modules["torch"]
        torch.set_rng_state(tensors["cpu"])
        for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
            if f"cuda:{index}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda:{index}"], index)

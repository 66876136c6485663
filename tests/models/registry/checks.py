"""What the trials of policies and of reward models share: rows, tolerances, comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from kedge.models.packing.trunk import Trunk
from kedge_base.errors import KedgeError
from tests.models.registry.outcome import Fault
from tests.models.registry.sizes import PAD, WINDOW, WORDS

# Nats. Sound architectures come to at most 1e-4, by rounding; every fault seen so far is above 1e-3.
LOGPROB_TOLERANCE = 3e-4
GRADIENT_TOLERANCE = 2e-3


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Report any error but kedge's own as a fault of this phase."""
    try:
        yield
    except (KedgeError, Fault):
        raise
    except Exception as error:
        raise Fault(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


def one_line(error: KedgeError, folder: Path) -> str:
    """The error's message without the folder's own path."""
    message = str(error).replace(str(folder), "FOLDER")
    if not message or "\n" in message:
        raise Fault(f"load: refused in {len(message.splitlines())} lines")
    return message


def check(name: str, ours: list[Tensor], theirs: list[Tensor], tolerance: float = LOGPROB_TOLERANCE) -> None:
    """Compare row by row; NaN differs from everything."""
    distances = [float((own - other).abs().max()) for own, other in zip(ours, theirs, strict=True) if other.numel()]
    if not all(distance <= tolerance for distance in distances):
        raise Fault(f"{name}: up to {max(distances):.1g} from plain transformers")


def layout(trunk: Trunk) -> str:
    """How the trunk reads rows within and beyond the window."""
    if not trunk.packs(WINDOW):
        return "padded" if trunk.pads else "equal lengths"
    return "packed" if trunk.packs(4 * WINDOW) else "packed in window"


def random_rows(lengths: tuple[int, ...]) -> list[list[int]]:
    """Random words; id 0 is among them, which shows whether a pad of 0 is assumed."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randint(PAD, WORDS, (length,), generator=generator).tolist() for length in lengths]
    return [[0 if token == PAD or place == 1 else token for place, token in enumerate(row)] for row in draws]

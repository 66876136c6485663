"""A run that only saves checkpoints, to be killed; also imported by the process that forks it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from kedge.training.checkpoint.store import Checkpoint, newest_valid, save_checkpoint

NUM_WEIGHTS = 100_000


def save_update(folder: Path, update: int, *, keep: int = 2, size: int = 12) -> Path:
    """Save a checkpoint whose contents are a function of its update."""
    return save_checkpoint(
        folder,
        update=update,
        kind="ppo",
        fingerprint={"data.prompts": "abc"},
        tensors={
            "policy": {"weight": torch.full((size,), float(update)), "shift": torch.tensor(update)},
            "optimizer": {"0.exp_avg": torch.full((size, 2), float(update), dtype=torch.bfloat16)},
        },
        state={"position": update, "kl_coef": update / 3},
        keep=keep,
    )


def is_consistent(checkpoint: Checkpoint) -> bool:
    update = checkpoint.update
    tensors = [*checkpoint.tensors("policy").values(), *checkpoint.tensors("optimizer").values()]
    return (
        checkpoint.state == {"position": update, "kl_coef": update / 3}
        and len(tensors) == 3
        and all(bool((tensor == torch.tensor(update, dtype=tensor.dtype)).all()) for tensor in tensors)
    )


def save_until_killed(folder: Path, saved: Path) -> None:
    """Continue from the newest checkpoint, update by update; `saved` holds the last saved one."""
    newest = newest_valid(folder, on_rejected=refuse)
    update = newest.update if newest else 0
    descriptor = os.open(saved, os.O_CREAT | os.O_WRONLY)
    while True:
        update += 1
        save_update(folder, update, size=NUM_WEIGHTS)
        os.pwrite(descriptor, b"%08d" % update, 0)  # a single write, so it is never read half-written


def refuse(line: str) -> None:
    """An `on_rejected` that fails."""
    raise AssertionError(line)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())

"""Checkpoints to which every rank writes its own part of weights and moments."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from kedge.system.ranks import Ranks
from kedge.system.ranks.sharding import ROWS, own_rows, shard_name
from kedge.training.checkpoint.files import FileRecord, tensor_pieces, write_files
from kedge.training.checkpoint.store import begin_checkpoint, output_errors

__all__ = ["save_shards", "shard_pieces"]


def save_shards(
    folder: Path,
    *,
    update: int,
    ranks: Ranks,
    groups: Mapping[str, Mapping[str, Tensor]],
    finish: Callable[[Mapping[str, Mapping[str, FileRecord]]], object],
) -> None:
    """Save a checkpoint together: the first rank starts it, each writes its shards, the first one completes it.

    All ranks call this. Each hashes what it writes, so that no one reads the files again. If one of them cannot write,
    all raise the same error; if one is killed, the others lose contact. In both cases no checkpoint is added.

    Args:
        folder: The run's checkpoint folder, which all ranks see.
        update: Number of the update just finished.
        ranks: The ranks.
        groups: Groups of tensors, in parts or not; of the latter the first rank's are saved.
        finish: Completes the checkpoint on the first rank; see `shards` of `save_checkpoint`.

    Raises:
        OutputError: A rank cannot write; on every rank.
    """
    needed = sum(each.numel() * each.element_size() for group in groups.values() for each in group.values())
    refused = partial(output_errors, folder, update=update, needed=needed)

    def begin() -> str | None:
        with refused():
            part = begin_checkpoint(folder, update=update, groups=groups)
            return None if part is None else str(part)

    begun = ranks.first(begin)
    if begun is None:  # there is a valid one
        ranks.first(lambda: finish({}))
        return
    try:
        found = ranks.messages(_write(Path(begun), ranks, groups))
        with refused():
            if problem := next((each["problem"] for each in found if each["problem"]), None):
                raise OSError(problem)
        records = {name: FileRecord(**record) for each in found for name, record in each["files"].items()}
        shards = {
            group: {
                name: records[name] for name in (shard_name(group, each, ranks.count) for each in range(ranks.count))
            }
            for group in groups
        }
        ranks.first(lambda: finish(shards))
    except BaseException:  # includes KeyboardInterrupt; re-raised
        if ranks.is_first:
            shutil.rmtree(begun, ignore_errors=True)
        raise


def _write(part: Path, ranks: Ranks, groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    """Write this rank's shards; their records, or why it cannot."""
    contents = {
        shard_name(group, ranks.number, ranks.count): shard_pieces(tensors, is_first=ranks.is_first)
        for group, tensors in groups.items()
    }
    try:
        return {"problem": None, "files": {name: vars(each) for name, each in write_files(part, contents).items()}}
    except OSError as error:
        return {"problem": f"rank {ranks.number}: {error.strerror or error}", "files": {}}


def shard_pieces(tensors: Mapping[str, Tensor], *, is_first: bool) -> Iterator[bytes | memoryview]:
    """The contents of one rank's file: its rows of sharded tensors; on the first rank, also the other tensors.

    Args:
        tensors: All tensors of the group, by name.
        is_first: This is the first rank.
    """
    parts: dict[str, Tensor] = {}
    begins: dict[str, object] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            rows = own_rows(tensor)
            if len(rows) or is_first:  # an empty tensor is written once
                parts[name] = tensor.to_local()
                begins[name] = {"saved_offsets": [rows.start, *[0] * (tensor.ndim - 1)]}
        elif is_first:
            parts[name], begins[name] = tensor, {"saved_offsets": [0] * tensor.ndim}
    return tensor_pieces(parts, metadata={"format": "pt", "DCP_VERSION": "1.0", ROWS: json.dumps(begins)})

"""Files of a checkpoint to which each rank writes its shards of weights and moments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.tensor import DTensor

from kedge.ranks import Ranks
from kedge.ranks.sharding import ROWS, own_rows, shard_name
from kedge.training.checkpoint.files import FileRecord, tensor_pieces, write_files


def write_shards(part: Path, groups: Mapping[str, Mapping[str, Tensor]], ranks: Ranks) -> dict[str, FileRecord]:
    """Write a file per group and rank; all ranks call this, and get the records of all files.

    Each rank hashes what it writes, so that no rank reads the files of others. If one of them cannot write, all raise
    the same error; if one is killed, the others lose contact.

    Args:
        part: A folder that all ranks see, with a folder for each group.
        groups: Groups of tensors; unsharded tensors are written by the first rank.
        ranks: The ranks.

    Raises:
        OSError: A rank cannot write.
    """
    contents = {
        shard_name(group, ranks.number, ranks.count): shard_pieces(tensors, is_first=ranks.is_first)
        for group, tensors in groups.items()
    }
    message: dict[str, object] = {}
    try:
        message["files"] = {name: vars(each) for name, each in write_files(part, contents).items()}
    except OSError as error:
        message["problem"] = f"rank {ranks.number}: {error.strerror or error}"
    told = ranks.messages(message)
    if problems := [each["problem"] for each in told if "problem" in each]:
        raise OSError(problems[0])
    return {name: FileRecord(**record) for each in told for name, record in each["files"].items()}


def shard_pieces(tensors: Mapping[str, Tensor], *, is_first: bool) -> Iterator[bytes | memoryview]:
    """The contents of one rank's file: its rows of sharded tensors; on the first rank, also the other tensors."""
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

"""Sharded weights: FSDP2 over the ranks, gathering of full weights, and stored shards.

Every rank holds a shard of each weight, its gradient and its moments. A layer's weights are gathered for its pass and
freed after it.

A stored group of tensors is one file, or, in a run with sharded weights, a folder with a file per rank:

    optimizer.safetensors
    optimizer/shard-00001-of-00002.safetensors

A shard's header says where its rows start, as in torch's distributed checkpoints in safetensors, so torch's
`HuggingFaceStorageReader` can also read such a folder. kedge writes them itself because torch's writer holds a second
copy of everything that it writes, gives no access to the bytes for hashing, and does not handle signals while it waits
for ranks.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from kedge.ranks.ranks import Ranks
from kedge_base.errors import DataError

if TYPE_CHECKING:  # importing it takes a second, which only runs with sharded weights should pay
    from torch.distributed.fsdp import FSDPModule

ROWS = "DCP_SHARDING_INFO"
"""The key in a header's metadata with the offset of each tensor's shard in torch's distributed checkpoints."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes that can be stored, by their name in a safetensors file."""


def shard(
    module: nn.Module,
    layers: Sequence[nn.Module],
    ranks: Ranks,
    *,
    device: torch.device,
    kept: Collection[nn.Parameter],
    in_bf16: Collection[nn.Module],
    offload: bool,
) -> None:
    """Split a module's weights over the ranks, in place. Optimizers are built afterwards.

    Args:
        module: Every forward pass is a call of this module, the same number of times on every rank.
        layers: Its layers, which are gathered one at a time.
        ranks: The ranks.
        device: The device of the weights.
        kept: Weights of the module that remain unsharded on every rank, because others share them.
        in_bf16: Layers whose weights are gathered in bf16; their shards, and the sums of their gradients, remain fp32.
        offload: Keep the shards in host memory between passes.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    mesh = init_device_mesh(device.type, (ranks.count,))
    whole_here = set(kept)
    rounded = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    place = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    for each in layers:
        policy = rounded if each in in_bf16 else MixedPrecisionPolicy()
        fully_shard(each, mesh=mesh, mp_policy=policy, offload_policy=place, ignored_params=whole_here)
    # Also freed after the forward pass: without a backward pass, gathered weights would otherwise remain and become
    # outdated.
    fully_shard(module, mesh=mesh, reshard_after_forward=True, offload_policy=place, ignored_params=whole_here)
    for each in _sharded([module]):
        # A sum, not a mean: losses are divided by the counts of the whole minibatch.
        each.set_force_sum_reduction_for_comms(True)
        each.set_gradient_divide_factor(1.0)


@torch.no_grad()
def fill_parts(module: nn.Module, whole: dict[str, Tensor], *, device: torch.device, offload: bool) -> None:
    """Fill a sharded module's weights, which are on the meta device; all ranks call this together.

    Args:
        module: A sharded module whose weights have no values yet.
        whole: On the first rank, their values by name; emptied in the process.
        device: The device of the weights.
        offload: Keep the parts in the host's memory.
    """
    parts: dict[str, Tensor] = {}
    for name, own in module.named_parameters():
        if isinstance(own, DTensor) and own.is_meta:
            full = whole.pop(name)
            here = torch.empty(own.shape, dtype=own.dtype, device=device) if full.is_meta else full.to(device)
            part = distribute_tensor(here, own.device_mesh, own.placements, src_data_rank=0)
            parts[name] = part.cpu() if offload else part
    module.load_state_dict(parts, strict=False, assign=True)


def shard_weight(module: nn.Module, name: str, ranks: Ranks, *, device: torch.device) -> None:
    """Split one weight of a module over the ranks, in place; the reader gathers it.

    Args:
        module: The module; all ranks have the same full weight.
        name: The weight's name in it.
        ranks: The ranks.
        device: The weight's device.
    """
    from torch.distributed.device_mesh import init_device_mesh

    weight = module.get_parameter(name)
    mesh = init_device_mesh(device.type, (ranks.count,))
    part = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None).clone()
    setattr(module, name, nn.Parameter(part, requires_grad=weight.requires_grad))


@contextmanager
def whole_weights(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within this context, every rank has the full weights, and passes without gradients need no communication.

    All ranks enter and leave it together. Changes to the weights within it are lost.

    Args:
        modules: Sharded modules, or others that contain them; each has been called before.
    """
    modules = list(modules)
    sharded = _sharded(modules)
    for each in sharded:
        each.set_reshard_after_forward(False, recurse=False)
        each.unshard()
    # Tensors that are still sharded are not FSDP's.
    others = [
        (part, name, weight)
        for module in modules
        for part in module.modules()
        for name, weight in part.named_parameters(recurse=False)
        if isinstance(weight, DTensor)
    ]
    for part, name, weight in others:
        setattr(part, name, nn.Parameter(whole(weight.detach()), requires_grad=False))
    try:
        yield
    finally:
        for part, name, weight in others:
            setattr(part, name, weight)
        for each in sharded:
            each.set_reshard_after_forward(True, recurse=False)
            each.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of a possibly sharded one; all ranks call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather(tensors: Iterable[Tensor], *, keep: bool) -> dict[Tensor, Tensor]:
    """Gather sharded tensors one at a time in host memory.

    All ranks call this with the same tensors in the same order. A rank that keeps none only holds one at a time.

    Args:
        tensors: Tensors, some of them in parts.
        keep: False for a rank that only helps others.

    Returns:
        For each tensor in parts the whole one; the others are not in it.
    """
    found: dict[Tensor, Tensor] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            gathered = tensor.full_tensor()
            if keep:
                found[tensor] = gathered.cpu()
    return found


def whole_state_dict(module: nn.Module, gathered: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return a module's state dict with gathered weights instead of shards; tied weights share their memory."""
    state = module.state_dict(keep_vars=True)
    return {name: gathered.get(tensor, tensor).detach() for name, tensor in state.items()}


def gathered_state(module: nn.Module, ranks: Ranks) -> dict[str, Tensor] | None:
    """Gather a sharded module's full state dict in host memory; all ranks call this together.

    Returns:
        The state dict on the first rank; None on the others, and for a module that is not sharded.
    """
    if not ranks.is_sharded:
        return None
    gathered = gather(module.parameters(), keep=ranks.is_first)
    return whole_state_dict(module, gathered) if ranks.is_first else None


def own_rows(tensor: DTensor) -> range:
    """Return this rank's rows of a sharded tensor: FSDP2 splits the first axis into shards of equal length."""
    (placement,) = tensor.placements
    assert placement.is_shard(0), placement
    total = tensor.shape[0]
    mesh = tensor.device_mesh
    length = -(-total // mesh.size())
    start = min(total, length * mesh.get_local_rank())
    return range(start, min(total, start + length))


@torch.no_grad()
def clip_shards(gradients: Sequence[Tensor], max_norm: float | None, ranks: Ranks) -> float:
    """Clip gradients, some of which may be sharded, to a joint norm; return the norm before clipping.

    Args:
        gradients: The gradients, in the same order on every rank.
        max_norm: Largest norm allowed; None or 0 only measures.
        ranks: The ranks.
    """
    local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    squares = [float(each.double().square().sum()) for each in local]
    is_part = [isinstance(each, DTensor) for each in gradients]
    own = sum(square for square, part in zip(squares, is_part, strict=True) if part)
    kept = sum(square for square, part in zip(squares, is_part, strict=True) if not part)
    norm = (ranks.sums([own])[0] + kept) ** 0.5
    if max_norm and norm > max_norm and norm < float("inf"):
        for each in local:
            each.mul_(max_norm / (norm + 1e-6))
    return norm


def _sharded(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    """Find the sharded modules in these and their submodules, outer ones first."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    return [each for module in modules for each in module.modules() if isinstance(each, FSDPModule)]


def shard_name(group: str, number: int, count: int) -> str:
    """Name the file of rank `number`, from 0, of `count`, relative to the checkpoint."""
    return f"{group}/shard-{number + 1:05d}-of-{count:05d}.safetensors"


@dataclass(frozen=True)
class _Piece:
    """Some rows of a tensor: the file, the tensor's name in it, the first row, and the shape."""

    path: Path
    name: str
    start: int
    shape: tuple[int, ...]


class StoredTensors(Mapping[str, Tensor]):
    """Tensors in files, by name; read as copies on the CPU, so that the files may be deleted afterwards.

    Args:
        files: Files, with a mapping from the names to use to the names in the file; None for all names, unchanged.

    Raises:
        DataError: Rows of a tensor are missing.
    """

    def __init__(self, files: Iterable[tuple[Path, Mapping[str, str] | None]]) -> None:
        self._opened: dict[Path, Any] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for path, names in files:
            self._add(path, names)
        for name, pieces in self._pieces.items():
            pieces.sort(key=lambda piece: piece.start)
            if sum(math.prod(piece.shape) for piece in pieces) != math.prod(self.shape(name)):
                raise DataError(f"{pieces[0].path.parent}: rows of {name} are missing")

    def _add(self, path: Path, names: Mapping[str, str] | None) -> None:
        file = self._opened[path] = safe_open(path, framework="pt")
        begins = json.loads((file.metadata() or {}).get(ROWS, "{}"))
        present = list(file.keys())
        for name, saved in ({each: each for each in present} if names is None else names).items():
            if saved not in present:
                continue
            found = file.get_slice(saved)
            shape = tuple(found.get_shape())
            start = begins[saved]["saved_offsets"][0] if shape and saved in begins else 0
            self._pieces.setdefault(name, []).append(_Piece(path, saved, start, shape))
            self._dtypes[name] = DTYPES[found.get_dtype()]

    def __getitem__(self, name: str) -> Tensor:
        """The whole tensor."""
        shape = self.shape(name)
        if not shape:
            piece = self._pieces[name][0]
            return self._opened[piece.path].get_tensor(piece.name).clone()
        return self.rows(name, range(shape[0]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __contains__(self, name: object) -> bool:
        return name in self._pieces

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the full tensor."""
        last = self._pieces[name][-1]
        return (last.start + last.shape[0], *last.shape[1:]) if last.shape else ()

    def dtype(self, name: str) -> torch.dtype:
        """The tensor's number format."""
        return self._dtypes[name]

    def rows(self, name: str, rows: range) -> Tensor:
        """Read only some rows of a tensor with at least one axis."""
        found = torch.empty((len(rows), *self.shape(name)[1:]), dtype=self._dtypes[name])
        for piece in self._pieces[name]:
            start = max(rows.start, piece.start)
            stop = min(rows.stop, piece.start + piece.shape[0])
            if start < stop:
                inside = self._opened[piece.path].get_slice(piece.name)[start - piece.start : stop - piece.start]
                found[start - rows.start : stop - rows.start] = inside
        return found


def part_for(tensors: Mapping[str, Tensor], name: str, own: Tensor) -> Tensor:
    """Return a tensor, or this rank's shard if `own` is sharded, without communication; of stored tensors, only the
    shard is read.
    """
    if not isinstance(own, DTensor):
        return tensors[name]
    mesh, placements = own.device_mesh, own.placements
    if not isinstance(tensors, StoredTensors):
        return distribute_tensor(tensors[name].to(own.device), mesh, placements, src_data_rank=None)
    rows = tensors.rows(name, own_rows(own)).to(own.device)
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=own.shape, stride=own.stride())

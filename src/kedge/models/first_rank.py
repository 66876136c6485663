"""Loads sharded models on the first rank; the others build them without weights, and receive the weights from it.

Host memory thus holds a single full copy for all ranks, instead of one per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from kedge.ranks import Ranks


@dataclass(frozen=True)
class Loaded:
    """A model, on the meta device if another rank has its weights.

    Attributes:
        model: The model.
        missing: Names of its newly initialized weights.
        on_every_rank: Every rank has loaded all weights, because the model cannot be built without them.
    """

    model: PreTrainedModel
    missing: set[str]
    on_every_rank: bool = False


def load_on_first(load: Callable[[], Loaded], build: Callable[[], PreTrainedModel], ranks: Ranks) -> Loaded:
    """Load a model on the first rank, and build it without weights on the others.

    If the models then differ, for example because the files determine whether weights are tied, every rank loads its
    own.

    Raises:
        KedgeError: The first rank cannot load it; raised on every rank.
    """
    found: list[Loaded] = []

    def load_here() -> dict[str, Any]:
        found.append(load())
        return {"outline": _outline(found[0].model), "missing": sorted(found[0].missing)}

    told = ranks.first(load_here)
    model = found[0].model if found else built_without_weights(build)
    fits = model is not None and _outline(model) == told["outline"] and not _loose_tensors(model)
    if ranks.largest(int(not fits)):
        return replace(found[0] if found else load(), on_every_rank=True)
    assert model is not None
    _tell_generation_config(model, ranks)
    return Loaded(model, set(told["missing"]))


def give_model(module: nn.Module, ranks: Ranks, *, device: torch.device, left: Collection[Tensor]) -> None:
    """Broadcast the first rank's weights and buffers in place, and the state of its random number generator.

    Args:
        module: The same module on all ranks; without weights on all but the first.
        ranks: The ranks.
        device: The device for the weights.
        left: Weights to leave out.
    """
    without = set(left)
    tensors = [*module.parameters(), *module.buffers()]
    give_tensors(module, [each for each in tensors if each not in without], device=device)
    # Only the first rank drew random numbers while loading, but all must initialize the same new head.
    torch.set_rng_state(torch.tensor(ranks.first(lambda: torch.get_rng_state().tolist()), dtype=torch.uint8))


def give_tensors(module: nn.Module, tensors: Iterable[Tensor], *, device: torch.device) -> None:
    """Broadcast the first rank's values of some of a module's weights and buffers, in place.

    Args:
        module: The same module on all ranks.
        tensors: The same weights and buffers on all ranks, in the same order; only the first rank's have values.
        device: The device for them.
    """
    for tensor in tensors:
        # Clone: a view of the file would keep the whole file in memory.
        here = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().clone()
        dist.broadcast(here.view(torch.uint8) if here.dtype == torch.bool else here, 0)
        if tensor.is_meta:
            _replace(module, tensor, here)
        else:
            tensor.data = here


def inner_weights(module: nn.Module, trunk: nn.Module) -> list[nn.Parameter]:
    """The weights that only a module's trunk reads, unlike those of tied output layers."""
    inner = set(trunk.modules())
    outer = {each for part in module.modules() if part not in inner for each in part.parameters(recurse=False)}
    return [each for each in trunk.parameters() if each not in outer]


def take_out(module: nn.Module, weights: Collection[nn.Parameter]) -> dict[str, Tensor]:
    """Move some of a module's weights to the meta device, in place; return their values by name."""
    wanted = set(weights)
    values = {name: each.detach() for name, each in module.named_parameters() if each in wanted}
    for each in weights:
        _replace(module, each, torch.empty_like(each, device="meta"))
    return values


def _replace(module: nn.Module, tensor: Tensor, new: Tensor) -> None:
    """Replace a weight or buffer by another tensor, everywhere in the module."""
    is_parameter = isinstance(tensor, nn.Parameter)
    new = nn.Parameter(new, requires_grad=tensor.requires_grad) if is_parameter else new
    for part in module.modules():
        table = cast("dict[str, Tensor | None]", part._parameters if is_parameter else part._buffers)
        for name in [name for name, each in table.items() if each is tensor]:
            table[name] = new


def built_without_weights(build: Callable[[], PreTrainedModel]) -> PreTrainedModel | None:
    """Build a model without weights; None if its code fails without them."""
    try:
        with torch.device("meta"):
            return build()
    except Exception:  # the model's code may raise anything
        return None


def _outline(model: nn.Module) -> list[Any]:
    """Describe a model's weights and buffers, with shapes and dtypes, and which of them are shared, in JSON types."""
    first: dict[int, str] = {}
    places = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [[name, list(each.shape), str(each.dtype), first.setdefault(id(each), name)] for name, each in places]


def _loose_tensors(model: nn.Module) -> int:
    """Count tensors without values that are neither weights nor buffers, and would never receive any."""
    attributes = (each for part in model.modules() for each in vars(part).values())
    return sum(isinstance(each, Tensor) and each.is_meta for each in attributes)


def _tell_generation_config(model: PreTrainedModel, ranks: Ranks) -> None:
    """Copy the first rank's generation settings, which name stop tokens, to all ranks."""
    settings = getattr(model, "generation_config", None)

    def tell() -> dict[str, Any] | None:
        derived = getattr(settings, "_from_model_config", False)
        return None if settings is None else {"settings": settings.to_dict(), "derived": derived}

    told = ranks.first(tell)
    if told is not None and not ranks.is_first:
        model.generation_config = GenerationConfig.from_dict(told["settings"])
        model.generation_config._from_model_config = told["derived"]

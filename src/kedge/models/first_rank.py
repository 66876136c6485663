"""Sharded models are loaded by the first rank; the others build them without weights and receive theirs from it.

All ranks together then hold one whole copy in the memory of the host, instead of one each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from kedge.system.ranks import Ranks


@dataclass(frozen=True)
class Loaded:
    """A model, on the meta device if another rank has its weights.

    Attributes:
        model: The model.
        missing: Names of its newly initialized weights.
        on_every_rank: Each rank has loaded all weights, because the model cannot be built without them.
    """

    model: PreTrainedModel
    missing: set[str]
    on_every_rank: bool = False


def load_on_first(load: Callable[[], Loaded], build: Callable[[], PreTrainedModel], ranks: Ranks) -> Loaded:
    """Load a model on the first rank, and build it without weights on the others.

    If it is then not the same model on all ranks, such as where the files decide whether weights are tied, all load it.

    Raises:
        KedgeError: The first rank cannot load it; on every rank.
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


def give_model(module: nn.Module, ranks: Ranks, *, device: torch.device, left: Collection[Tensor] = ()) -> None:
    """Give all ranks the first one's weights and buffers, in place, and the state of its random numbers.

    Args:
        module: The same on all ranks; without weights on all but the first.
        ranks: The ranks.
        device: Where the weights are to be.
        left: Weights that are not given.
    """
    without = set(left)
    tensors = [*module.parameters(), *module.buffers()]
    give_tensors(module, [each for each in tensors if each not in without], device=device)
    # Loading draws random numbers, which the next new head must not notice.
    torch.set_rng_state(torch.tensor(ranks.first(lambda: torch.get_rng_state().tolist()), dtype=torch.uint8))


def give_tensors(module: nn.Module, tensors: Iterable[Tensor], *, device: torch.device) -> None:
    """Give all ranks the first one's values of some weights and buffers of a module, in place.

    Args:
        module: The same on all ranks.
        tensors: The same of its weights and buffers, in the same order; on all but the first without values.
        device: Where they are to be.
    """
    for tensor in tensors:
        # A copy: a view of the file would keep all of it in memory.
        here = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().clone()
        dist.broadcast(here.view(torch.uint8) if here.dtype == torch.bool else here, 0)
        if tensor.is_meta:
            _replace(module, tensor, here)
        else:
            tensor.data = here


def inner_weights(module: nn.Module, trunk: nn.Module) -> list[nn.Parameter]:
    """The weights of a module's trunk that nothing else reads, as tied output layers do."""
    inner = set(trunk.modules())
    outer = {each for part in module.modules() if part not in inner for each in part.parameters(recurse=False)}
    return [each for each in trunk.parameters() if each not in outer]


def take_out(module: nn.Module, weights: Collection[nn.Parameter]) -> dict[str, Tensor]:
    """Put some of a module's weights on the meta device, in place; return them by name."""
    wanted = set(weights)
    values = {name: each.detach() for name, each in module.named_parameters() if each in wanted}
    for each in weights:
        _replace(module, each, torch.empty_like(each, device="meta"))
    return values


def _replace(module: nn.Module, tensor: Tensor, new: Tensor) -> None:
    """Put another tensor in the place, or places, of a weight or buffer."""
    is_parameter = isinstance(tensor, nn.Parameter)
    new = nn.Parameter(new, requires_grad=tensor.requires_grad) if is_parameter else new
    for part in module.modules():
        table = cast("dict[str, Tensor | None]", part._parameters if is_parameter else part._buffers)
        for name in [name for name, each in table.items() if each is tensor]:
            table[name] = new


def built_without_weights(build: Callable[[], PreTrainedModel]) -> PreTrainedModel | None:
    """A model without weights; None if its code fails without them."""
    try:
        with torch.device("meta"):
            return build()
    except Exception:  # the model's code may raise anything
        return None


def _outline(model: nn.Module) -> list[Any]:
    """The places of a model's weights and buffers with their shapes, and which of them are one, in JSON's types."""
    first: dict[int, str] = {}
    places = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [[name, list(each.shape), str(each.dtype), first.setdefault(id(each), name)] for name, each in places]


def _loose_tensors(model: nn.Module) -> int:
    """Tensors without values that are neither weights nor buffers, so that they would never get any."""
    attributes = (each for part in model.modules() for each in vars(part).values())
    return sum(isinstance(each, Tensor) and each.is_meta for each in attributes)


def _tell_generation_config(model: PreTrainedModel, ranks: Ranks) -> None:
    """Give all ranks the first one's generation settings, which name stop tokens."""
    own = getattr(model, "generation_config", None)

    def tell() -> dict[str, Any] | None:
        derived = getattr(own, "_from_model_config", False)
        return None if own is None else {"settings": own.to_dict(), "derived": derived}

    told = ranks.first(tell)
    if told is not None and not ranks.is_first:
        model.generation_config = GenerationConfig.from_dict(told["settings"])
        model.generation_config._from_model_config = told["derived"]

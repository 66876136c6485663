"""Batches as tensors and JSON, and back, for the checkpoints of a run that samples ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from kedge.algorithm.experience import Rollout
from kedge.data import Prompt
from kedge.rewards import ScoredTerms
from kedge.rewards.score import ScoredRollout
from kedge.stages.ppo.batch import SampledBatch

__all__ = ["packed", "unpacked"]

KINDS = {kind.__name__: kind for kind in (SampledBatch, ScoredRollout, ScoredTerms, Rollout)}
TENSOR, PROMPT, KIND, SAME = "tensor", "prompt", "kind", "same"


def packed(batch: SampledBatch, tensors: dict[str, Tensor], prompts: Sequence[Prompt]) -> Any:
    """A batch as JSON types. What it contains more than once is stored once.

    Args:
        batch: The batch.
        tensors: Its tensors are added here, by the names that the result refers to.
        prompts: All prompts of the run; those of the batch are stored as places among them.
    """
    places = {id(prompt): place for place, prompt in enumerate(prompts)}
    numbers: dict[int, int] = {}

    def pack(value: Any) -> Any:
        if isinstance(value, Prompt):
            return {PROMPT: places[id(value)]}
        if isinstance(value, Tensor) or is_dataclass(value):
            if id(value) in numbers:
                return {SAME: numbers[id(value)]}
            numbers[id(value)] = len(numbers)
        if isinstance(value, Tensor):
            name = f"{len(tensors)}"
            tensors[name] = value.contiguous()
            return {TENSOR: name}
        if is_dataclass(value):
            entries = {each.name: pack(getattr(value, each.name)) for each in fields(value)}
            return {KIND: type(value).__name__, "fields": entries}
        if isinstance(value, Mapping):
            return {"entries": {str(name): pack(entry) for name, entry in value.items()}}
        if isinstance(value, (list, tuple)):
            return [pack(entry) for entry in value]
        return value

    return pack(batch)


def unpacked(value: Any, tensors: Mapping[str, Tensor], prompts: Sequence[Prompt]) -> Any:
    """The value that `packed` returned this for; arguments as there."""
    found: list[Any] = []

    def unpack(value: Any) -> Any:
        if isinstance(value, list):
            return [unpack(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        if SAME in value:
            return found[value[SAME]]
        if PROMPT in value:
            return prompts[value[PROMPT]]
        if "entries" in value:
            return {name: unpack(entry) for name, entry in value["entries"].items()}
        place = len(found)
        found.append(None)
        if TENSOR in value:
            found[place] = tensors[value[TENSOR]]
        else:
            found[place] = KINDS[value[KIND]](**{name: unpack(entry) for name, entry in value["fields"].items()})
        return found[place]

    return unpack(value)

"""The policy's weights on their way to another program."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor
from torch.distributed.tensor import DTensor

from kedge.models.language import LanguageModel
from kedge.models.pretrained import quiet_transformers
from kedge.models.saving import save_model

__all__ = ["PolicyWeights", "save_architecture"]


class PolicyWeights:
    """All weights of a policy by their names in a checkpoint, one whole tensor at a time; can be read again.

    Tied weights are there under both names: a server may keep copies of its own, as vLLM does on a CPU. The value head
    is not among them.

    Args:
        policy: The policy.
        merged: Of a policy with an adapter: whether its weights are added to those of the base. False for the adapter's
            weights alone, for a copy of the policy on the same base.
    """

    def __init__(self, policy: LanguageModel, *, merged: bool = True) -> None:
        self._causal, self._adapter, self._merged = policy.causal, policy.adapter, merged

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._adapter is not None:
            yield from self._adapter.merged() if self._merged else self._adapter.weights().items()
            return
        for name, tensor in self._causal.state_dict().items():
            # Where it is sharded over ranks, all of them read the weights in the same order.
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_architecture(policy: LanguageModel, folder: Path) -> Path:
    """Save the policy's configuration, and its code if it has its own, without weights that are worth loading."""
    with quiet_transformers():
        save_model(policy.causal, folder, {}, final=False)
    return folder

"""The matrices inside a model, as the optimizer Muon tells them from the rest."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

__all__ = ["inner_matrices"]


def inner_matrices(module: nn.Module) -> list[nn.Parameter]:
    """The weights of the linear layers inside the transformers models of a module, those of adapters included.

    Embeddings, also where the output layer shares them, output layers and heads are not among them: their rows belong
    to tokens, or are a single one. Neither are the stacked matrices of experts.

    Args:
        module: A model, a policy with its critic, or any other module.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """
    models = [each for each in module.modules() if isinstance(each, PreTrainedModel)]
    outside = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    outside |= {id(each) for model in models if (layer := model.get_output_embeddings()) for each in layer.parameters()}
    layers = [
        layer for model in models for layer in model.base_model.modules() if isinstance(layer, nn.Linear | Conv1D)
    ]
    found = {id(layer.weight): layer.get_parameter("weight") for layer in layers}
    return [weight for name, weight in found.items() if name not in outside]

"""Prepares the models that a run does not train: their number format, and the ranks that hold them."""

from __future__ import annotations

from collections.abc import Iterable

from kedge.config import Config
from kedge.logs.progress import say
from kedge.models import HostWeights, LanguageModel, ScalarModel, hold_frozen
from kedge.models.adapters import is_frozen
from kedge.models.sharded import can_be_sharded, shard_model
from kedge.runs.run import Run, offloads

__all__ = ["freeze_models", "say_loaded_whole"]


def freeze_models(
    models: Iterable[LanguageModel | ScalarModel], config: Config, run: Run, *, can_rest: bool = True
) -> None:
    """Freeze models, hold them in `runtime.frozen_dtype`, and shard them if the run does so, in place.

    Scoring models that cannot be sharded stay whole.

    Args:
        models: They were checked, and nothing else shares their weights.
        config: The resolved configuration.
        run: Source of precision, device and ranks.
        can_rest: `runtime.offload_frozen` applies: all their passes are those of the reference or of scoring.

    Raises:
        ModelError: A policy cannot be sharded.
    """
    offload = can_rest and offloads(config, run.device)
    for model in models:
        if any(is_frozen(weight) for weight in model.parameters()):
            model.requires_grad_(False)  # the weights of its base are not its own
            continue
        hold_frozen(model, config.runtime.frozen_dtype, run.precision, run.ranks)
        say_loaded_whole(model)
        if isinstance(model, LanguageModel) or can_be_sharded(model):
            shard_model(model, run.ranks, run.precision, offload=offload)
        if offload and not run.ranks.is_sharded:
            model.host = HostWeights(model, run.device)


def say_loaded_whole(model: LanguageModel | ScalarModel) -> None:
    """Say so if every rank has loaded all weights of a model that is to be sharded."""
    if model.on_every_rank:
        kind = type(model.causal if isinstance(model, LanguageModel) else model.classifier).__name__
        say(f"{kind} cannot be built without its weights: every rank loads all of them before it keeps its part")

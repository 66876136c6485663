"""Configures a run's models: the adapter that it trains, and the number format and sharding of frozen models."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

import torch
from transformers import PreTrainedTokenizerBase

from kedge.config import Config
from kedge.data import Prompt
from kedge.data.prompts import prompt_columns
from kedge.models import (
    ActorCritic,
    AdapterSettings,
    HostWeights,
    LanguageModel,
    ScalarModel,
    hold_frozen,
    load_tokenizer,
)
from kedge.models.adapters import is_frozen
from kedge.models.frozen import hold_bases
from kedge.models.loading import Bases, LoadOptions
from kedge.models.sharded import can_be_sharded, shard_model
from kedge.ranks import Ranks
from kedge.rewards import Responses, WeightedReward
from kedge.runs.run import Run
from kedge_base.errors import RewardError
from kedge_base.machine.progress import say


def adapter_of(config: Config) -> AdapterSettings | None:
    """The adapter that a run trains; None if it trains all weights."""
    given = config.adapter
    if given.kind == "none":
        return None
    return AdapterSettings(given.kind, given.rank, given.alpha, given.target_modules, tuple(given.modules_to_save))


def loading_of(config: Config, run: Run) -> LoadOptions:
    """How the models that a run trains are loaded, and, without the adapter, those that share their bases."""
    adapter = adapter_of(config)
    trusted = config.runtime.trust_remote_code
    return {
        "device": run.device,
        "trust_remote_code": trusted,
        "adapter": adapter,
        "bases": adapter and Bases(trust_remote_code=trusted, on_host=rounds_bases(config)),
        "ranks": run.ranks,
    }


def tokenizer_of(config: Config, source: str) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer, with the configured chat template."""
    trusted = config.runtime.trust_remote_code
    return load_tokenizer(source, trust_remote_code=trusted, chat_template=config.data.chat_template)


def rounds_bases(config: Config) -> bool:
    """True if the bases under a run's adapters are stored in fewer bits, or may be with `auto`."""
    kind = config.adapter.kind
    dtype = config.adapter.base_dtype
    return kind != "none" and dtype != "fp32" and not (kind == "dora" and dtype == "auto")


NUM_TEXTS = 8
"""Number of prompts on which the rounding error of a reward model is measured."""


@contextmanager
def measuring_scores(
    rewards: WeightedReward, config: Config, prompts: Sequence[Prompt], ranks: Ranks
) -> Iterator[None]:
    """Measure and print how much the scores of reward models change in the block, which rounds their weights.

    Args:
        rewards: The reward models.
        config: The resolved configuration.
        prompts: Some of these are scored before and after.
        ranks: The ranks. Nothing is measured if they shard the models, which only the first rank has before the block.
    """
    formats = {config.runtime.frozen_dtype, config.adapter.base_dtype if config.adapter.kind != "none" else "auto"}
    measures = formats - {"auto", "fp32"} and not ranks.is_sharded
    before = _scores(rewards, prompts[:NUM_TEXTS]) if measures else {}
    yield
    after = _scores(rewards, prompts[:NUM_TEXTS]) if before else {}
    for name in before.keys() & after.keys():
        apart = [abs(one - other) for one, other in zip(before[name], after[name], strict=True)]
        rewards.models[name].model.rounding_error = error = statistics.fmean(apart)
        if error and formats & {"int8", "nf4"}:
            say(
                f"With weights in fewer bits, {name} scores {len(apart)} prompts differently by {error:.2g} on "
                f"average, {max(apart):.2g} at most; the scores have a standard deviation of "
                f"{statistics.pstdev(before[name]):.2g}."
            )


def hold_bases_of(
    models: Iterable[ActorCritic | LanguageModel | ScalarModel | None], config: Config, device: torch.device
) -> None:
    """Convert the bases under a run's adapters to `adapter.base_dtype` in place, unless all weights are trained.

    Afterwards the models are on the device, except frozen ones that are offloaded to host memory.

    Args:
        models: All models of the run; None is left out.
        config: The resolved configuration.
        device: The run's.
    """
    if not rounds_bases(config):
        return
    found = [each for each in models if each is not None]
    hold_bases(found, config.adapter.base_dtype, device)
    for model in found:
        if isinstance(model, ActorCritic) or model.host is nullcontext:
            model.to(device)


def _scores(rewards: WeightedReward, prompts: Sequence[Prompt]) -> dict[str, list[float]]:
    """Scores of the reward models for prompts without a response, except models that cannot read them."""
    nothing: list[list[int]] = [[] for _ in prompts]
    texts = [each.text for each in prompts]
    responses = Responses(texts, [""] * len(texts), nothing, nothing, [False] * len(texts), prompt_columns(prompts))
    found: dict[str, list[float]] = {}
    for name, source in rewards.models.items():
        with suppress(RewardError):
            found[name] = [each for each in source.score(responses) if isinstance(each, float)]
    return {name: scores for name, scores in found.items() if len(scores) == len(prompts)}


def freeze_models(
    models: Iterable[LanguageModel | ScalarModel], config: Config, run: Run, *, can_rest: bool = True
) -> None:
    """Freeze models in place, convert them to `runtime.frozen_dtype`, and shard them in a run with sharded models.

    Scoring models that cannot be sharded are replicated.

    Args:
        models: Checked models, whose weights are not shared.
        config: The resolved configuration.
        run: Source of precision, device and ranks.
        can_rest: `runtime.offload=frozen` applies, because the models are only used as the reference or for scoring.

    Raises:
        ModelError: A policy cannot be sharded.
    """
    offload = can_rest and run.offloads("frozen")
    for model in models:
        if any(is_frozen(weight) for weight in model.parameters()):
            model.requires_grad_(False)  # the weights of its base are not its own
            continue
        hold_frozen(model, config.runtime.frozen_dtype, run.precision, run.ranks)
        say_loaded_whole(model)
        if isinstance(model, LanguageModel) or can_be_sharded(model):
            shard_model(model, run.ranks, run.precision, offload=offload)
        if offload and not run.ranks.is_sharded:
            model.host = HostWeights(model, run.device).on_device


def say_loaded_whole(model: LanguageModel | ScalarModel) -> None:
    """Warn if every rank has loaded all weights of a model that is to be sharded."""
    if model.on_every_rank:
        kind = type(model.causal if isinstance(model, LanguageModel) else model.classifier).__name__
        say(f"{kind} cannot be built without its weights: every rank loads all of them before it keeps its part")

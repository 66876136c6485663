"""Loads the policy and its critic, if any: a head on the policy, or a model of its own."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from kedge.config import Config
from kedge.errors import ConfigError
from kedge.models import (
    ActorCritic,
    ScalarModel,
    ValueHead,
    initialize_head,
    load_language_model,
    load_scalar_model,
    load_value_head,
)
from kedge.models.loading import Bases
from kedge.models.sharded import shard_model
from kedge.rewards.source import ScoringModel
from kedge.runs.frozen import adapter_of, say_loaded_whole
from kedge.runs.run import Run
from kedge.stages.ppo.saved_critic import load_saved_critic, load_saved_head
from kedge.stages.ppo.settings import learns_in_returns_std, value_bins_of
from kedge.training.runtime import stream_seed

__all__ = ["load_actor_critic"]


def load_actor_critic(
    config: Config,
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    models: Sequence[ScoringModel],
    bases: Bases | None = None,
) -> tuple[ActorCritic, ValueHead | None]:
    """Policy and critic, if any, and the critic's new head, which has a learning rate of its own."""
    source, value = str(config.model), config.ppo
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(config.runtime.seed, "new heads"))
        policy = load_language_model(
            source,
            tokenizer=tokenizer,
            value_head=config.ppo.resolved_critic == "shared",
            bins=value_bins_of(config),
            device=run.device,
            trust_remote_code=config.runtime.trust_remote_code,
            adapter=adapter_of(config),
            bases=bases,
            ranks=run.ranks,
        )
        policy.check_sampling()
        critic, head = None, policy.value_head
        is_new = True
        if config.ppo.resolved_critic == "separate":
            critic, head = _load_critic(config, run, tokenizer, models, bases)
            is_new = not value.names_critic
        elif head is not None and value.names_critic:
            load_saved_head(config, run, policy, tokenizer)
            is_new = False
        elif head is not None and load_value_head(head, source):
            is_new = False
        elif head is not None:
            initialize_head(head, value.value_head_init)
    actor_critic = ActorCritic(policy, critic, value_gradient=value.value_gradient)
    if is_new and actor_critic.values_started is not None and learns_in_returns_std(config):
        actor_critic.values_started.fill_(False)
    if config.runtime.activation_checkpointing:
        actor_critic.checkpoint_activations()
    for model in [policy, *([] if critic is None else [critic])]:
        say_loaded_whole(model)
        shard_model(model, run.ranks, run.precision)
    return actor_critic, head


def _load_critic(
    config: Config,
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    models: Sequence[ScoringModel],
    bases: Bases | None,
) -> tuple[ScalarModel, ValueHead | None]:
    """A separate critic and its new head: a trained one or a copy of the reward model (no new head), or of the policy.

    A histogram starts with the values of a trained critic, or with the scores of the reward model.
    """
    critic, is_trained = _scalar_critic(config, run, tokenizer, models, bases)
    bins = value_bins_of(config)
    if bins is not None:
        critic.predict_histogram(bins)
    if is_trained:
        return critic, None
    head = critic.value_head
    assert head is not None, "a fresh model has a linear head"
    return critic, initialize_head(head, config.ppo.value_head_init)


def _scalar_critic(
    config: Config,
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    models: Sequence[ScoringModel],
    bases: Bases | None,
) -> tuple[ScalarModel, bool]:
    """The model that a separate critic starts from, and whether its head is trained (spec §7.34).

    `auto` copies the reward model if there is exactly one, with the policy's tokens, that has a value at each of them.
    """
    if config.ppo.names_critic:
        return load_saved_critic(config, run, tokenizer, bases), True
    wanted, misfit = config.ppo.critic_init, _misfit(models)
    if wanted == "reward" and misfit is not None:
        raise ConfigError(
            "ppo.critic_init=reward needs exactly one reward model, a decoder with the policy's tokenizer; the reward "
            f"has {misfit}; use ppo.critic_init=policy"
        )
    is_copy = wanted != "policy" and misfit is None
    if is_copy and bases is None:
        return copy.deepcopy(models[0].model).requires_grad_(True), True
    critic = load_scalar_model(
        models[0].model.source if is_copy else str(config.model),
        tokenizer=tokenizer,
        device=run.device,
        trust_remote_code=config.runtime.trust_remote_code,
        init="saved" if is_copy else "fresh",
        adapter=adapter_of(config),
        bases=bases,
        ranks=run.ranks,
    )
    return critic, is_copy


def _misfit(models: Sequence[ScoringModel]) -> str | None:
    """Why the reward models cannot be copied as the critic; None if they can."""
    if len(models) != 1:
        return str(len(models))
    if not models[0].shares_tokens:
        return "one with another tokenizer"
    return None if models[0].model.has_values else "one that only scores whole texts"

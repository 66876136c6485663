"""Loads the policy and its critic, if any: a head on the policy, or a separate model, new or already trained.

`kedge critic` writes both kinds: a sequence classifier with one label, and a policy with a value head beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from kedge.config import Config, with_values
from kedge.models import (
    ActorCritic,
    LanguageModel,
    PolicyWeights,
    ScalarModel,
    ValueHead,
    find_model,
    freeze_attention,
    initialize_head,
    load_language_model,
    load_scalar_model,
    load_tokenizer,
    load_value_head,
)
from kedge.models.heads import value_head_file
from kedge.models.language import ValueGradient
from kedge.models.loading import LoadOptions
from kedge.models.pretrained import PRIVILEGED_KEY, load_config
from kedge.models.sharded import shard_model
from kedge.models.sources import base_source, find_adapter
from kedge.rewards.model import ModelReward, share_tokens
from kedge.runs.frozen import say_loaded_whole
from kedge.runs.run import Run
from kedge.stages.ppo.settings import learns_in_returns_std, value_bins_of
from kedge.training.runtime import stream_seed
from kedge_base.errors import ConfigError, ModelError
from kedge_base.machine.progress import say


def load_actor_critic(
    config: Config,
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    models: Sequence[ModelReward],
    loading: LoadOptions,
) -> tuple[ActorCritic, ValueHead | None]:
    """Load the policy and the critic, if any; also return the critic's new head, which has its own learning rate."""
    source = str(config.model)
    value = config.ppo
    bins = value_bins_of(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(config.runtime.seed, "new heads"))
        policy = load_language_model(
            source,
            tokenizer=tokenizer,
            value_head=value.resolved_critic == "shared",
            bins=bins,
            **loading,
        )
        policy.trunk.check_decoding()
        critic = None
        head = policy.value_head
        is_new = True
        if value.resolved_critic == "separate":
            critic, is_trained = _load_critic(config, tokenizer, models, loading)
            if value.privileged is not None:
                setattr(critic.classifier.config, PRIVILEGED_KEY, value.privileged)
            if bins is not None:
                critic.predict_histogram(bins)  # initialized to the values of the scalar output, if that is trained
            if not is_trained:
                assert critic.value_head is not None, "a fresh model has a linear head"
                head = initialize_head(critic.value_head, "zero")
            is_new = not (is_trained and value.names_critic)
            if value.critic == "frozen_attention":
                freeze_attention(critic)
        elif head is not None and value.names_critic:
            load_saved_head(config, run, policy, tokenizer)
            is_new = False
        elif head is not None and load_value_head(head, source):
            # It may have been trained on a different reward; in units of the returns, its values are fitted to the
            # first returns.
            if not run.resumed:
                say(f"the critic continues with the value head that is saved with {source}")
        elif head is not None:
            initialize_head(head, "zero")
    gradients: Mapping[str, ValueGradient] = {"detached": "head", "readout": "none", "frozen": "none"}
    actor_critic = ActorCritic(policy, critic, value_gradient=gradients.get(value.critic.name, "trunk"))
    if is_new and actor_critic.values_started is not None and learns_in_returns_std(config):
        actor_critic.values_started.fill_(False)
    if config.runtime.recomputes:
        actor_critic.checkpoint_activations()
    for model in filter(None, (policy, critic)):
        say_loaded_whole(model)
        shard_model(model, run.ranks, run.precision)
    return actor_critic, head


def _load_critic(
    config: Config, tokenizer: PreTrainedTokenizerBase, models: Sequence[ModelReward], loading: LoadOptions
) -> tuple[ScalarModel, bool]:
    """Load the model that a separate critic starts from; also return whether its head is trained (spec §7.34).

    `auto` copies the reward model if there is exactly one, and it shares the policy's tokenizer and scores every token.
    """
    if config.ppo.names_critic:
        critic = load_saved_critic(config, tokenizer, loading)
        return critic, not critic.has_new_head
    wanted = config.ppo.critic_init
    obstacle = _why_not_copied(models)
    if wanted == "reward" and obstacle is not None:
        raise ConfigError(
            "ppo.critic_init=reward needs exactly one reward model, a decoder with the policy's tokenizer; the reward "
            f"has {obstacle}; use ppo.critic_init=policy"
        )
    is_copy = wanted != "policy" and obstacle is None
    if is_copy and loading.get("bases") is None:
        return copy.deepcopy(models[0].model).requires_grad_(True), True
    critic = load_scalar_model(
        models[0].model.source if is_copy else str(config.model),
        tokenizer=tokenizer,
        init="saved" if is_copy else "fresh",
        **loading,
    )
    return critic, is_copy


def _why_not_copied(models: Sequence[ModelReward]) -> str | None:
    """The reason why the critic cannot be a copy of the reward model; None if it can."""
    if len(models) != 1:
        return str(len(models))
    if not models[0].shares_tokens:
        return "one with another tokenizer"
    return None if models[0].model.has_values else "one that only scores whole texts"


KINDS = {"shared": "a policy with a value head", "separate": "a separate model"}


def with_saved_critic(config: Config) -> Config:
    """Return the configuration with the kind of critic that `ppo.critic_init` names.

    Raises:
        ModelError: The model does not exist.
        ConfigError: `ppo.critic` names the other kind.
    """
    value = config.ppo
    if not value.names_critic:
        return config
    with _named():
        kind = _kind(value.critic_init)
    if value.critic == "auto":
        template = _privileged_of(config) if kind == "separate" else None
        return with_values(config, {"ppo.critic": kind if template is None else {"privileged": template}})
    if value.resolved_critic != kind:
        raise ConfigError(
            f"ppo.critic={value.critic} does not fit ppo.critic_init={value.critic_init}, which is {KINDS[kind]}; "
            f"use ppo.critic={kind}, or leave it out"
        )
    return config


def load_saved_critic(config: Config, tokenizer: PreTrainedTokenizerBase, loading: LoadOptions) -> ScalarModel:
    """Load the separate critic that `ppo.critic_init` names; a language model gets a new head.

    Raises:
        ModelError: It cannot be loaded, has other tokens than the policy, or no value at every token.
    """
    source = config.ppo.critic_init
    own = load_tokenizer(source, trust_remote_code=config.runtime.trust_remote_code)
    if not share_tokens(own, tokenizer):
        raise ModelError(f"ppo.critic_init={source} has another tokenizer than the policy; a critic reads the same ids")
    with _named():
        critic = load_scalar_model(source, tokenizer=tokenizer, init="any", **loading)
    if critic.has_new_head:
        say(f"ppo.critic_init={source} has no trained head: the critic starts from its other weights")
    if not critic.has_values:
        raise ModelError(f"ppo.critic_init={source} only scores whole texts; a critic needs a decoder")
    return critic


def load_saved_head(config: Config, run: Run, policy: LanguageModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Load the value head that `ppo.critic_init` names into a policy that has the weights it was fitted to.

    Raises:
        ModelError: The model saved with the head is not the policy, or the head has a different width.
    """
    source = config.ppo.critic_init
    assert policy.value_head is not None
    is_other = find_model(source) != find_model(str(config.model))
    # Only the first rank has the weights.
    if is_other and not run.ranks.first(lambda: _same_weights(config, policy, tokenizer)):
        raise ModelError(
            f"ppo.critic_init={source} is a value head on other weights than those of model={config.model}; start from "
            f"the model that it was fitted to, e.g. model={source}"
        )
    if not load_value_head(policy.value_head, source):
        raise ModelError(f"ppo.critic_init={source} has no value head, which ppo.critic=shared needs")


@contextmanager
def _named() -> Iterator[None]:
    """Prefix errors of loading with the field's name: a run loads several models."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"ppo.critic_init: {error}") from error


def _kind(source: str) -> Literal["shared", "separate"]:
    return "separate" if value_head_file(source) is None else "shared"


def _privileged_of(config: Config) -> object:
    """The template of a saved critic's privileged information; None without it."""
    source = config.ppo.critic_init
    with _named():
        if (adapter := find_adapter(source)) is not None:
            return adapter.privileged
        read = load_config(base_source(source), trust_remote_code=config.runtime.trust_remote_code)
    return getattr(read, PRIVILEGED_KEY, None)


@torch.no_grad()
def _same_weights(config: Config, policy: LanguageModel, tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if the model saved with the value head has the same weights as the policy."""
    source = config.ppo.critic_init
    trusted = config.runtime.trust_remote_code
    theirs = load_language_model(source, tokenizer=tokenizer, trust_remote_code=trusted).causal.state_dict()
    ours = dict(PolicyWeights(policy))
    same = torch.equal if policy.adapter is None else torch.allclose  # merging adapters rounds
    return theirs.keys() == ours.keys() and all(same(ours[name].cpu(), theirs[name]) for name in ours)

"""A critic that was trained before the run: which kind a folder holds, and its weights.

`kedge critic` writes both kinds: a sequence classifier with one label, and a policy with a value head beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from kedge.config import Config, with_values
from kedge.errors import ConfigError, ModelError
from kedge.models import (
    LanguageModel,
    PolicyWeights,
    ScalarModel,
    find_model,
    load_language_model,
    load_scalar_model,
    load_tokenizer,
    load_value_head,
)
from kedge.models.heads import value_head_file
from kedge.models.loading import Bases
from kedge.models.sources import check_source
from kedge.rewards.model import share_tokens
from kedge.runs.frozen import adapter_of
from kedge.runs.run import Run

__all__ = ["load_saved_critic", "load_saved_head", "with_saved_critic"]

KINDS = {"shared": "a policy with a value head", "separate": "a model of its own"}


def with_saved_critic(config: Config) -> Config:
    """The configuration with the kind of the critic that `ppo.critic_init` names.

    Raises:
        ModelError: There is no such model.
        ConfigError: `ppo.critic` asks for the other kind.
    """
    value = config.ppo
    if not value.names_critic:
        return config
    with _named():
        kind = _kind(value.critic_init)
    if value.critic == "auto":
        return with_values(config, {"ppo.critic": kind})
    if value.critic != kind:
        raise ConfigError(
            f"ppo.critic={value.critic} does not fit ppo.critic_init={value.critic_init}, which is {KINDS[kind]}; "
            f"use ppo.critic={kind}, or leave it out"
        )
    return config


def load_saved_critic(
    config: Config, run: Run, tokenizer: PreTrainedTokenizerBase, bases: Bases | None = None
) -> ScalarModel:
    """The separate critic that `ppo.critic_init` names.

    Raises:
        ModelError: It cannot be loaded, has no trained head, other tokens than the policy, or no value at every token.
    """
    source, trusted = config.ppo.critic_init, config.runtime.trust_remote_code
    own = load_tokenizer(source, trust_remote_code=trusted)
    if not share_tokens(own, tokenizer):
        raise ModelError(f"ppo.critic_init={source} has another tokenizer than the policy; a critic reads the same ids")
    with _named():
        critic = load_scalar_model(
            source,
            tokenizer=tokenizer,
            device=run.device,
            trust_remote_code=trusted,
            adapter=adapter_of(config),
            bases=bases,
            ranks=run.ranks,
        )
    if not critic.has_values:
        raise ModelError(f"ppo.critic_init={source} only scores whole texts; a critic needs a decoder")
    return critic


def load_saved_head(config: Config, run: Run, policy: LanguageModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Load the value head that `ppo.critic_init` names into a policy that has the weights it was fitted to.

    Raises:
        ModelError: The weights beside it are not the policy's, or it is not a head of this width.
    """
    source = config.ppo.critic_init
    assert policy.value_head is not None
    is_other = find_model(source) != find_model(str(config.model))
    # The first rank has the weights.
    if is_other and not run.ranks.first(lambda: _same_weights(config, policy, tokenizer)):
        raise ModelError(
            f"ppo.critic_init={source} is a value head on other weights than those of model={config.model}; start from "
            f"the model that it was fitted to, e.g. model={source}"
        )
    load_value_head(policy.value_head, source)


@contextmanager
def _named() -> Iterator[None]:
    """Errors of loading name the field: a run loads several models."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"ppo.critic_init: {error}") from error


def _kind(source: str) -> Literal["shared", "separate"]:
    return "separate" if value_head_file(check_source(source)) is None else "shared"


@torch.no_grad()
def _same_weights(config: Config, policy: LanguageModel, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the model beside the value head is the policy, weight for weight."""
    source, trusted = config.ppo.critic_init, config.runtime.trust_remote_code
    theirs = load_language_model(source, tokenizer=tokenizer, trust_remote_code=trusted).causal.state_dict()
    ours = dict(PolicyWeights(policy))
    same = torch.equal if policy.adapter is None else torch.allclose  # adapters are merged here and there
    return theirs.keys() == ours.keys() and all(same(ours[name].cpu(), theirs[name]) for name in ours)

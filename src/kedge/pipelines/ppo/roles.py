"""Loads the models of a PPO run and checks that they are compatible, before the first rollout."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from kedge.config import Config
from kedge.data import Mixture, Prompt, encode_example, room_for_prompt
from kedge.data.columns import columns_of
from kedge.data.readers import read_demonstrations
from kedge.data.sources import Sources
from kedge.errors import ConfigError
from kedge.evaluation.judges import Judge
from kedge.models import (
    ActorCritic,
    LanguageModel,
    ScalarModel,
    StopTokens,
    ValueHead,
    initialize_head,
    load_language_model,
    load_scalar_model,
    load_tokenizer,
    load_value_head,
    named_stop_tokens,
    own_stop_tokens,
)
from kedge.pipelines.ppo.prompts import load_run_prompts
from kedge.pipelines.ppo.saved_critic import load_saved_critic, load_saved_head
from kedge.pipelines.ppo.settings import value_bins_of
from kedge.rewards import WeightedReward
from kedge.rewards.missing_eos import MissingEos
from kedge.rewards.source import ScoringModel
from kedge.rollout import Engine, Sampler
from kedge.runs.load_judge import load_judge
from kedge.runs.load_rewards import Rewards, configured_rewards, load_rewards
from kedge.runs.run import REJECTED_FILE, Run
from kedge.training.optimizer import build_optimizer
from kedge.training.pretraining_mix import PretrainingMix
from kedge.training.runtime import stream_seed
from kedge.training.supervised.losses import CompletionLoss

__all__ = ["Roles", "load_roles"]


@dataclass(frozen=True)
class Roles:
    """The models of a PPO run, with tokenizer, prompts, engine and optimizer.

    Attributes:
        tokenizer: The policy's.
        stop_tokens: The tokens that end a response.
        prompts: The prompts that the run trains on.
        mixture: In which shares they are drawn from their sources; None for every prompt once per pass.
        held_out: The prompts that policy and critic are tested on; empty for a run that tests neither.
        judge: Compares the responses to them with those of the start; None for no comparison.
        engine: Samples from the policy.
        actor_critic: Policy and critic, if any, trained.
        reference: The initial policy, frozen; None if no KL is charged or logged.
        reward: Scores responses.
        missing_eos: The penalty for responses without a stop token.
        optimizer: The optimizer of policy and critic.
        pretraining: The pretraining loss of ptx mixing, or None.
    """

    tokenizer: PreTrainedTokenizerBase
    stop_tokens: StopTokens
    prompts: list[Prompt]
    mixture: Mixture | None
    held_out: list[Prompt]
    judge: Judge | None
    engine: Engine
    actor_critic: ActorCritic
    reference: LanguageModel | None
    reward: WeightedReward
    missing_eos: MissingEos
    optimizer: Optimizer
    pretraining: PretrainingMix | None


def load_roles(
    config: Config,
    run: Run,
    *,
    prompts: Sequence[Any] | None = None,
    eval_prompts: Sequence[Any] | None = None,
    reward: Rewards | None = None,
) -> Roles:
    """Load policy, reference, reward, critic and prompts.

    Args:
        config: The resolved configuration.
        run: The run.
        prompts: Texts or rows in place of `config.data.prompts`.
        eval_prompts: Texts or rows in place of `config.data.eval_prompts`.
        reward: Functions or models in place of `config.reward`.

    Raises:
        KedgeError: An input is unreadable, or incompatible with the others.
    """
    trust = config.runtime.trust_remote_code
    source = str(config.model)
    tokenizer = load_tokenizer(source, trust_remote_code=trust)
    named = named_stop_tokens(tokenizer, config.rollout.stop_token)
    rewards = load_rewards(configured_rewards(config) if reward is None else reward, config, run, tokenizer)
    models = list(rewards.weighted_models.values())
    actor_critic, head = _load_actor_critic(config, run, tokenizer, models)
    policy = actor_critic.policy
    stop_tokens = named or own_stop_tokens(tokenizer, policy)
    reference = None
    if config.ppo.kl.needs_reference:
        reference = load_language_model(source, tokenizer=tokenizer, device=run.device, trust_remote_code=trust)
        reference.requires_grad_(False)
    room = _longest_prompt(config, actor_critic, models)
    records = load_run_prompts(config, run, tokenizer, room=room, prompts=prompts, eval_prompts=eval_prompts)
    judges = config.ppo.evaluation.eval_every is not None and config.evaluate.judge is not None
    judge = load_judge(None, config, run, tokenizer) if judges else None
    for columns in records.columns:
        rewards.check(columns)
        if judge is not None:
            judge.check(columns)
    return Roles(
        tokenizer=tokenizer,
        stop_tokens=stop_tokens,
        prompts=records.train,
        mixture=records.mixture,
        held_out=records.held_out,
        judge=judge,
        engine=Sampler(
            policy,
            pad_id=cast(int, tokenizer.pad_token_id),
            stop_tokens=stop_tokens.ids,
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=config.rollout.temperature,
            precision=run.precision,
            batch_size=config.rollout.micro_batch_size,
        ),
        actor_critic=actor_critic,
        reference=reference,
        reward=rewards,
        missing_eos=MissingEos(config.rollout.eos_score(reward_model=bool(models)), config.rollout.missing_eos_mode),
        optimizer=build_optimizer(
            actor_critic.parameters(),
            head_parameters=() if head is None else head.parameters(),
            head_rate=config.ppo.value.value_head_rate,
            critic_parameters=actor_critic.separable_parameters(),
            learning_rate=config.ppo.loop.learning_rate,
            adam_eps=config.ppo.optimizer.adam_eps,
            adam_eps_mode=config.ppo.optimizer.adam_eps_mode,
            weight_decay=config.ppo.optimizer.weight_decay,
        ),
        pretraining=_load_pretraining(config, run, tokenizer, policy),
    )


def _load_actor_critic(
    config: Config, run: Run, tokenizer: PreTrainedTokenizerBase, models: Sequence[ScoringModel]
) -> tuple[ActorCritic, ValueHead | None]:
    """Policy and critic, if any, and the critic's new head, which has a learning rate of its own."""
    source, value = str(config.model), config.ppo.value
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(config.runtime.seed, "new heads"))
        policy = load_language_model(
            source,
            tokenizer=tokenizer,
            value_head=config.ppo.resolved_critic == "shared",
            bins=value_bins_of(config),
            device=run.device,
            trust_remote_code=config.runtime.trust_remote_code,
        )
        policy.check_sampling()
        critic, head = None, policy.value_head
        if config.ppo.resolved_critic == "separate":
            critic, head = _load_critic(config, run, tokenizer, models)
        elif head is not None and value.names_critic:
            load_saved_head(config, policy, tokenizer)
        elif head is not None and not load_value_head(head, source):
            initialize_head(head, value.value_head_init)
    actor_critic = ActorCritic(policy, critic, value_gradient=value.value_gradient)
    if config.runtime.activation_checkpointing:
        actor_critic.checkpoint_activations()
    return actor_critic, head


def _load_critic(
    config: Config, run: Run, tokenizer: PreTrainedTokenizerBase, models: Sequence[ScoringModel]
) -> tuple[ScalarModel, ValueHead | None]:
    """A separate critic and its new head: a trained one or a copy of the reward model (no new head), or of the policy.

    A histogram starts with the values of a trained critic, or with the scores of the reward model.
    """
    critic, is_trained = _scalar_critic(config, run, tokenizer, models)
    bins = value_bins_of(config)
    if bins is not None:
        critic.predict_histogram(bins)
    if is_trained:
        return critic, None
    head = critic.value_head
    assert head is not None, "a fresh model has a linear head"
    return critic, initialize_head(head, config.ppo.value.value_head_init)


def _scalar_critic(
    config: Config, run: Run, tokenizer: PreTrainedTokenizerBase, models: Sequence[ScoringModel]
) -> tuple[ScalarModel, bool]:
    """The model that a separate critic starts from, and whether its head is trained (spec §7.34).

    `auto` copies the reward model if there is exactly one, with the policy's tokens, that has a value at each of them.
    """
    if config.ppo.value.names_critic:
        return load_saved_critic(config, run, tokenizer), True
    wanted, misfit = config.ppo.value.critic_init, _misfit(models)
    if wanted == "reward" and misfit is not None:
        raise ConfigError(
            "ppo.critic_init=reward needs exactly one reward model, a decoder with the policy's tokenizer; the reward "
            f"has {misfit}; use ppo.critic_init=policy"
        )
    if wanted != "policy" and misfit is None:
        return copy.deepcopy(models[0].model).requires_grad_(True), True
    critic = load_scalar_model(
        str(config.model),
        tokenizer=tokenizer,
        device=run.device,
        trust_remote_code=config.runtime.trust_remote_code,
        init="fresh",
    )
    return critic, False


def _misfit(models: Sequence[ScoringModel]) -> str | None:
    """Why the reward models cannot be copied as the critic; None if they can."""
    if len(models) != 1:
        return str(len(models))
    if not models[0].shares_tokens:
        return "one with another tokenizer"
    return None if models[0].model.has_values else "one that only scores whole texts"


def _longest_prompt(config: Config, actor_critic: ActorCritic, models: Sequence[ScoringModel]) -> int | None:
    """Maximum prompt length in tokens, so that prompt and response fit into every model that reads both."""
    critic = actor_critic.critic
    limits = [actor_critic.policy.sampling_length, None if critic is None else critic.context_length]
    limits += [model.max_tokens for model in models if model.shares_tokens]
    return room_for_prompt(limits, config.rollout.max_new_tokens)


def _load_pretraining(
    config: Config, run: Run, tokenizer: PreTrainedTokenizerBase, policy: LanguageModel
) -> PretrainingMix | None:
    if not config.ppo.objective.ptx_coef:
        return None
    table = read_demonstrations(
        Sources(tuple(config.data.pretraining)),
        tokenizer=tokenizer,
        max_length=min(config.data.max_length, policy.context_length or config.data.max_length),
        truncate=config.data.truncate,
        columns=columns_of(config.data.columns, "pretraining"),
        max_rejected_fraction=config.data.max_rejected_fraction,
        rejected_to=run.folder / REJECTED_FILE,
    )
    run.data.note("pretraining", table, config.data.pretraining, tokenizer)
    return PretrainingMix(
        CompletionLoss(policy, run.precision),
        [encode_example(tokenizer, record.prompt, record.completion) for record in table.records],
        coef=config.ppo.objective.ptx_coef,
        batch_size=config.ppo.objective.ptx_batch_size
        or config.responses_per_update // config.ppo.loop.num_minibatches,
        micro_batch_tokens=config.runtime.micro_batch_tokens,
        seed=config.runtime.seed,
    )

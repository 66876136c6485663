"""Loads the models of a PPO run and checks that they are compatible, before the first rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from transformers import PreTrainedTokenizerBase

from kedge.config import Config
from kedge.data import Mixture, Prompt, encode_example, encode_prompt, room_for_prompt
from kedge.data.prompts import difficulties
from kedge.models import (
    ActorCritic,
    LanguageModel,
    StopTokens,
    ValueHead,
    load_language_model,
    load_tokenizer,
    named_stop_tokens,
    own_stop_tokens,
)
from kedge.models.loading import LoadOptions
from kedge.models.pretrained import configured_length, inner_matrices, load_config
from kedge.models.sources import base_source
from kedge.rewards import WeightedReward
from kedge.rewards.model import ModelReward
from kedge.rewards.score import MissingEos
from kedge.rollout import Engine
from kedge.rollout.privileged import PrivilegedText, privileged_text
from kedge.runs.frozen import freeze_models, hold_bases_of, loading_of, measuring_scores, tokenizer_of
from kedge.runs.inputs import (
    check_columns,
    load_player,
    load_rewards,
    load_rows,
    rewards_of,
)
from kedge.runs.run import Run
from kedge.stages.judges import Judge, ScoringJudge, load_judge
from kedge.stages.policy import Policy
from kedge.stages.ppo.critics import load_actor_critic
from kedge.stages.ppo.engines import check_engine, choose_engine
from kedge.stages.ppo.settings import OwnFunctions
from kedge.training.optimizer import build_optimizer
from kedge.training.optimizer_kinds import Optimizer
from kedge.training.pretraining_mix import PretrainingMix
from kedge.training.supervised.losses import CompletionLoss
from kedge_base.errors import DataError, EnvError, ModelError
from kedge_base.machine.invocation import as_argument
from kedge_base.machine.progress import say

if TYPE_CHECKING:
    from kedge.rollout.player import Player


@dataclass(frozen=True)
class Roles:
    """The models of a PPO run, with tokenizer, prompts, engine and optimizer.

    Attributes:
        tokenizer: The policy's.
        stop_tokens: The tokens that end a response.
        prompts: The run's prompts.
        engine: Samples from the policy.
        actor_critic: Policy and critic, if any, trained.
        reference: The initial policy or `ppo.reference`, frozen; None if no KL is penalized or logged.
        reward: Scores responses.
        missing_eos: The penalty for responses without a stop token; None for no penalty.
        optimizer: The optimizer of policy and critic.
        pretraining: The pretraining loss of ptx mixing, or None.
        own: The user's own parts of the algorithm.
        player: Plays episodes with an environment; None for responses of a single turn.
        privileged: The critic's privileged information; None without it.
    """

    tokenizer: PreTrainedTokenizerBase
    stop_tokens: StopTokens
    prompts: RunPrompts
    engine: Engine
    actor_critic: ActorCritic
    reference: LanguageModel | None
    reward: WeightedReward
    missing_eos: MissingEos | None
    optimizer: Optimizer
    pretraining: PretrainingMix | None
    own: OwnFunctions
    player: Player | None
    privileged: PrivilegedText | None

    def close(self) -> None:
        """End the processes of the engine, the environment, and the functions that score or judge."""
        self.engine.close()
        if self.player is not None:
            self.player.environment.close()
        self.reward.close()
        if isinstance(self.prompts.judge, ScoringJudge):
            self.prompts.judge.rewards.close()


def load_roles(config: Config, run: Run, *, has_prompts: bool = True, has_scores: bool = False) -> Roles:
    """Load policy, reference, reward, critic and prompts, from the configuration or from Python objects.

    Args:
        config: The resolved configuration.
        run: The run.
        has_prompts: False for a run that gets its prompts later.
        has_scores: True for a run that can get its scores later.

    Raises:
        KedgeError: An input is unreadable, or incompatible with the others.
    """
    tokenizer = tokenizer_of(config, str(config.model))
    own, player = load_own_code(config, run, tokenizer)
    named = named_stop_tokens(tokenizer, config.rollout.stop_token)
    loading = loading_of(config, run)
    terms = rewards_of(config, run)
    # A run that learns from a teacher needs no score.
    if player is not None and not (terms or has_scores or config.ppo.reference or player.environment.is_scored):
        raise EnvError(
            f"nothing scores the episodes of {player.environment.name}: add get_reward, or {as_argument('--reward')}"
        )
    earned = () if player is None else (player.reward,)
    may_be_empty = config.ppo.reference is not None and not (terms or earned)
    rewards = load_rewards(
        terms, config, run, tokenizer, freeze=False, bases=loading.get("bases"), more=earned, may_be_empty=may_be_empty
    )
    models = list(rewards.weighted_models.values())
    actor_critic, head = load_actor_critic(config, run, tokenizer, models, loading)
    stop_tokens = named or own_stop_tokens(tokenizer, actor_critic.policy)
    records = RunPrompts()
    room = longest_prompt(config, actor_critic, rewards.weighted_models, player)
    if has_prompts:
        all_prompts = load_rows("prompts", config, run, tokenizer, room=room)
        records = hold_out_prompts(config, run, tokenizer, all_prompts, room=room)
    privileged = None if actor_critic.critic is None else privileged_text(actor_critic.critic.privileged)
    if privileged is not None and not run.resumed:
        say(f"the critic also reads, between prompt and response: {privileged.template!r}")
    if player is not None:
        shortest = shortest_context(config, actor_critic)
        player.begin(stop_tokens.ids, room, shortest, tokenizer, records.train[:1], privileged)
    else:
        if privileged is not None:
            _check_privileged(privileged, config, actor_critic, [*records.train, *records.held_out], tokenizer)
        _say_if_trained_on(records.held_out, records.train)
        _say_if_too_long(config, [*records.train, *records.held_out], tokenizer, rewards.weighted_models)
    scoring = [each.model for each in rewards.models.values()]
    with measuring_scores(rewards, config, records.train, run.ranks):
        freeze_models(scoring, config, run)
        reference = _reference(config, run, tokenizer, loading) if config.ppo.needs_reference else None
        hold_bases_of([actor_critic, reference, *scoring], config, run.device)
    eos_score = config.rollout.eos_score(reward_model=bool(models))
    how = "subtract" if config.rollout.subtracts_missing_eos else "replace"
    return Roles(
        tokenizer=tokenizer,
        stop_tokens=stop_tokens,
        prompts=replace(records, judge=_checked_judge(config, run, tokenizer, rewards, records)),
        engine=choose_engine(config, run, actor_critic.policy, stop_tokens, pad_id=cast(int, tokenizer.pad_token_id)),
        actor_critic=actor_critic,
        reference=reference,
        reward=rewards,
        missing_eos=None if eos_score is None else MissingEos(eos_score, how),
        optimizer=_optimizer(config, run, actor_critic, head),
        pretraining=_load_pretraining(config, run, tokenizer, actor_critic.policy),
        own=own,
        player=player,
        privileged=privileged,
    )


def load_own_code(config: Config, run: Run, tokenizer: PreTrainedTokenizerBase) -> tuple[OwnFunctions, Player | None]:
    """Load the user's functions and environment, and check engine and teacher, which needs no model.

    Errors as in `load_roles`.
    """
    check_engine(config)
    own = OwnFunctions.of(config, run.objects)
    if config.ppo.reference is not None:
        _check_teacher(config.ppo.reference, tokenizer, trust_remote_code=config.runtime.trust_remote_code)
    # A group's baseline is the score of whole episodes; other estimators use the reward of each turn.
    by_turn = config.ppo.estimator_facts.by_turn or not (config.ppo.needs_groups or config.ppo.needs_baseline)
    return own, load_player(config, run, tokens=config.rollout.max_new_tokens, by_turn=by_turn)


def check_roles(config: Config, run: Run, policy: Policy, rewards: WeightedReward, prompts: list[Prompt]) -> None:
    """Check that `load_roles` will succeed by loading everything except models that are not trained yet, then discard
    it.

    Args:
        config: The configuration of PPO, without the models that are not trained yet.
        run: The run of the chain.
        policy: The model that the chain starts from.
        rewards: The rewards that exist already.
        prompts: All prompts.

    Raises:
        KedgeError: As in `load_roles`.
    """
    tokenizer = policy.tokenizer
    _, player = load_own_code(config, run, tokenizer)
    actor_critic = ActorCritic(policy.model)
    room = longest_prompt(config, actor_critic, rewards.weighted_models, player)
    records = hold_out_prompts(config, run, tokenizer, prompts, room=room)
    privileged = privileged_text(config.ppo.privileged)
    if player is not None:
        shortest = shortest_context(config, actor_critic)
        player.begin(policy.stop_tokens.ids, room, shortest, tokenizer, records.train[:1], privileged)
        player.environment.close()
    elif privileged is not None:
        privileged.longest([*records.train, *records.held_out], tokenizer)
    if config.ppo.reference is not None:
        _reference(config, run, tokenizer, {**loading_of(config, run), "bases": None})
    _checked_judge(config, run, tokenizer, rewards, records)
    if config.ppo.ptx_coef.coef:
        load_rows("pretraining", config, run, tokenizer, room=policy.model.context_length)


def _check_teacher(source: str, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool) -> None:
    """Check that the model of `ppo.reference` reads the policy's own tokens (`ModelError` if not).

    It may have more tokens: they are excluded from its distribution.
    """
    known = load_tokenizer(source, trust_remote_code=trust_remote_code).get_vocab()
    own = tokenizer.get_vocab().items()
    if lacking := [token for token, index in own if known.get(token) != index and token != tokenizer.pad_token]:
        raise ModelError(
            f"ppo.reference={source} has another vocabulary than the policy: its {len(known)} tokens lack "
            f"{len(lacking)} of {len(own)}, such as {min(lacking)!r}, or have them under other ids, so it cannot "
            "rate the policy's responses; use a teacher whose tokenizer has all of them"
        )


def _reference(config: Config, run: Run, tokenizer: PreTrainedTokenizerBase, loading: LoadOptions) -> LanguageModel:
    """The initial policy or `ppo.reference`, frozen."""
    source = config.ppo.reference or str(config.model)
    model = load_language_model(source, tokenizer=tokenizer, **{**loading, "adapter": None})
    freeze_models([model], config, run)
    return model


def _checked_judge(
    config: Config, run: Run, tokenizer: PreTrainedTokenizerBase, rewards: WeightedReward, records: RunPrompts
) -> Judge | None:
    """Load the judge, if the run compares responses; check that all prompts have the columns that it and the rewards
    need.
    """
    judges = config.ppo.eval_every.updates is not None and config.evaluate.judge is not None
    judge = load_judge(config, run, tokenizer) if judges else None
    for part in filter(None, (records.train, records.held_out)):
        check_columns(rewards.check, part)
        if judge is not None:
            check_columns(judge.check, part)
    return judge


def _optimizer(config: Config, run: Run, actor_critic: ActorCritic, head: ValueHead | None) -> Optimizer:
    """Create the optimizer of policy and critic, with a separate learning rate for the critic's new head."""
    settings = config.optimization.of("ppo").arguments
    layer = actor_critic.value_head
    return build_optimizer(
        actor_critic.parameters(),
        kind=settings["optimizer"],
        head_parameters=() if layer is None else layer.parameters(),
        head_rate=1.0 if head is None else config.ppo.value_head_rate,
        critic_parameters=actor_critic.separable_parameters(),
        learning_rate=config.ppo.learning_rate,
        inner_matrices=inner_matrices(actor_critic),
        offload=run.offloads("optimizer"),
        adam_eps=settings["adam_eps"],
        adam_eps_mode=settings["adam_eps_mode"],
        weight_decay=settings["weight_decay"],
    )


def longest_prompt(
    config: Config, actor_critic: ActorCritic, models: Mapping[str, ModelReward], player: Player | None
) -> int | None:
    """Return the maximum prompt length in tokens, so that prompt and response, or a player's turn, fit into every model
    that reads both.
    """
    length = config.rollout.max_new_tokens
    limits = context_lengths(config, actor_critic)
    rewards = {f"reward model {name!r}": model.max_tokens for name, model in models.items() if model.shares_tokens}
    if player is None:
        return room_for_prompt({**limits, **rewards}, length)
    # A reward model reads a whole episode as one text.
    rooms = room_for_prompt(limits, length, turn_tokens=player.turn_tokens), room_for_prompt(rewards, length)
    return min((room for room in rooms if room is not None), default=None)


def context_lengths(config: Config, actor_critic: ActorCritic) -> dict[str, int | None]:
    """The context lengths of the models that read every token, by name in messages; None for no limit."""
    critic = actor_critic.critic
    limits = {"the policy": actor_critic.policy.sampling_length}
    if (teacher := config.ppo.reference) is not None:
        found = load_config(base_source(teacher), trust_remote_code=config.runtime.trust_remote_code)
        limits[f"ppo.reference={teacher}"] = configured_length(found)
    # The critic comes last: it is often a copy of the policy or a reward model, and errors should name the original.
    limits["the critic"] = None if critic is None else critic.context_length
    return limits


def shortest_context(config: Config, actor_critic: ActorCritic) -> int | None:
    """The shortest of the context lengths; None for no limit."""
    return min((each for each in context_lengths(config, actor_critic).values() if each is not None), default=None)


def _check_privileged(
    privileged: PrivilegedText,
    config: Config,
    actor_critic: ActorCritic,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Check that all rows have the privileged information, and that it fits between their prompt and a response."""
    limit = None if actor_critic.critic is None else actor_critic.critic.context_length
    room = None if limit is None else limit - config.rollout.max_new_tokens
    for prompt in prompts:
        added = len(privileged.ids(prompt.row, tokenizer, prompt.place))
        if room is not None and (length := len(encode_prompt(tokenizer, prompt.text))) + added > room:
            raise DataError(
                f"{prompt.place}: the critic reads at most {limit} tokens, and the prompt has {length}, what "
                f"ppo.critic=privileged adds {added}, and a response up to {config.rollout.max_new_tokens}; lower "
                "data.max_prompt_tokens or rollout.max_new_tokens, or shorten the columns"
            )


def _say_if_too_long(
    config: Config, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, models: Mapping[str, ModelReward]
) -> None:
    """Warn of reward models with other tokens that may not read the longest prompt with its response."""
    limits = {name: each.max_tokens for name, each in models.items() if not each.shares_tokens and each.max_tokens}
    if not limits or not prompts:
        return
    prompt = len(encode_prompt(tokenizer, max((each.text for each in prompts), key=len)))
    response = config.rollout.max_new_tokens
    for name, limit in limits.items():
        if prompt + response > limit:
            say(
                f"reward model {name!r} reads at most {limit} of its tokens, and the longest prompt and a response "
                f"have up to {prompt} + {response} of the policy's: a longer text would end the run; lower "
                "rollout.max_new_tokens or data.max_prompt_tokens"
            )


def _load_pretraining(
    config: Config, run: Run, tokenizer: PreTrainedTokenizerBase, policy: LanguageModel
) -> PretrainingMix | None:
    if not config.ppo.ptx_coef.coef:
        return None
    records = load_rows("pretraining", config, run, tokenizer, room=policy.context_length)
    return PretrainingMix(
        CompletionLoss(policy, run.precision),
        [encode_example(tokenizer, record.prompt, record.completion, read=record.read) for record in records],
        coef=config.ppo.ptx_coef.coef,
        batch_size=config.ppo.ptx_coef.batch * config.responses_per_update // config.ppo.num_minibatches,
        micro_batch_tokens=run.micro_batch_tokens,
        seed=config.runtime.seed,
        ranks=run.ranks,
    )


@dataclass(frozen=True)
class RunPrompts:
    """The prompts of a run, and the judge of the responses to the held-out ones.

    Attributes:
        train: Prompts to train on.
        held_out: Prompts to evaluate policy and critic on; empty if neither is evaluated.
        mixture: The shares in which training prompts are drawn from their sources; None for every prompt once per pass.
        judge: Compares responses with the starting model's; None for no comparison.
    """

    train: Sequence[Prompt] = ()
    held_out: Sequence[Prompt] = ()
    mixture: Mixture | None = None
    judge: Judge | None = None


def hold_out_prompts(
    config: Config,
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    records: list[Prompt],
    *,
    room: int | None,
) -> RunPrompts:
    """Hold out some of the prompts if the run evaluates, or read its separate evaluation prompts.

    Args:
        config: Names the data and its limits.
        run: The run, whose folder receives the unusable rows.
        tokenizer: The policy's tokenizer.
        records: All prompts.
        room: Longest prompt that the context allows.

    Raises:
        DataError: The data cannot be read, or a single prompt cannot be split.
    """
    evaluation = config.ppo
    data = config.data
    held_out: list[Prompt] = []
    rows: list[int] | None = None
    if evaluation.holds_out and (data.eval_prompts or "data.eval_prompts" in run.objects):
        every = load_rows("eval_prompts", config, run, tokenizer, room=room)
        held_out = every[: evaluation.num_held_out]
        run.data.add("eval_prompts", used=len(held_out))
    elif evaluation.holds_out:
        share = min(data.eval_fraction, evaluation.num_held_out / len(records))
        split = run.data.split("prompts", records, config, fraction=share)
        records = split.train
        held_out = split.eval
        rows = split.train_rows
    if data.curriculum is not None:
        difficulties(records, data.curriculum)
    return RunPrompts(records, held_out, run.data.mixture("prompts", config, rows))


def _say_if_trained_on(held_out: Sequence[Prompt], trained: Sequence[Prompt]) -> None:
    """Print a message if held-out prompts are also trained on, as happens with duplicates in the data."""
    known = {prompt.text for prompt in trained} if held_out else set()
    if count := sum(prompt.text in known for prompt in held_out):
        say(
            f"{count:,} of the {len(held_out):,} held-out prompts are also among those trained on, so that evaluations "
            "are not of new prompts alone"
        )

"""Before the chain starts: the configuration of each stage, and a check of everything that later stages need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.config import Config, metric_in_chain, with_values
from kedge.data import Prompt, room_for_prompt
from kedge.rewards import RewardSpec, RewardTerm, WeightedReward
from kedge.runs.inputs import (
    Rewards,
    configured_rewards,
    load_comparisons,
    load_demonstrations,
    load_prompts,
    load_rewards,
)
from kedge.runs.run import Run
from kedge.stages.evaluation.policy import load_policy

__all__ = ["RlhfInputs", "check_inputs", "scored_config", "stage_config", "with_critic", "with_trained"]


@dataclass(frozen=True)
class RlhfInputs:
    """Inputs of the rounds.

    Attributes:
        prompts: All prompts.
        labeler: Ranks responses from round 2 on; None for a single round.
    """

    prompts: list[Prompt]
    labeler: WeightedReward | None


def check_inputs(
    config: Config,
    run: Run,
    *,
    demonstrations: Sequence[Any] | None = None,
    comparisons: Sequence[Any] | None = None,
    prompts: Sequence[Any] | None = None,
    reward: Rewards | None = None,
    labeler: RewardSpec | None = None,
) -> RlhfInputs:
    """Load and read the inputs of all stages, so that a mistake in the prompts shows before hours of fine-tuning.

    Args:
        config: The resolved configuration.
        run: The run, opened.
        demonstrations: Rows in place of `config.data.demonstrations`.
        comparisons: Rows in place of `config.data.comparisons`.
        prompts: Texts or rows in place of `config.data.prompts`.
        reward: Functions or models in place of `config.reward`.
        labeler: A function or model instead of `config.rlhf.labeler`.

    Raises:
        KedgeError: An input cannot be read or does not fit the others.
    """
    scored = scored_config(
        config, run, "ppo", model=Path(str(config.model)), reward=run.shared_folder / "reward" / "model"
    )
    if config.rlhf.train_critic:
        with_critic(scored, run.shared_folder / "critic" / "model")
    policy = load_policy(str(config.model), config, run)
    tokenizer, context = policy.tokenizer, policy.model.context_length
    load_demonstrations(config, run, tokenizer, context_length=context, rows=demonstrations)
    load_comparisons(config, run, tokenizer, context_length=context, rows=comparisons)
    room = room_for_prompt([policy.model.sampling_length], config.rollout.max_new_tokens)
    all_prompts = load_prompts(config, run, tokenizer, room=room, prompts=prompts)
    columns = list(all_prompts[0].columns)
    if rewards := configured_rewards(config) if reward is None else reward:
        load_rewards(rewards, config, run, tokenizer).check(columns)
    if config.rlhf.num_rounds == 1:
        return RlhfInputs(all_prompts, None)
    scorer = load_rewards(labeler or str(config.rlhf.labeler), config, run, tokenizer)
    scorer.check(columns)
    return RlhfInputs(all_prompts, scorer)


def stage_config(config: Config, run: Run, name: str) -> Config:
    """The configuration of a stage, which writes to its own folder inside the run's."""
    keep_best = metric_in_chain(config, name.partition("-")[0])
    return with_values(
        config, {"out": str(run.shared_folder / name), "push.repo": None, "checkpoint.keep_best": keep_best}
    )


def scored_config(config: Config, run: Run, name: str, *, model: Path, reward: Path) -> Config:
    """The configuration of PPO, or of its critic's training: policy, and the trained reward model before other rewards.

    Raises:
        ConfigError: The critic is initialized from the reward model, and there is more than one.
    """
    terms = [{"source": str(reward)}, *(term.model_dump() for term in config.reward)]
    return with_values(stage_config(config, run, name), {"model": str(model), "reward": terms})


def with_critic(config: Config, critic: Path) -> Config:
    """The configuration of PPO that starts from the critic that was trained before it.

    Raises:
        ConfigError: The other settings of PPO do not fit this kind of critic.
    """
    return with_values(config, {"ppo.critic": config.critic.kind, "ppo.critic_init": str(critic)})


def with_trained(model: Path, reward: Rewards) -> list[RewardSpec | RewardTerm]:
    """The trained reward model, followed by rewards that were passed from Python."""
    given = [reward] if isinstance(reward, (str, Path, RewardTerm)) or callable(reward) else list(reward)
    return [RewardTerm(str(model)), *given]

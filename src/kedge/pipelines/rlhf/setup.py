"""Before the chain starts: each stage's configuration, and a look at all that a later stage would stumble over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.config import Config, with_values
from kedge.data import Prompt, Sources, read_comparisons, read_demonstrations, room_for_prompt
from kedge.rewards import RewardSpec, WeightedReward
from kedge.runs.load_policy import load_policy
from kedge.runs.load_prompts import load_prompts
from kedge.runs.load_rewards import configured_rewards, load_rewards
from kedge.runs.run import REJECTED_FILE, Run

__all__ = ["RlhfInputs", "check_inputs", "ppo_config", "stage_config"]


@dataclass(frozen=True)
class RlhfInputs:
    """What the rounds draw on.

    Attributes:
        prompts: All prompts.
        labeller: Who ranks responses from round 2 on; None where there is one round.
    """

    prompts: list[Prompt]
    labeller: WeightedReward | None


def check_inputs(
    config: Config,
    run: Run,
    *,
    demonstrations: Sequence[Any] | None = None,
    comparisons: Sequence[Any] | None = None,
    prompts: Sequence[Any] | None = None,
    labeller: RewardSpec | None = None,
) -> RlhfInputs:
    """Load and read what the stages need: a mistake in the prompts must not show after hours of fine-tuning.

    Args:
        config: The resolved configuration.
        run: Where the run writes.
        demonstrations: Rows in place of `config.data.demonstrations`.
        comparisons: Rows in place of `config.data.comparisons`.
        prompts: Texts or rows in place of `config.data.prompts`.
        labeller: A function or model in place of `config.rlhf.labeller`.

    Raises:
        KedgeError: Something cannot be read, or does not fit the rest.
    """
    ppo_config(config, run, "ppo", model=Path(str(config.model)), reward=run.folder / "reward" / "model")
    policy, data = load_policy(str(config.model), config, run), config.data
    rules: dict[str, Any] = {
        "tokenizer": policy.tokenizer,
        "max_length": min(data.max_length, policy.model.context_length or data.max_length),
        "max_prompt_tokens": data.max_prompt_tokens,
        "template": data.template,
        "max_rejected_fraction": data.max_rejected_fraction,
        "rejected_to": run.folder / REJECTED_FILE,
    }
    read_demonstrations(Sources(tuple(data.demonstrations)) if demonstrations is None else demonstrations, **rules)
    read_comparisons(Sources(tuple(data.comparisons)) if comparisons is None else comparisons, **rules)
    room = room_for_prompt([policy.model.context_length], config.rollout.max_new_tokens)
    questions = load_prompts(config, run, policy.tokenizer, room=room, prompts=prompts)
    columns = list(questions[0].columns)
    if config.reward:
        load_rewards(configured_rewards(config), config, run, policy.tokenizer).check(columns)
    if config.rlhf.num_rounds == 1:
        return RlhfInputs(questions, None)
    scorer = load_rewards(labeller or str(config.rlhf.labeller), config, run, policy.tokenizer)
    scorer.check(columns)
    return RlhfInputs(questions, scorer)


def stage_config(config: Config, run: Run, name: str) -> Config:
    """The configuration of a stage that writes to a folder of its own inside the run's."""
    return with_values(config, {"out": str(run.folder / name)})


def ppo_config(config: Config, run: Run, name: str, *, model: Path, reward: Path) -> Config:
    """PPO's: its policy, and the trained reward model beside the rewards that were configured.

    Raises:
        ConfigError: The critic is to start from the one reward model, and there are two.
    """
    terms = [{"source": str(reward)}, *(term.model_dump() for term in config.reward)]
    return with_values(stage_config(config, run, name), {"model": str(model), "reward": terms})

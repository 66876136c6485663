"""The whole configuration of a run."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, model_validator

from kedge.config.schema.checkpoint import Checkpointing
from kedge.config.schema.data import Data
from kedge.config.schema.field import Section, knob
from kedge.config.schema.inference import Evaluate, Generate
from kedge.config.schema.ppo.section import Ppo
from kedge.config.schema.reward_functions import RewardFunctions
from kedge.config.schema.rlhf import Rlhf
from kedge.config.schema.rollout import Rollout
from kedge.config.schema.runtime import Runtime
from kedge.config.schema.supervised import RewardModel, Sft

__all__ = ["Config", "RewardTerm"]

MOST_TRIED = 10**6


class RewardTerm(Section):
    """One reward and its weight in the sum."""

    source: str = knob(
        ...,
        meaning="A reward model's folder or id, or a Python function (`file.py:function`, `package.module:function`).",
        source="kedge: there is no reward to assume",
    )
    weight: float = knob(
        1.0,
        meaning="What the score is multiplied by before the terms are added; 0 makes it a judge, which is only told.",
        source="kedge: as it comes",
        too_high="the other terms are drowned",
        too_low="the term is drowned by the others",
    )
    settings: dict[str, Any] = knob(
        {}, meaning="Keyword arguments for a function.", source="kedge: the function's own defaults"
    )
    name: str | None = knob(
        None,
        meaning="What metrics and messages call the term; null is its function's or folder's name.",
        source="kedge",
    )

    @property
    def is_function(self) -> bool:
        """Whether the source is a Python function rather than a reward model."""
        return re.fullmatch(r".+:[^\W\d][\w.]*", self.source) is not None


def _as_terms(value: object) -> object:
    """Bring the short forms (a string, a list of strings, a mapping source → weight) to a list of terms."""
    if isinstance(value, str):
        return [{"source": value}]
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, Any]", value)
        if "source" in mapping:
            return [mapping]
        return [{"source": source, "weight": weight} for source, weight in mapping.items()]
    if isinstance(value, list):
        items = cast("list[object]", value)
        return [{"source": item} if isinstance(item, str) else item for item in items]
    return value


class Config(Section):
    """Everything that a run reads. Each stage reads its own section and those that it shares with others."""

    model: str | None = knob(
        None,
        meaning="Folder or id of the language model to start from.",
        source="kedge: there is no model to assume",
    )
    reward: Annotated[list[RewardTerm], BeforeValidator(_as_terms)] = knob(
        [],
        meaning="What scores a response: a source, a list of sources, a mapping source → weight, or a list of "
        "{source, weight}.",
        source="kedge: there is no reward to assume",
    )
    reward_functions: RewardFunctions = knob(
        RewardFunctions(), meaning="Deadlines and failures of Python functions that score.", source="kedge"
    )
    out: str | None = knob(
        None,
        meaning="The run's folder, which must not hold anything; null is runs/STAGE, then runs/STAGE-2 and so on.",
        source="kedge",
    )
    preset: str | None = knob(None, meaning="The recipe that the defaults were taken from.", source="kedge: none")
    data: Data = knob(Data(), meaning="What is read.", source="kedge")
    sft: Sft = knob(Sft(), meaning="Supervised fine-tuning.", source="N+")
    reward_model: RewardModel = knob(RewardModel(), meaning="Reward-model training.", source="N+")
    rollout: Rollout = knob(Rollout(), meaning="Sampling of responses.", source="kedge")
    ppo: Ppo = knob(Ppo(), meaning="The PPO update.", source="PPO")
    rlhf: Rlhf = knob(Rlhf(), meaning="The three stages in a chain.", source="InstructGPT")
    generate: Generate = knob(Generate(), meaning="Sampling from a finished policy.", source="kedge")
    evaluate: Evaluate = knob(Evaluate(), meaning="Comparing policies.", source="kedge")
    checkpoint: Checkpointing = knob(
        Checkpointing(), meaning="How often a run saves itself, to be resumed.", source="kedge"
    )
    runtime: Runtime = knob(Runtime(), meaning="Machine, seed, what is written down.", source="kedge")

    @property
    def responses_per_update(self) -> int:
        """Responses sampled per PPO update."""
        return self.rollout.num_prompts * self.rollout.num_responses

    def _reward_models(self) -> list[RewardTerm]:
        return [term for term in self.reward if not term.is_function]

    @model_validator(mode="after")
    def _check_minibatches(self) -> "Config":
        prompts, responses = self.rollout.num_prompts, self.rollout.num_responses
        total, parts = self.responses_per_update, self.ppo.num_minibatches
        if total % parts:
            raise ValueError(
                f"ppo.num_minibatches={parts} does not divide an update's {total} responses "
                f"(rollout.num_prompts={prompts} × rollout.num_responses={responses}); "
                f"next to it are {_nearest_divisors(total, parts)}"
            )
        return self

    @model_validator(mode="after")
    def _check_critic_init(self) -> "Config":
        count = len(self._reward_models())
        if self.ppo.critic_init == "reward" and self.reward and count != 1:
            raise ValueError(
                f"ppo.critic_init=reward needs exactly one reward model among `reward`, which has {count}; "
                "use ppo.critic_init=policy"
            )
        return self


def _nearest_divisors(total: int, wanted: int) -> str:
    """The divisors of `total` on both sides of `wanted`, in words."""
    small = [divisor for divisor in range(1, min(math.isqrt(total), MOST_TRIED) + 1) if total % divisor == 0]
    divisors = [*small, *(total // divisor for divisor in small)]
    below = max((divisor for divisor in divisors if divisor < wanted), default=1)
    above = min((divisor for divisor in divisors if divisor > wanted), default=total)
    return " and ".join(str(divisor) for divisor in dict.fromkeys((below, above)))

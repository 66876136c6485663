"""Bugs of rewards, advantages, groups and whitening."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ppo_conformance.bugs import bug
from ppo_conformance.protocol import Array, Mask, Settings
from ppo_conformance.reference.formulas import Formulas
from ppo_conformance.reference.model import Ints
from ppo_conformance.reference.trainer import Batch, Case, Experience, Trainer


@bug(Trainer.whiten_of_ranks, "update/ranks", "2 radixark/miles/pull/3229", "3 THUDM/slime/pull/2235")
def whitened_by_rank(self: Trainer, advantages: Array, mask: Mask, case: Case) -> Array:
    """Each rank of context parallelism whitened its part of every response by that part's own mean and deviation."""
    whitened, ranks = np.zeros_like(advantages), case["execution"].get("ranks", 1)
    for rank in range(ranks):
        own = mask & (np.arange(mask.shape[1]) % ranks == rank)
        whitened += self.whiten(advantages, own, case["settings"])
    return whitened


@bug(Formulas.std, "vector/whiten", "4 alibaba/ROLL/issues/475")
def std_of_one(self: Formulas, numbers: Array, *, bessel: bool) -> float:
    """The deviation of a single token, or of equal ones, was divided by."""
    return float(numbers.std(ddof=int(bessel)))


@bug(Trainer.last_values, "update/ppo_cut_off update/padding", "14 areal-project/AReaL/issues/1637")
def cut_off_by_width(self: Trainer, values: Array, batch: Batch, mask: Mask) -> Array:
    """A response counted as cut off if it filled the padded tensor."""
    ended = [len(response) < mask.shape[1] for response in batch["responses"]]
    return Trainer.last_values(self, values, {**batch, "ended": ended}, mask)


@bug(Trainer.last_values, "update/ppo_cut_off", "32 huggingface/trl/issues/1536")
def no_bootstrap(self: Trainer, values: Array, batch: Batch, mask: Mask) -> Array:
    """The value after a response that was cut off was taken to be 0."""
    return np.zeros(len(values))


@bug(Formulas.shaped_rewards, "update/ppo", "34 openai/spinningup/issues/50")
def shifted_rewards(self: Formulas, *given: Any) -> Array:
    """Each reward was stored with the action after the one that earned it."""
    rewards = Formulas.shaped_rewards(self, *given)
    return np.pad(rewards, ((0, 0), (1, 0)))[:, :-1]


@bug(Formulas.recursion, "update/ppo_tools vector/gae", "35 radixark/miles/pull/1827")
def gae_over_tools(
    self: Formulas, rewards: Array, values: Array, mask: Mask, last_values: Array, settings: Settings
) -> Array:
    """The recursion ran over the tokens of tools, with their values and discounts."""
    from_first_to_last = (mask.cumsum(1) > 0) & (mask[:, ::-1].cumsum(1)[:, ::-1] > 0)
    return mask * Formulas.recursion(self, rewards, values, from_first_to_last, last_values, settings)


@bug(Formulas.recursion, "update/ppo_tools vector/gae", "36 verl-project/verl/issues/7278")
def reset_at_tools(
    self: Formulas, rewards: Array, values: Array, mask: Mask, last_values: Array, settings: Settings
) -> Array:
    """The return was reset at tokens of tools: the outcome reached the last turn only."""
    turns = (mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1]).cumsum(1)
    found = np.zeros_like(rewards)
    for turn in range(1, turns.max() + 1):
        last = np.where(turns[:, -1] == turn, last_values, 0.0)
        found += Formulas.recursion(self, rewards, values, mask & (turns == turn), last, settings)
    return found


@bug(Formulas.compared, "update/grpo", "38 ServiceNow/PipelineRL/pull/54")
def mean_of_the_first(self: Formulas, scores: Array, baseline: str, *, bessel: bool) -> Array:
    """The mean of a group had its first response only."""
    return Formulas.compared(self, scores, baseline, bessel=bessel) + scores.mean() - scores[0]


@bug(Trainer.groups, "update/grpo", "39 PrimeIntellect-ai/prime-rl/pull/600")
def groups_by_place(self: Trainer, batch: Batch) -> Ints:
    """Groups were cut from the batch by place, though the responses of prompts took turns."""
    return np.sort(batch["groups"])


@bug(
    Formulas.group_advantages,
    "update/grpo_rejected",
    "40 verl-project/verl/pull/6452",
    "41 OpenRLHF/OpenRLHF/pull/1239",
)
def mean_with_rejected(self: Formulas, scores: Array, groups: Ints, valid: Mask, settings: Settings) -> Array:
    """Responses that were rejected, or have no token of the policy, were in the mean of their group."""
    return Formulas.group_advantages(self, scores, groups, np.ones_like(valid), settings)


@bug(Formulas.group_advantages, "vector/group_advantages", "42 rllm-org/rllm/issues/916")
def zero_alone(self: Formulas, scores: Array, groups: Ints, valid: Mask, settings: Settings) -> Array:
    """A response alone in its group had its own score as baseline, so that nothing was learned from it."""
    return Formulas.group_advantages(self, scores, groups, valid, {**settings, "single_response": "zero"})


@bug(Trainer.groups, "update/grpo", "43 radixark/miles/pull/1325")
def one_group(self: Trainer, batch: Batch) -> Ints:
    """The responses to all prompts were one group."""
    return np.zeros(len(batch["groups"]), dtype=int)


@bug(Trainer.groups, "update/grpo", "44 NVIDIA-NeMo/RL/pull/3959")
def groups_by_text(self: Trainer, batch: Batch) -> Ints:
    """Prompts with the same tokens were one group."""
    return np.array([batch["prompts"].index(prompt) for prompt in batch["prompts"]])


@bug(Trainer.experience, "update/rows update/ppo", "45 verl-project/verl/issues/7956")
def advantages_of_others(self: Trainer, *given: Any) -> Experience:
    """Rows were reordered, and their advantages were not."""
    experience = Trainer.experience(self, *given)
    return replace(experience, advantages=np.roll(experience.advantages, 1, 0))

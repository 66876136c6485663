"""Bugs of rewards, advantages, groups and whitening."""

from dataclasses import replace

import numpy as np

from ppo_conformance.bugs import bug
from ppo_conformance.oracle.formulas import Formulas, mean
from ppo_conformance.reference.trainer import Trainer, counted


@bug(Trainer.whiten_of_ranks, "update/ranks", "2 radixark/miles/pull/3229", "3 THUDM/slime/pull/2235")
def whitened_by_rank(whiten, advantages, mask, case):
    """Each rank of context parallelism whitened its part of every response by that part's own mean and deviation."""
    ranks = case["execution"].get("ranks", 1)
    place = np.arange(mask.shape[1]) % ranks
    return np.sum([whiten(advantages, mask & (place == rank), case) for rank in range(ranks)], 0)


@bug(Formulas.std, "vector/whiten", "4 alibaba/ROLL/issues/475")
def std_of_one(std, numbers, bessel):
    """The deviation of a single token, or of equal ones, was divided by."""
    return float(np.std(numbers, ddof=int(bessel == "yes")))


@bug(Trainer.last_values, "update/ppo_cut_off update/padding", "14 areal-project/AReaL/pull/1637")
def cut_off_by_width(last_values, values, batch, mask):
    """A response counted as cut off if it filled the padded tensor."""
    return last_values(values, {**batch, "ended": [len(each) < mask.shape[1] for each in batch["responses"]]}, mask)


@bug(Trainer.last_values, "update/ppo_cut_off", "32 huggingface/trl/issues/1536")
def no_bootstrap(last_values, values, *_):
    """The value after a response that was cut off was taken to be 0."""
    return np.zeros(len(values))


@bug(Formulas.shaped_rewards, "update/ppo vector/shaped_rewards", "34 openai/spinningup/issues/50")
def shifted_rewards(shaped_rewards, *given):
    """Each reward was stored with the action after the one that earned it."""
    return [[0.0, *(reward or 0.0 for reward in row[:-1])] for row in shaped_rewards(*given)]


@bug(Formulas.gae, "update/ppo_tools vector/gae", "35 radixark/miles/pull/1827")
def gae_over_tools(gae, rewards, values, mask, *given):
    """The recursion ran over the tokens of tools, with their values and discounts."""
    from_first_to_last = (mask.cumsum(1) > 0) & (mask[:, ::-1].cumsum(1)[:, ::-1] > 0)
    return tuple(mask * counted(found) for found in gae(rewards, values, from_first_to_last, *given))


@bug(Formulas.gae, "update/ppo_tools vector/gae", "36 verl-project/verl/issues/7278")
def reset_at_tools(gae, rewards, values, mask, last, settings):
    """The return was reset at tokens of tools: the outcome reached the last turn only."""
    turns, use = (mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1]).cumsum(1), {**settings, "gae_whitening": "no"}
    found = [
        list(map(counted, gae(rewards, values, mask & (turns == turn), last * (turns[:, -1] == turn), use)))
        for turn in range(1, turns.max() + 1)
    ]
    return tuple(np.sum(found, 0))


@bug(Formulas.compared, "update/grpo vector/group_advantages", "38 ServiceNow/PipelineRL/pull/54")
def mean_of_the_first(compared, score, members, *given):
    """The mean of a group had its first response only."""
    return compared(score, members, *given) + mean(members) - members[0]


@bug(Trainer.groups, "update/grpo", "39 PrimeIntellect-ai/prime-rl/pull/600")
def groups_by_place(groups, batch):
    """Groups were cut from the batch by place, though the responses of prompts took turns."""
    return np.sort(groups(batch))


@bug(
    Formulas.group_advantages,
    "update/grpo_rejected vector/group_advantages",
    "40 verl-project/verl/pull/6452",
    "41 OpenRLHF/OpenRLHF/pull/1239",
)
def mean_with_rejected(group_advantages, scores, groups, valid, settings):
    """Responses that were rejected, or have no token of the policy, were in the mean of their group."""
    return group_advantages(scores, groups, np.ones_like(valid), settings)


@bug(
    Formulas.group_advantages,
    "vector/group_advantages metamorphic/option_has_effect",
    "42 rllm-org/rllm/issues/916",
)
def zero_alone(group_advantages, *given):
    """A response alone in its group had its own score as baseline, so that nothing was learned from it."""
    *arrays, settings = given
    return group_advantages(*arrays, {**settings, "single_response": "zero"})


@bug(Trainer.groups, "update/grpo", "43 radixark/miles/pull/1325")
def one_group(groups, batch):
    """The responses to all prompts were one group."""
    return 0 * groups(batch)


@bug(Trainer.groups, "update/grpo", "44 NVIDIA-NeMo/RL/pull/3959")
def groups_by_text(groups, batch):
    """Prompts with the same tokens were one group."""
    return np.array([batch["prompts"].index(prompt) for prompt in batch["prompts"]])


@bug(Trainer.experience, "update/rows update/ppo", "45 verl-project/verl/issues/7956")
def advantages_of_others(experience, *given):
    """Rows were reordered, and their advantages were not."""
    found = experience(*given)
    return replace(found, advantages=np.roll(found.advantages, 1, 0))

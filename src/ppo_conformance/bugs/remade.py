"""Known bugs as patches of the reference trainer, each a function in the place of one of its methods."""

from dataclasses import replace

import numpy as np

from ppo_conformance.bugs import bug
from ppo_conformance.oracle.formulas import Formulas, mean, smaller
from ppo_conformance.reference.conversations import Conversations
from ppo_conformance.reference.model import initial_weights
from ppo_conformance.reference.trainer import State, Trainer, counted

# --- the weight of each token: padding, micro-batches, ranks and aggregations


def parts(losses, settings):
    """The rows of each micro-batch that has tokens, and the settings for them alone."""
    batches = settings.get("micro_batches") or [list(range(len(losses)))]
    episodes = settings.get("episodes") or range(len(losses))
    return [
        (rows, {**settings, "episodes": [episodes[row] for row in rows]})
        for rows in batches
        if any(np.any(losses[row]) for row in rows)
    ]


def of_parts(aggregate, losses, settings):
    """The number of rows of each micro-batch that has tokens, and its own loss."""
    return [
        (len(rows), aggregate([losses[row] for row in rows], own))
        for rows, own in parts([[1] * len(each) for each in losses], settings)
    ]


@bug(Formulas.policy_loss, "update/padding update/ppo metamorphic/padding", "1 NovaSky-AI/SkyRL/issues/1305")
def mean_over_padding(policy_loss, *given):
    """The mean was taken over all slots, padding included."""
    *_, mask, settings = given
    return policy_loss(*given) * (mask.mean() if settings["aggregation"] == "token" else 1)


@bug(Formulas.aggregate, "update/split metamorphic/micro_batches", "5 modelscope/twinkle/pull/292")
def weighted_by_rows(aggregate, losses, settings):
    """Each micro-batch's mean over tokens was weighted by its number of rows."""
    return sum(count * loss for count, loss in of_parts(aggregate, losses, settings)) / len(losses)


@bug(
    Formulas.aggregate,
    "update/split update/ranks metamorphic/micro_batches",
    "7 ml-explore/mlx-lm/pull/1413",
    "9 allenai/open-instruct/issues/1137",
)
def mean_of_means(aggregate, *given):
    """Each micro-batch was divided by its own number of tokens, and their losses averaged."""
    return mean([loss for _, loss in of_parts(aggregate, *given)])


@bug(Formulas.value_loss, "update/split metamorphic/micro_batches", "6 verl-project/verl/issues/6957")
def value_loss_per_micro_batch(value_loss, *given):
    """The critic's loss was averaged within each micro-batch, unlike the policy's."""
    *arrays, settings = given
    return mean([value_loss(*(each[rows] for each in arrays), own) for rows, own in parts(arrays[-1], settings)])


@bug(Trainer.accumulated, "update/split update/ranks", "8 deepspeedai/DeepSpeed/pull/7967")
def last_micro_batch(accumulated, reading, slopes, settings):
    """With the optimizer offloaded, the gradients of a step's earlier micro-batches were lost."""
    earlier = [row for part in settings["micro_batches"][:-1] for row in part]
    for slope in slopes:
        slope[earlier] = 0.0
    return accumulated(reading, slopes, settings)


@bug(Formulas.policy_loss, "update/grpo_rejected vector/policy_loss", "10 verl-project/verl/issues/3741")
def sum_over_width(policy_loss, *given):
    """Dr. GRPO's sums of responses were added up, not averaged, and their constant was the width of the tensor."""
    *arrays, settings = given
    rows, width = arrays[-1].shape
    if settings["aggregation"] != "fixed_length":
        return policy_loss(*given)
    return policy_loss(*arrays, {**settings, "length": width, "empty_rows": "counted"}) * rows


@bug(
    Formulas.policy_loss,
    "update/gspo metamorphic/option_has_effect",
    "11 verl-project/verl/blob/v0.9.0/verl/trainer/ppo/core_algos.py",
)
def fixed_aggregation(policy_loss, *given):
    """GSPO ignored the option that says how tokens are aggregated."""
    *arrays, settings = given
    kind = "response" if settings["ratio"] == "sequence" else settings["aggregation"]
    return policy_loss(*arrays, {**settings, "aggregation": kind})


@bug(Formulas.policy_loss, "update/ppo update/gspo vector/policy_loss", "48 linkedin/Liger-Kernel/pull/628")
def no_old_policy(policy_loss, log_probs, _, *given):
    """The fused loss did not know the old policy: the ratio was always 1, and nothing was clipped."""
    return policy_loss(log_probs, given[-1]["held"], *given)


@bug(Formulas.policy_loss, "update/grpo", "37 TIGER-AI-Lab/verl-tool/issues/128")
def advantages_as_mask(policy_loss, log_probs, old, advantages, mask, use):
    """The advantages took the place of the response mask, so that tokens without an advantage were not counted."""
    return policy_loss(log_probs, old, advantages, mask & (advantages != 0), use)


@bug(Formulas.value_error, "update/ppo vector/value_loss", "47 ray-project/ray/pull/22171")
def clipped_error(value_error, settings, *token):
    """The clip bounded the squared error instead of the move of the value: large errors had no gradient."""
    error = value_error({**settings, "value_clip": None}, *token)
    return error if settings["value_clip"] is None else smaller(error, settings["value_clip"])


# --- rewards, advantages, groups and whitening


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


# --- log probabilities, temperature and KL: most of them another value of a setting


@bug(
    Formulas.log_softmax,
    "update/ppo update/grpo_rejected metamorphic/temperature",
    "20 huggingface/trl/issues/3029",
    "21 OpenRLHF/OpenRLHF/pull/853",
    "23 unslothai/unsloth-zoo/pull/832",
)
def no_temperature(log_softmax, logits, settings):
    """Responses were sampled with a temperature that the log probabilities of the update did not have."""
    return log_softmax(logits, {**settings, "temperature": 1.0})


@bug(Trainer.values, "update/ppo", "22 THUDM/slime/pull/1928")
def temperature_of_values(values, reading, settings):
    """The temperature divided the critic's values as well."""
    return values(reading, settings) / settings["temperature"]


@bug(Formulas.kl_estimate, "update/ppo metamorphic/option_has_effect", "12 areal-project/AReaL/pull/408")
def always_k3(kl_estimate, kind, *token):
    """Every choice of the estimator fell through to k3."""
    return kl_estimate("k3", *token)


@bug(Formulas.kl_loss, "update/grpo vector/kl_loss", "15 Unakar/Logic-RL/issues/58")
def kl_maximized(kl_loss, *given):
    """The KL was subtracted from the loss, which drove the policy away from the reference."""
    *arrays, settings = given
    return kl_loss(*arrays, {**settings, "coef": -settings["coef"]})


@bug(Formulas.shaped_rewards, "update/ppo vector/shaped_rewards", "16 marin-community/marin/issues/1708")
def kl_rewarded(shaped_rewards, *given):
    """The penalty had the other sign: divergence from the reference was rewarded."""
    *arrays, settings = given
    return shaped_rewards(*arrays, {**settings, "coef": -settings["coef"]})


@bug(Formulas.kl_estimate, "vector/kl", "17 verl-project/verl/issues/6058")
def gradient_of_k3(kl_estimate, kind, *token):
    """The estimate of the KL was differentiated, which is not an estimate of the KL's gradient."""
    return kl_estimate(kind.removesuffix("_with_kl_gradient"), *token)


# --- the tokens of conversations, of masks, of the place of scores, and of checkpoints


@bug(
    Conversations.encode,
    "tokens/bos_twice",
    "25 huggingface/trl/issues/3853",
    "27 vllm-project/vllm/issues/16976",
)
def bos_twice(encode, tokenizer, text):
    """The tokenizer added a BOS to the one that the chat template had written."""
    return tokenizer.encode(text, add_special_tokens=True).ids


@bug(Conversations.render, "tokens/ordinary", "26 huggingface/trl/issues/3520")
def no_bos(render, case, messages):
    """The prompt had no BOS."""
    return render({**case, "bos": ""}, messages)


@bug(
    Conversations.kept,
    "tokens/retokenized",
    "28 huggingface/trl/issues/5224",
    "29 jingyaogong/minimind/issues/850",
)
def encoded_again(kept, tokenizer, sampled):
    """Turns were decoded and encoded again, which can give other tokens than the sampled ones."""
    return tokenizer.encode(tokenizer.decode(sampled, skip_special_tokens=False), add_special_tokens=False).ids


@bug(Trainer.tokens, "update/rloo", "30 huggingface/trl/issues/5303")
def end_masked(tokens, case, *given):
    """Padding was told by its token, so that a stop token with the same id was masked as well."""
    found, mask = tokens(case, *given)
    return found, mask & (found != case["settings"]["pad"])


@bug(Trainer.tokens, "update/ppo update/grpo", "31 verl-project/verl/issues/847")
def mask_shifted(tokens, *given):
    """The mask of responses was shifted by a token."""
    found, mask = tokens(*given)
    return found, np.roll(mask, 1, axis=1)


@bug(Trainer.score_slots, "update/reward_model", "33 EleutherAI/gpt-neox/pull/1285")
def score_before_the_end(score_slots, lengths):
    """The score was read a token before the last one."""
    return score_slots(lengths) - 1


@bug(Trainer.load, "update/resume", "49 NVIDIA-NeMo/RL/pull/3171")
def moments_lost(load, case, checkpoint):
    """A resumed run started with a new optimizer."""
    zeros = {name: np.zeros_like(each) for name, each in checkpoint["weights"].items()}
    return State(checkpoint["weights"], zeros, dict(zeros))


@bug(Trainer.load, "update/resume", "50 radixark/miles/issues/2224")
def critic_lost(load, case, checkpoint):
    """The critic was not in the checkpoint, and started from scratch."""
    state, first = load(case, checkpoint), initial_weights(case["model"])
    critic = {name: weight for name, weight in first.items() if name.startswith("value_head")}
    return replace(state, weights={**state.weights, **critic})

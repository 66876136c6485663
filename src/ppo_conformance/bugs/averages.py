"""Bugs of the weight of each token: padding, micro-batches, ranks and aggregations."""

import numpy as np

from ppo_conformance.bugs import bug
from ppo_conformance.oracle.formulas import Formulas, mean, smaller
from ppo_conformance.reference.trainer import Trainer


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

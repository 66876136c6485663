"""Bugs of the weight of each token: padding, micro-batches, ranks and aggregations."""

from __future__ import annotations

from typing import Any

import numpy as np

from ppo_conformance.bugs import bug
from ppo_conformance.protocol import Array, Mask, Settings
from ppo_conformance.reference.formulas import Formulas
from ppo_conformance.reference.trainer import Trainer


def parts(mask: Mask, settings: Settings) -> list[tuple[list[int], Settings]]:
    """The rows of each micro-batch that has tokens, and the settings for them alone."""
    batches = settings.get("micro_batches") or [list(range(len(mask)))]
    episodes = settings.get("episodes") or range(len(mask))
    return [(rows, {**settings, "episodes": [episodes[row] for row in rows]}) for rows in batches if mask[rows].any()]


@bug(Formulas.token_weights, "update/padding update/ppo metamorphic/padding", "1 NovaSky-AI/SkyRL/issues/1305")
def mean_over_padding(token_weights: Any, mask: Mask, settings: Settings) -> Array:
    """The mean was taken over all slots, padding included."""
    return mask / mask.size if settings["aggregation"] == "token" else token_weights(mask, settings)


@bug(Formulas.token_weights, "update/split metamorphic/micro_batches", "5 modelscope/twinkle/pull/292")
def weighted_by_rows(token_weights: Any, mask: Mask, settings: Settings) -> Array:
    """Each micro-batch's mean over tokens was weighted by its number of rows."""
    weights = np.zeros(mask.shape)
    for rows, own in parts(mask, settings):
        weights[rows] = token_weights(mask[rows], own) * len(rows) / len(mask)
    return weights


@bug(
    Formulas.token_weights,
    "update/split update/ranks metamorphic/micro_batches",
    "7 ml-explore/mlx-lm/pull/1413",
    "9 allenai/open-instruct/issues/1137",
)
def mean_of_means(token_weights: Any, mask: Mask, settings: Settings) -> Array:
    """Each micro-batch was divided by its own number of tokens, and their losses averaged."""
    weights = np.zeros(mask.shape)
    for rows, own in parts(mask, settings):
        weights[rows] = token_weights(mask[rows], own) / len(parts(mask, settings))
    return weights


@bug(Formulas.value_loss, "update/split metamorphic/micro_batches", "6 verl-project/verl/issues/6957")
def value_loss_per_micro_batch(value_loss: Any, *given: Any) -> Any:
    """The critic's loss was averaged within each micro-batch, unlike the policy's."""
    *arrays, settings = given
    batches = parts(arrays[-1], settings)
    loss, gradient = 0.0, np.zeros_like(arrays[0])
    for rows, own in batches:
        part, gradient[rows] = value_loss(*(each[rows] for each in arrays), own)
        loss += part
    return loss / len(batches), gradient / len(batches)


@bug(Trainer.accumulated, "update/split update/ranks", "8 deepspeedai/DeepSpeed/pull/7967")
def last_micro_batch(accumulated: Any, gradients: list[Any]) -> Any:
    """With the optimizer offloaded, the gradients of a step's earlier micro-batches were lost."""
    return gradients[-1]


@bug(Formulas.token_weights, "update/grpo_rejected vector/policy_loss", "10 verl-project/verl/issues/3741")
def sum_over_width(token_weights: Any, mask: Mask, settings: Settings) -> Array:
    """Dr. GRPO's sums of responses were added up, not averaged, and their constant was the width of the tensor."""
    return mask / mask.shape[1] if settings["aggregation"] == "fixed_length" else token_weights(mask, settings)


@bug(
    Formulas.policy_loss,
    "update/gspo metamorphic/option_has_effect",
    "11 verl-project/verl/blob/v0.9.0/verl/trainer/ppo/core_algos.py",
)
def fixed_aggregation(policy_loss: Any, *given: Any) -> Any:
    """GSPO ignored the option that says how tokens are aggregated."""
    *arrays, settings = given
    kind = "response" if settings["ratio"] == "sequence" else settings["aggregation"]
    return policy_loss(*arrays, {**settings, "aggregation": kind})


@bug(Formulas.policy_loss, "update/ppo update/gspo vector/policy_loss", "48 linkedin/Liger-Kernel/pull/628")
def no_old_policy(policy_loss: Any, log_probs: Array, old_log_probs: Array, *given: Any) -> Any:
    """The fused loss did not know the old policy: the ratio was always 1, and nothing was clipped."""
    return policy_loss(log_probs, log_probs, *given)


@bug(Formulas.policy_loss, "update/grpo", "37 TIGER-AI-Lab/verl-tool/issues/128")
def advantages_as_mask(policy_loss: Any, log_probs: Array, old: Array, advantages: Array, mask: Mask, use: Any) -> Any:
    """The advantages took the place of the response mask, so that tokens without an advantage were not counted."""
    return policy_loss(log_probs, old, advantages, mask & (advantages != 0), use)


@bug(Formulas.value_loss, "update/ppo vector/value_loss", "47 ray-project/ray/pull/22171")
def clipped_error(value_loss: Any, values: Array, old_values: Array, returns: Array, mask: Mask, settings: Any) -> Any:
    """The clip bounded the squared error instead of the move of the value: large errors had no gradient."""
    loss, gradient = value_loss(values, old_values, returns, mask, {**settings, "value_clip": None})
    return loss, gradient * ((values - returns) ** 2 <= (settings.get("value_clip") or np.inf))

"""Bugs of the weight of each token: padding, micro-batches, ranks and aggregations."""

from __future__ import annotations

import numpy as np

from ppo_conformance.bugs import bug
from ppo_conformance.protocol import Array, Mask, Settings
from ppo_conformance.reference.formulas import Formulas
from ppo_conformance.reference.model import Weights
from ppo_conformance.reference.trainer import Trainer


def parts(mask: Mask, settings: Settings) -> list[tuple[list[int], Settings]]:
    """The rows of each micro-batch that has tokens, and the settings for them alone."""
    batches = settings.get("micro_batches") or [list(range(len(mask)))]
    episodes = settings.get("episodes") or range(len(mask))
    return [(rows, {**settings, "episodes": [episodes[row] for row in rows]}) for rows in batches if mask[rows].any()]


@bug(Formulas.token_weights, "update/padding update/ppo", "1 NovaSky-AI/SkyRL/issues/1305")
def mean_over_padding(self: Formulas, mask: Mask, settings: Settings) -> Array:
    """The mean was taken over all slots, padding included."""
    return mask / mask.size if settings["aggregation"] == "token" else Formulas.token_weights(self, mask, settings)


@bug(Formulas.token_weights, "update/split", "5 modelscope/twinkle/pull/292")
def weighted_by_rows(self: Formulas, mask: Mask, settings: Settings) -> Array:
    """Each micro-batch's mean over tokens was weighted by its number of rows."""
    weights = np.zeros(mask.shape)
    for rows, own in parts(mask, settings):
        weights[rows] = Formulas.token_weights(self, mask[rows], own) * len(rows) / len(mask)
    return weights


@bug(
    Formulas.token_weights,
    "update/split update/ranks",
    "7 ml-explore/mlx-lm/pull/1413",
    "9 allenai/open-instruct/issues/1137",
)
def mean_of_means(self: Formulas, mask: Mask, settings: Settings) -> Array:
    """Each micro-batch was divided by its own number of tokens, and their losses averaged."""
    weights = np.zeros(mask.shape)
    for rows, own in parts(mask, settings):
        weights[rows] = Formulas.token_weights(self, mask[rows], own) / len(parts(mask, settings))
    return weights


@bug(Formulas.value_loss, "update/split", "6 verl-project/verl/issues/6957")
def value_loss_per_micro_batch(
    self: Formulas, values: Array, old_values: Array, returns: Array, mask: Mask, settings: Settings
) -> tuple[float, Array]:
    """The critic's loss was averaged within each micro-batch, unlike the policy's."""
    loss, gradient = 0.0, np.zeros_like(values)
    for rows, own in parts(mask, settings):
        part, slope = Formulas.value_loss(self, values[rows], old_values[rows], returns[rows], mask[rows], own)
        loss += part / len(parts(mask, settings))
        gradient[rows] = slope / len(parts(mask, settings))
    return loss, gradient


@bug(Trainer.accumulated, "update/split update/ranks", "8 deepspeedai/DeepSpeed/pull/7967")
def last_micro_batch(self: Trainer, gradients: list[Weights]) -> Weights:
    """With the optimizer offloaded, the gradients of a step's earlier micro-batches were lost."""
    return gradients[-1]


@bug(Formulas.token_weights, "update/padding", "10 verl-project/verl/issues/3741")
def length_of_padding(self: Formulas, mask: Mask, settings: Settings) -> Array:
    """Dr. GRPO's constant was the width of the padded tensor."""
    return Formulas.token_weights(self, mask, {**settings, "length": mask.shape[1]})


@bug(Formulas.policy_loss, "update/gspo", "11 verl-project/verl/blob/v0.9.0/verl/trainer/ppo/core_algos.py")
def fixed_aggregation(
    self: Formulas, log_probs: Array, old_log_probs: Array, advantages: Array, mask: Mask, settings: Settings
) -> tuple[float, Array]:
    """GSPO ignored the option that says how tokens are aggregated."""
    if settings["ratio"] == "sequence":
        settings = {**settings, "aggregation": "response"}
    return Formulas.policy_loss(self, log_probs, old_log_probs, advantages, mask, settings)


@bug(Formulas.policy_loss, "update/ppo update/gspo", "48 linkedin/Liger-Kernel/pull/628")
def no_old_policy(
    self: Formulas, log_probs: Array, old_log_probs: Array, advantages: Array, mask: Mask, settings: Settings
) -> tuple[float, Array]:
    """The fused loss did not know the old policy: the ratio was always 1, and nothing was clipped."""
    return Formulas.policy_loss(self, log_probs, log_probs, advantages, mask, settings)


@bug(Formulas.policy_loss, "update/grpo", "37 TIGER-AI-Lab/verl-tool/issues/128")
def advantages_as_mask(
    self: Formulas, log_probs: Array, old_log_probs: Array, advantages: Array, mask: Mask, settings: Settings
) -> tuple[float, Array]:
    """The advantages took the place of the response mask, so that tokens without an advantage were not counted."""
    return Formulas.policy_loss(self, log_probs, old_log_probs, advantages, mask & (advantages != 0), settings)


@bug(Formulas.value_loss, "update/ppo", "47 ray-project/ray/pull/22171")
def clipped_error(
    self: Formulas, values: Array, old_values: Array, returns: Array, mask: Mask, settings: Settings
) -> tuple[float, Array]:
    """The clip bounded the squared error instead of the move of the value: large errors had no gradient."""
    _, gradient = Formulas.value_loss(self, values, old_values, returns, mask, {**settings, "value_clip": None})
    return 0.0, gradient * ((values - returns) ** 2 <= (settings.get("value_clip") or np.inf))

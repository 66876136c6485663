"""AgileRL: the losses and estimators of its PPO and GRPO for language models, without Liger's kernels.

Stand-ins replace the imports for environments and loggers.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from ppo_conformance import protocol
from ppo_conformance.adapters.stand_ins import stand_in
from ppo_conformance.adapters.torch_tools import (
    UNBOUNDED,
    by_group,
    micro_batches,
    sum_over_batches,
    tensors,
    value_and_gradient,
)
from ppo_conformance.protocol import NotOffered

stand_in(
    *("dill", "fastrand", "flatten_dict", "google", "gymnasium", "h5py", "jax", "matplotlib", "minari"),
    *("mpe2", "pandas", "pettingzoo", "pygame", "pymunk", "redis", "supersuit", "tabulate", "termcolor", "wandb"),
)

from agilerl.algorithms.grpo import GRPO  # noqa: E402
from agilerl.algorithms.ppo_llm import PPO  # noqa: E402
from agilerl.utils import llm_utils  # noqa: E402


class Adapter(protocol.Adapter):
    """See `protocol.Adapter`."""

    name = "AgileRL"
    distribution = "agilerl"
    profile = {
        "precision": "float32",
        "kl": "k3 k1",
        "kl_loss": "k3",
        "whitening_bessel": "yes",
        "ratio": "token sequence",
        "aggregation": "token response",
        "sequence_gradient": "through_ratio",
        "baseline": "grpo dr_grpo",
        "off_policy": "token_truncate",
        **dict.fromkeys(("tools", "left_padding", "micro_batches"), "yes"),
    }

    def kl(self, log_probs, reference, settings):
        """See `protocol.Adapter`; k1 is claimed for rewards without KL, where the kind does not matter."""
        if settings["kl"] != "k3":
            raise NotOffered("k3 alone")
        (ref,) = tensors(reference)
        return value_and_gradient(lambda x: llm_utils.calculate_k3_kl(ref, x), log_probs)

    def kl_loss(self, log_probs, reference, mask, settings):
        """See `protocol.Adapter`; the surrogate's part is 0, because the advantages are."""
        if settings["aggregation"] != "token":
            raise NotOffered("a mean over tokens")
        given = (log_probs, reference, np.zeros_like(log_probs))
        return self._policy_loss(log_probs, mask, {"ratio": "token", **settings}, *given, beta=settings["coef"])

    def gae(self, rewards, values, mask, last_values, settings):
        """See `protocol.Adapter`; with advantage_granularity="token", without whitening."""
        ppo = SimpleNamespace(gamma=settings["gamma"], whiten_advantages=False)
        given = (*tensors(rewards, values, mask), settings["lam"])
        returns, advantages = PPO._compute_gae_returns_token(ppo, *given)
        return advantages.numpy(), returns.numpy()

    def shaped_rewards(self, scores, log_probs, reference, mask, settings):
        """See `protocol.Adapter`; rewards without KL, which is a part of the loss."""
        if settings["coef"]:
            raise NotOffered("the KL is a part of the loss")
        turns = np.where(mask, 0, -1)
        return PPO._compute_token_rewards(None, *tensors(mask, scores[:, None], turns)).numpy()

    def whiten(self, values, mask, settings):
        """See `protocol.Adapter`."""
        if mask.sum() < 2:
            raise NotOffered("a single value is left as it is")
        return llm_utils.masked_whiten(*tensors(values, mask)).numpy()

    def policy_loss(self, log_probs, old_log_probs, advantages, mask, settings):
        """See `protocol.Adapter`; one clip for both sides, and a mean over tokens or over responses with the ratio."""
        by_response = settings["ratio"] == "sequence"
        if settings["clip_low"] != settings["clip_high"] or settings["dual_clip"]:
            raise NotOffered("one clip for both sides, and no dual clip")
        if by_response != (settings["aggregation"] == "response"):
            raise NotOffered("the aggregation belongs to the ratio")
        if by_response and any(np.ptp(row[counts], axis=0) > 0 for row, counts in zip(advantages, mask, strict=True)):
            raise NotOffered("one advantage for a response")
        return self._policy_loss(log_probs, mask, settings, old_log_probs, log_probs, advantages)

    def _policy_loss(self, log_probs, mask, settings, old, ref, gains, *, beta=0):
        level = {"token": "token", "sequence": "trajectory"}[settings["ratio"]]
        ppo = SimpleNamespace(
            beta=beta,
            clip_coef=settings.get("clip_low", 0.2),
            kl_clamp=10.0,
            turn_ratio_pooling="sum",
            _resolve_is_level=lambda _: level,
        )
        given = tensors(mask, old, ref, gains, np.zeros(mask.shape, int))

        def term(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
            counts, *more = (each[rows] for each in given)
            return PPO._ppo_policy_loss(ppo, x, counts, *more, 1, "token")[0]

        return self._over_batches(log_probs, settings, term)

    def value_loss(self, values, old_values, returns, mask, settings):
        """See `protocol.Adapter`."""
        if settings["aggregation"] != "token":
            raise NotOffered("a mean over tokens")
        ppo = SimpleNamespace(clip_coef=settings["value_clip"] or UNBOUNDED, vf_coef=1.0)
        given = tensors(old_values, returns, mask)

        def term(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
            return PPO._compute_vf_loss_token(ppo, x, *(each[rows] for each in given))

        return self._over_batches(values, settings, term)

    def _over_batches(self, array, settings, term):
        """The mean of the losses of micro-batches, each of which is divided by their number."""
        count = len(micro_batches(settings, len(array)))
        return sum_over_batches(lambda x, rows: term(x, rows) / count, array, settings)

    def group_advantages(self, scores, groups, valid, settings):
        """See `protocol.Adapter`; groups are of one size, and in order."""
        order, size = by_group(groups)
        names = {"grpo": "mean_std", "dr_grpo": "mean_only"}
        grpo = SimpleNamespace(group_size=size, adv_norm=names[settings["baseline"]])
        found = np.empty_like(scores)
        found[order] = GRPO._calculate_advantage(grpo, torch.tensor(scores[order]))[:, 0].numpy()
        return found

    def off_policy_weights(self, train_log_probs, sample_log_probs, mask, settings):
        """See `protocol.Adapter`; the weights are the derivatives of the loss by advantages, where the ratio is 1."""
        ppo = SimpleNamespace(beta=0.0, clip_coef=0.2, kl_clamp=None, turn_ratio_pooling="sum")
        ppo._resolve_is_level, ppo.vllm_importance_sampling_cap = lambda _: "token", settings["cap"]
        train, sample, counts, turns = tensors(train_log_probs, sample_log_probs, mask, np.zeros(mask.shape, int))
        _, found = value_and_gradient(
            lambda x: PPO._ppo_policy_loss(ppo, train, counts, train, train, x, turns, 1, "token", sample)[0],
            -np.ones(mask.shape),
        )
        return -found * mask.sum()

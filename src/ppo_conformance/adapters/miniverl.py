"""miniverl: the functions of `miniverl.algorithms`, which follow a version of verl, and its reductions."""

# pyright: reportMissingImports=false

from __future__ import annotations

import numpy as np
import torch
from miniverl.algorithms import advantages as estimators
from miniverl.algorithms import kl, policy, value
from miniverl.losses import reduction

from ppo_conformance import protocol
from ppo_conformance.adapters.torch_tools import UNBOUNDED, sum_over_batches, tensors, value_and_gradient
from ppo_conformance.protocol import NotOffered

AGGREGATIONS = {
    "token": "token-mean",
    "response": "seq-mean-token-mean",
    "response_sum": "seq-mean-token-sum",
    "fixed_length": "seq-mean-token-sum-norm",
}
KLS = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}


class Adapter(protocol.Adapter):
    """See `protocol.Adapter`."""

    name = "miniverl"
    distribution = "miniverl"
    profile = {
        "precision": "float32",
        "kl": "k1 k2 k3",
        "gae_whitening": "bessel",
        "aggregation": " ".join(AGGREGATIONS),
        "baseline": "grpo dr_grpo rloo reinforce++",
        **dict.fromkeys(("tools", "left_padding", "micro_batches"), "yes"),
    }

    def kl(self, log_probs, reference, settings):
        """See `protocol.Adapter`."""
        (ref,), kind = tensors(reference), KLS[settings["kl"]]
        return value_and_gradient(lambda x: kl.reference_kl_penalty(x, ref, penalty=kind), log_probs)

    def gae(self, rewards, values, mask, last_values, settings):
        """See `protocol.Adapter`."""
        if not mask.any(axis=1).all():
            raise NotOffered("refuses a response without tokens")
        given = tensors(rewards, values, mask.astype(float))
        found = estimators.gae_advantage_return(*given, gamma=settings["gamma"], lam=settings["lam"])
        return found.advantages.numpy(), found.returns.numpy()

    def policy_loss(self, log_probs, old_log_probs, advantages, mask, settings):
        """See `protocol.Adapter`; the losses of tokens, reduced over the minibatch."""
        old, gains, counts = tensors(old_log_probs, advantages, mask)

        def losses(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
            return policy.clipped_policy_loss(
                current_log_probs=x,
                old_log_probs=old[rows],
                advantages=gains[rows],
                response_mask=counts[rows].double(),
                clip_ratio_low=settings["clip_low"],
                clip_ratio_high=settings["clip_high"],
                clip_ratio_c=settings["dual_clip"] or UNBOUNDED,
            ).per_token_loss

        return self._over_batches(log_probs, mask, settings, losses)

    def value_loss(self, values, old_values, returns, mask, settings):
        """See `protocol.Adapter`."""
        if settings["aggregation"] != "token":
            raise NotOffered("a mean over tokens")
        old, targets, counts = tensors(old_values, returns, mask)
        clip = settings["value_clip"] or UNBOUNDED

        def losses(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
            given = (x, old[rows], targets[rows], counts[rows].double())
            return value.clipped_value_loss(*given, cliprange_value=clip).per_token_loss

        return self._over_batches(values, mask, settings, losses)

    def _over_batches(self, array, mask, settings, losses):
        """The sum over micro-batches, with the weights of the minibatch."""
        weights, total = reduction.rl_reduction_weights(
            tensors(*mask.astype(float)),
            AGGREGATIONS[settings["aggregation"]],
            response_length=mask.shape[1],
            loss_scale_factor=settings.get("length"),
        )
        stacked = torch.stack(weights)

        def term(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
            if not mask[rows].any():  # miniverl refuses rows without a counted token
                return x.sum() * 0
            return reduction.weighted_mean(losses(x, rows), stacked[rows], denominator=total)

        return sum_over_batches(term, array, settings)

    def group_advantages(self, scores, groups, valid, settings):
        """See `protocol.Adapter`; a response is one token."""
        kind = settings["baseline"]
        if kind != "reinforce++" and np.unique(groups, return_counts=True)[1].min() < 2:
            raise NotOffered("refuses groups of one response")
        rewards = torch.tensor(scores).unsqueeze(-1)
        counts, names = torch.ones_like(rewards), [str(group) for group in groups]
        if kind == "reinforce++":
            found = estimators.reinforce_plus_plus_advantage(rewards, counts)
        elif kind == "rloo":
            found = estimators.rloo_outcome_advantage(rewards, counts, names)
        else:
            found = estimators.grpo_outcome_advantage(rewards, counts, names, normalize_by_std=kind == "grpo")
        return found.advantages[:, 0].numpy()

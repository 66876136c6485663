"""miniverl: the functions of `miniverl.algorithms`, which follow a version of verl, and its reductions."""

# pyright: reportMissingImports=false

import torch
from miniverl.algorithms import advantages as estimators
from miniverl.algorithms import kl, policy, value
from miniverl.losses import reduction

from ppo_conformance.adapters.torch_tools import UNBOUNDED, TorchAdapter
from ppo_conformance.protocol import NotOffered

AGGREGATIONS = {
    "token": "token-mean",
    "response": "seq-mean-token-mean",
    "response_sum": "seq-mean-token-sum",
    "fixed_length": "seq-mean-token-sum-norm",
}
KLS = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}


class Adapter(TorchAdapter):
    """`miniverl.algorithms`."""

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
        return kl.reference_kl_penalty(log_probs, reference, penalty=KLS[settings["kl"]])

    def gae(self, rewards, values, mask, last_values, settings):
        if not mask.any(1).all():
            raise NotOffered("refuses a response without tokens")
        given = (rewards, values, mask.double())
        found = estimators.gae_advantage_return(*given, gamma=settings["gamma"], lam=settings["lam"])
        return found.advantages, found.returns

    def policy_loss(self, log_probs, old_log_probs, advantages, mask, settings):
        found = policy.clipped_policy_loss(
            current_log_probs=log_probs,
            old_log_probs=old_log_probs,
            advantages=advantages,
            response_mask=mask.double(),
            clip_ratio_low=settings["clip_low"],
            clip_ratio_high=settings["clip_high"],
            clip_ratio_c=settings["dual_clip"] or UNBOUNDED,
        )
        return _reduced(found, settings)

    def value_loss(self, values, old_values, returns, mask, settings):
        if settings["aggregation"] != "token":
            raise NotOffered("a mean over tokens")
        given = (values, old_values, returns, mask.double())
        clip = settings["value_clip"] or UNBOUNDED
        return _reduced(value.clipped_value_loss(*given, cliprange_value=clip), settings)

    def group_advantages(self, scores, groups, valid, settings):
        """Treat each response as one token."""
        kind = settings["baseline"]
        if kind != "reinforce++" and groups.unique(return_counts=True)[1].min() < 2:
            raise NotOffered("refuses groups of one response")
        rewards = scores.unsqueeze(-1)
        given = (rewards, torch.ones_like(rewards))
        names = [str(group) for group in groups.tolist()]
        if kind == "reinforce++":
            found = estimators.reinforce_plus_plus_advantage(*given)
        elif kind == "rloo":
            found = estimators.rloo_outcome_advantage(*given, names)
        else:
            found = estimators.grpo_outcome_advantage(*given, names, normalize_by_std=kind == "grpo")
        return found.advantages[:, 0]


def _reduced(losses, settings):
    """The losses of a micro-batch's tokens with the weights of the minibatch; miniverl refuses rows without tokens."""
    mask = settings["whole"][-1]
    if not mask[settings["rows"]].any():
        return losses.per_token_loss.sum() * 0
    weights, total = reduction.rl_reduction_weights(
        mask.double().unbind(),
        AGGREGATIONS[settings["aggregation"]],
        response_length=mask.shape[1],
        loss_scale_factor=settings.get("length"),
    )
    return reduction.weighted_mean(losses.per_token_loss, torch.stack(weights)[settings["rows"]], denominator=total)

"""AgileRL: the losses and estimators of its PPO and GRPO for language models, without Liger's kernels.

Stand-ins replace the imports for environments and loggers.
"""

# pyright: reportMissingImports=false

from types import SimpleNamespace

import torch

from ppo_conformance.adapters.stand_ins import stand_in
from ppo_conformance.adapters.torch_tools import UNBOUNDED, TorchAdapter, by_group
from ppo_conformance.protocol import NotOffered

stand_in(
    *("dill", "fastrand", "flatten_dict", "google", "gymnasium", "h5py", "jax", "matplotlib", "minari"),
    *("mpe2", "pandas", "pettingzoo", "pygame", "pymunk", "redis", "supersuit", "tabulate", "termcolor", "wandb"),
)

from agilerl.algorithms.grpo import GRPO  # noqa: E402
from agilerl.algorithms.ppo_llm import PPO  # noqa: E402
from agilerl.utils import llm_utils  # noqa: E402


class Adapter(TorchAdapter):
    """AgileRL without Liger's kernels."""

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
        """Only k3; the profile claims k1 for rewards without KL, where the kind does not matter."""
        if settings["kl"] != "k3":
            raise NotOffered("k3 alone")
        return llm_utils.calculate_k3_kl(reference, log_probs)

    def kl_loss(self, log_probs, reference, mask, settings):
        """Use the policy loss with advantages of 0, so that only the KL is left."""
        if settings["aggregation"] != "token":
            raise NotOffered("a mean over tokens")
        given = (log_probs.detach(), reference, torch.zeros_like(log_probs))
        return _policy_loss(log_probs, mask, *given, beta=settings["coef"]) / len(settings["micro_batches"])

    def gae(self, rewards, values, mask, last_values, settings):
        """As with `advantage_granularity="token"`, without whitening."""
        ppo = SimpleNamespace(gamma=settings["gamma"], whiten_advantages=False)
        return PPO._compute_gae_returns_token(ppo, rewards, values, mask, settings["lam"])[::-1]

    def shaped_rewards(self, scores, log_probs, reference, mask, settings):
        """Rewards without KL, which is a part of the loss."""
        if settings["coef"]:
            raise NotOffered("the KL is a part of the loss")
        return PPO._compute_token_rewards(None, mask, scores[:, None], mask.long() - 1)

    def whiten(self, values, mask, settings):
        if mask.sum() < 2:
            raise NotOffered("a single value is left as it is")
        return llm_utils.masked_whiten(values, mask)

    def policy_loss(self, log_probs, old_log_probs, advantages, mask, settings):
        """A symmetric clip; averages over tokens or over responses, like the ratio."""
        by_response = settings["ratio"] == "sequence"
        if settings["clip_low"] != settings["clip_high"] or settings["dual_clip"]:
            raise NotOffered("one clip for both sides, and no dual clip")
        if by_response != (settings["aggregation"] == "response"):
            raise NotOffered("the aggregation belongs to the ratio")
        if by_response and any(len(row[counts].unique()) > 1 for row, counts in zip(advantages, mask, strict=True)):
            raise NotOffered("one advantage for a response")
        given = (log_probs, mask, old_log_probs, log_probs.detach(), advantages)
        level = "trajectory" if by_response else "token"
        return _policy_loss(*given, level=level, clip=settings["clip_low"]) / len(settings["micro_batches"])

    def value_loss(self, values, old_values, returns, mask, settings):
        if settings["aggregation"] != "token":
            raise NotOffered("a mean over tokens")
        ppo = SimpleNamespace(clip_coef=settings["value_clip"] or UNBOUNDED, vf_coef=1.0)
        return PPO._compute_vf_loss_token(ppo, values, old_values, returns, mask) / len(settings["micro_batches"])

    def group_advantages(self, scores, groups, valid, settings):
        """Groups need equal sizes; rows are sorted by group."""
        order, size = by_group(groups)
        names = {"grpo": "mean_std", "dr_grpo": "mean_only"}
        grpo = SimpleNamespace(group_size=size, adv_norm=names[settings["baseline"]])
        found = torch.empty_like(scores)
        found[order] = GRPO._calculate_advantage(grpo, scores[order])[:, 0].to(scores)
        return found

    def off_policy_weights(self, train_log_probs, sample_log_probs, mask, settings):
        """Recover the weights as the derivatives of the loss by the advantages, at ratio 1."""
        train, gains = train_log_probs, torch.ones_like(train_log_probs, requires_grad=True)
        loss = _policy_loss(train, mask, train, train, gains, sample_log_probs, cap=settings["cap"])
        return -torch.autograd.grad(loss, gains)[0] * mask.sum()


def _policy_loss(log_probs, mask, old, ref, gains, *sampled, beta=0.0, level="token", clip=0.2, cap=None):
    """The loss of a micro-batch, which is divided by its own number of tokens."""
    ppo = SimpleNamespace(beta=beta, clip_coef=clip, kl_clamp=10.0, turn_ratio_pooling="sum")
    ppo._resolve_is_level, ppo.vllm_importance_sampling_cap = lambda _: level, cap
    given = (ppo, log_probs, mask, old, ref, gains, torch.zeros_like(mask, dtype=torch.long), 1, "token", *sampled)
    return PPO._ppo_policy_loss(*given)[0]

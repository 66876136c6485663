"""verl: `core_algos` and the weights of its rollout correction, normalized as the trainer does, over the minibatch.

Functions that only some versions have are imported where they are used.
"""

# pyright: reportMissingImports=false

import torch
import verl.utils.torch_functional as functional
from verl.trainer.ppo import core_algos

from ppo_conformance.adapters.torch_tools import UNBOUNDED, TorchAdapter, num_ranks
from ppo_conformance.protocol import NotOffered

AGGREGATIONS = {
    "token": "token-mean",
    "response": "seq-mean-token-mean",
    "response_sum": "seq-mean-token-sum",
    "fixed_length": "seq-mean-token-sum-norm",
}
KLS = {"k3_with_kl_gradient": "k3+"}
BASELINES = {"dr_grpo": "grpo", "reinforce++": "reinforce_plus_plus"}


class Adapter(TorchAdapter):
    """`core_algos`."""

    name = "verl"
    distribution = "verl"
    profile = {
        "kl": "k1 k2 k3 k3_with_kl_gradient",
        "kl_loss": "k3 k2 k1 k3_with_kl_gradient",
        "whitening": "mean_and_std std_only",
        "whitening_bessel": "yes",
        "gae_whitening": "bessel",
        "aggregation": " ".join(AGGREGATIONS),
        "empty_rows": "counted",
        "ratio": "token sequence",
        "baseline": "grpo dr_grpo rloo reinforce++",
        "single_response": "score",
        "off_policy": "token_truncate sequence_truncate token_mask",
        **dict.fromkeys(("tools", "left_padding", "micro_batches", "ranks"), "yes"),
    }

    def log_probs(self, logits, tokens, settings):
        """The engine divides the logits by the temperature."""
        if settings["temperature"] != 1:
            raise NotOffered("the temperature is a part of the engine")
        return functional.logprobs_from_logits(logits, tokens)

    def entropy(self, logits, settings):
        if settings["temperature"] != 1:
            raise NotOffered("the temperature is a part of the engine")
        return functional.entropy_from_logits(logits)

    def kl(self, log_probs, reference, settings):
        return core_algos.kl_penalty(log_probs, reference, KLS.get(settings["kl"], settings["kl"]))

    def kl_loss(self, log_probs, reference, mask, settings):
        kls = self.kl(log_probs, reference, {"kl": settings["kl_loss"]})
        mode, batch, ranks = _minibatch(settings)
        return settings["coef"] * core_algos.agg_loss(kls, mask, mode, **batch) / ranks

    def gae(self, rewards, values, mask, last_values, settings):
        given = (rewards, values, mask.double(), settings["gamma"], settings["lam"])
        return core_algos.compute_gae_advantage_return(*given)

    def whiten(self, values, mask, settings):
        return functional.masked_whiten(values, mask, shift_mean=settings["whitening"] == "mean_and_std")

    def policy_loss(self, log_probs, old_log_probs, advantages, mask, settings):
        from verl.workers.config import ActorConfig

        kind = "gspo" if settings["ratio"] == "sequence" else "vanilla"
        if kind == "gspo" and settings["dual_clip"]:
            raise NotOffered("GSPO has no dual clip")
        config = ActorConfig(
            strategy="fsdp",
            ppo_micro_batch_size_per_gpu=1,
            rollout_n=1,
            clip_ratio_low=settings["clip_low"],
            clip_ratio_high=settings["clip_high"],
            clip_ratio_c=settings["dual_clip"] or UNBOUNDED,
        )
        mode, batch, ranks = _minibatch(settings)
        config.global_batch_info.update(batch)
        loss = core_algos.get_policy_loss_fn(kind)
        return loss(old_log_probs, log_probs, advantages, mask, mode, config)[0] / ranks

    def value_loss(self, values, old_values, returns, mask, settings):
        mode, batch, ranks = _minibatch(settings)
        given = (values, returns, old_values, mask, settings["value_clip"] or UNBOUNDED, mode)
        return core_algos.compute_value_loss(*given, **batch)[0] / ranks

    def group_advantages(self, scores, groups, valid, settings):
        """Treat each response as one token."""
        from verl.trainer.config import AlgoConfig

        kind = settings["baseline"]
        rewards = scores.unsqueeze(-1)
        more = {"norm_adv_by_std_in_grpo": kind == "grpo"} if "grpo" in kind else {"config": AlgoConfig(gamma=1.0)}
        estimate = core_algos.get_adv_estimator_fn(BASELINES.get(kind, kind))
        return estimate(rewards, response_mask=torch.ones_like(rewards), index=groups.numpy(), **more)[0][:, 0]

    def off_policy_weights(self, train_log_probs, sample_log_probs, mask, settings):
        from verl.trainer.ppo import rollout_corr_helper

        level, kind = settings["off_policy"].split("_")
        bounds = settings["cap"] if kind == "truncate" else f"{settings['low']}_{settings['high']}"
        ratios = train_log_probs - sample_log_probs
        return rollout_corr_helper.compute_rollout_correction_weights(ratios, mask, level, bounds)[0]


def _minibatch(settings):
    """The aggregation, the divisors of the minibatch, and the number of ranks, over which gradients are averaged."""
    mask, ranks = settings["whole"][-1], num_ranks(settings)
    batch = {"dp_size": ranks, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}
    return AGGREGATIONS[settings["aggregation"]], {**batch, "loss_scale_factor": settings.get("length")}, ranks

"""verl: `core_algos` and the weights of its rollout correction, normalized as the trainer does, over the minibatch.

Functions that only some versions have are imported where they are used.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch
import verl.utils.torch_functional as functional
from verl.trainer.ppo import core_algos

from ppo_conformance import protocol
from ppo_conformance.adapters.torch_tools import UNBOUNDED, num_ranks, sum_over_batches, tensors, value_and_gradient
from ppo_conformance.protocol import NotOffered

AGGREGATIONS = {
    "token": "token-mean",
    "response": "seq-mean-token-mean",
    "response_sum": "seq-mean-token-sum",
    "fixed_length": "seq-mean-token-sum-norm",
}
KLS = {"k3_with_kl_gradient": "k3+"}
BASELINES = {"dr_grpo": "grpo", "reinforce++": "reinforce_plus_plus"}


class Adapter(protocol.Adapter):
    """See `protocol.Adapter`."""

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
        """See `protocol.Adapter`; the engine divides the logits by the temperature."""
        if settings["temperature"] != 1:
            raise NotOffered("the temperature is a part of the engine")
        return value_and_gradient(lambda x: functional.logprobs_from_logits(x, torch.tensor(tokens)), logits)

    def entropy(self, logits, settings):
        """See `protocol.Adapter`."""
        if settings["temperature"] != 1:
            raise NotOffered("the temperature is a part of the engine")
        return value_and_gradient(functional.entropy_from_logits, logits)

    def kl(self, log_probs, reference, settings):
        """See `protocol.Adapter`."""
        (ref,), kind = tensors(reference), KLS.get(settings["kl"], settings["kl"])
        return value_and_gradient(lambda x: core_algos.kl_penalty(x, ref, kind), log_probs)

    def kl_loss(self, log_probs, reference, mask, settings):
        """See `protocol.Adapter`."""
        (ref,), kind = tensors(reference), KLS.get(settings["kl_loss"], settings["kl_loss"])

        def term(x: torch.Tensor, rows: list[int], counts: torch.Tensor, mode: str, batch: Any) -> torch.Tensor:
            kls = core_algos.kl_penalty(x, ref[rows], kind)
            return settings["coef"] * core_algos.agg_loss(kls, counts, mode, **batch)

        return self._over_batches(log_probs, mask, settings, term)

    def gae(self, rewards, values, mask, last_values, settings):
        """See `protocol.Adapter`."""
        given = (*tensors(rewards, values, mask.astype(float)), settings["gamma"], settings["lam"])
        advantages, returns = core_algos.compute_gae_advantage_return(*given)
        return advantages.numpy(), returns.numpy()

    def whiten(self, values, mask, settings):
        """See `protocol.Adapter`."""
        shift = settings["whitening"] == "mean_and_std"
        return functional.masked_whiten(*tensors(values, mask), shift_mean=shift).numpy()

    def policy_loss(self, log_probs, old_log_probs, advantages, mask, settings):
        """See `protocol.Adapter`."""
        old, gains = tensors(old_log_probs, advantages)
        kind = "gspo" if settings["ratio"] == "sequence" else "vanilla"
        from verl.workers.config import ActorConfig

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

        def term(x: torch.Tensor, rows: list[int], counts: torch.Tensor, mode: str, batch: Any) -> torch.Tensor:
            config.global_batch_info.update(batch)
            return core_algos.get_policy_loss_fn(kind)(old[rows], x, gains[rows], counts, mode, config)[0]

        return self._over_batches(log_probs, mask, settings, term)

    def value_loss(self, values, old_values, returns, mask, settings):
        """See `protocol.Adapter`."""
        old, targets = tensors(old_values, returns)
        clip = settings["value_clip"] or UNBOUNDED

        def term(x: torch.Tensor, rows: list[int], counts: torch.Tensor, mode: str, batch: Any) -> torch.Tensor:
            return core_algos.compute_value_loss(x, targets[rows], old[rows], counts, clip, mode, **batch)[0]

        return self._over_batches(values, mask, settings, term)

    def _over_batches(self, array, mask, settings, term):
        """The mean over ranks of the sums over their micro-batches, each with the divisors of the minibatch."""
        counts, mode, ranks = torch.tensor(mask), AGGREGATIONS[settings["aggregation"]], num_ranks(settings)
        batch = {"dp_size": ranks, "batch_num_tokens": int(counts.sum()), "global_batch_size": len(array)}
        batch |= {"loss_scale_factor": settings.get("length")}
        return sum_over_batches(lambda x, rows: term(x, rows, counts[rows], mode, batch) / ranks, array, settings)

    def group_advantages(self, scores, groups, valid, settings):
        """See `protocol.Adapter`; a response is one token."""
        from verl.trainer.config import AlgoConfig

        kind = settings["baseline"]
        rewards = torch.tensor(scores).unsqueeze(-1)
        more = {"norm_adv_by_std_in_grpo": kind == "grpo"} if "grpo" in kind else {"config": AlgoConfig(gamma=1.0)}
        estimate = core_algos.get_adv_estimator_fn(BASELINES.get(kind, kind))
        found, _ = estimate(rewards, response_mask=torch.ones_like(rewards), index=groups, **more)
        return found[:, 0].numpy()

    def off_policy_weights(self, train_log_probs, sample_log_probs, mask, settings):
        """See `protocol.Adapter`."""
        from verl.trainer.ppo import rollout_corr_helper

        level, kind = settings["off_policy"].split("_")
        bounds = settings["cap"] if kind == "truncate" else f"{settings['low']}_{settings['high']}"
        ratios, counts = tensors(train_log_probs - sample_log_probs, mask)
        weights, _ = rollout_corr_helper.compute_rollout_correction_weights(ratios, counts, level, bounds)
        return weights.numpy()

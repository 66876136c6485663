"""kedge: its objective, which computes what its updates minimize, and the functions of `kedge.algorithm`."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from kedge import __version__, algorithm
from kedge.algorithm.experience import CriticOutputs, PolicyOutputs
from kedge.algorithm.policy_losses import named_surrogate
from kedge.training.objective import Objective
from kedge.training.optimizer import BETAS, build_optimizer
from ppo_conformance import protocol
from ppo_conformance.adapters.torch_tools import micro_batches, tensors, value_and_gradient
from ppo_conformance.protocol import Array, Mask, NotOffered, Settings

AGGREGATIONS: Any = {"token": "token", "response": "sequence", "response_sum": "constant", "fixed_length": "constant"}
BASELINES = {
    "rloo": algorithm.LeaveOneOutAdvantage(),
    "grpo": algorithm.GroupMeanAdvantage(scale_by_std=True),
    "dr_grpo": algorithm.GroupMeanAdvantage(),
    "reinforce++": algorithm.TotalReward(gamma=1.0),
}


class Adapter(protocol.Adapter):
    """See `protocol.Adapter`."""

    name = "kedge"
    profile = {  # noqa: RUF012
        "kl": "k1 k2 k3",
        "kl_loss": "k2 k3",
        "score_at": "last after_last",
        "whitening": "mean_and_std std_only",
        "whitening_bessel": "no yes",
        "aggregation": "token response response_sum fixed_length",
        "ratio": "token sequence",
        "baseline": "grpo dr_grpo rloo reinforce++",
        "group_bessel": "yes no",
        "off_policy": "token_truncate token_mask sequence_mask",
        "reward_loss": "pairwise k_wise",
        "adam_eps": "after_debiasing before_debiasing",
        "padding_logit": "left_out",
        **dict.fromkeys(("tools", "truncation", "left_padding", "rejection", "micro_batches", "ranks"), "yes"),
    }

    def version(self) -> str:
        """See `protocol.Adapter`."""
        return __version__

    def log_probs(self, logits: Array, tokens: Any, settings: Settings) -> tuple[Array, Array]:
        """See `protocol.Adapter`."""
        of = {"tokens": torch.tensor(tokens), "temperature": settings["temperature"]}
        return value_and_gradient(lambda x: algorithm.token_logprobs_and_entropy(x, **of)[0], logits)

    def entropy(self, logits: Array, settings: Settings) -> tuple[Array, Array]:
        """See `protocol.Adapter`."""
        of: Any = {"tokens": torch.zeros(logits.shape[:2], dtype=torch.long), "entropy_gradient": True, **settings}
        return value_and_gradient(lambda x: algorithm.token_logprobs_and_entropy(x, **of)[1], logits)

    def kl(self, log_probs: Array, reference: Array, settings: Settings) -> tuple[Array, Array]:
        """See `protocol.Adapter`."""
        (ref,), kind = tensors(reference), settings["kl"]
        return value_and_gradient(lambda x: algorithm.kl_estimate(x, ref, estimator=kind), log_probs)

    def kl_loss(self, log_probs: Array, reference: Array, mask: Mask, settings: Settings) -> tuple[float, Array]:
        """See `protocol.Adapter`; the surrogate's part is 0, because the advantages are."""
        free = {"old_logprobs": log_probs, "advantages": np.zeros_like(log_probs), "ref_logprobs": reference}
        coef = {"kl_coef": settings["coef"], "kl_estimator": settings["kl_loss"]}
        return self._objective(log_probs, mask, {"clip_low": 0.2, "clip_high": 0.2, **settings}, free, **coef)

    def shaped_rewards(
        self, scores: Array, log_probs: Array, reference: Array, mask: Mask, settings: Settings
    ) -> Array:
        """See `protocol.Adapter`."""
        options: Any = {"kl_coef": settings["coef"], "kl_estimator": settings["kl"], "score_at": settings["score_at"]}
        return algorithm.shape_rewards(*tensors(scores, log_probs, reference, mask), **options).rewards.numpy()

    def gae(
        self, rewards: Array, values: Array, mask: Mask, last_values: Array, settings: Settings
    ) -> tuple[Array, Array]:
        """See `protocol.Adapter`."""
        numbers: Any = {"gamma": settings["gamma"], "gae_lambda": settings["lam"]}
        after = torch.tensor(last_values)
        found = algorithm.generalized_advantages(*tensors(rewards, values, mask), **numbers, bootstrap_values=after)
        return found.advantages.numpy(), found.returns.numpy()

    def whiten(self, values: Array, mask: Mask, settings: Settings) -> Array:
        """See `protocol.Adapter`."""
        shift = settings["whitening"] == "mean_and_std"
        correction = int(settings["whitening_bessel"] == "yes")
        return algorithm.masked_whiten(*tensors(values, mask), shift_mean=shift, correction=correction).numpy()

    def policy_loss(
        self, log_probs: Array, old_log_probs: Array, advantages: Array, mask: Mask, settings: Settings
    ) -> tuple[float, Array]:
        """See `protocol.Adapter`."""
        if settings["ratio"] == "sequence" and settings["sequence_gradient"] != "token_form":
            raise NotOffered
        return self._objective(log_probs, mask, settings, {"old_logprobs": old_log_probs, "advantages": advantages})

    def value_loss(
        self, values: Array, old_values: Array, returns: Array, mask: Mask, settings: Settings
    ) -> tuple[float, Array]:
        """See `protocol.Adapter`."""
        return self._objective(values, mask, settings, {"values": old_values, "returns": returns})

    def _objective(
        self, array: Array, mask: Mask, settings: Settings, frozen: dict[str, Array], **more: Any
    ) -> tuple[float, Array]:
        """The sum of the objective's terms over micro-batches, with the divisors of the minibatch of all ranks."""
        aggregation = settings["aggregation"]
        clip = (settings.get("clip_low", 0.2), settings.get("clip_high", 0.2))
        objective = Objective(
            surrogate=named_surrogate("clipped", clip=clip, dual_clip=settings.get("dual_clip")),
            ratio=settings.get("ratio", "token"),
            value_clip_range=settings.get("value_clip"),
            value_coef=1.0,
            aggregation=AGGREGATIONS[aggregation],
            constant_length=1 if aggregation == "response_sum" else settings.get("length"),
            **more,
        )
        given = {name: torch.tensor(x) for name, x in {"action_mask": mask, "reward_mask": mask, **frozen}.items()}

        def batch(rows: list[int]) -> Any:
            nothing = dict.fromkeys(("importance_weights", "positive", "rollout"))
            return SimpleNamespace(**nothing, **{name: x[rows] for name, x in given.items()})

        divisors = objective.divisors(batch(list(range(len(array)))))

        def total(x: torch.Tensor) -> torch.Tensor:
            terms = []
            for rows in micro_batches(settings, len(array)):
                part = x[rows]
                if "returns" in frozen:
                    terms.append(objective.critic_terms(CriticOutputs(values=part), batch(rows), divisors))
                else:
                    outputs = PolicyOutputs(logprobs=part, entropy=torch.zeros_like(part), values=None)
                    terms.append(objective(outputs, batch(rows), divisors))
            return torch.stack([each.loss for each in terms]).sum()

        return value_and_gradient(total, array)

    def group_advantages(self, scores: Array, groups: Any, valid: Mask, settings: Settings) -> Array:
        """See `protocol.Adapter`; a response is one step."""
        kind, correction = settings["baseline"], int(settings["group_bessel"] == "yes")
        if kind == "grpo" and not correction:
            raise NotOffered("GRPO's deviation has Bessel's correction")
        rewards, mask = (x.unsqueeze(-1) for x in tensors(scores, valid))
        found = BASELINES[kind](rewards, mask, group=torch.tensor(groups)).advantages
        if kind == "reinforce++":
            found = algorithm.masked_whiten(found, mask, correction=correction)
        return found[:, 0].numpy()

    def off_policy_weights(
        self, train_log_probs: Array, sample_log_probs: Array, mask: Mask, settings: Settings
    ) -> Array:
        """See `protocol.Adapter`."""
        kind, inputs = settings["off_policy"], tensors(train_log_probs, sample_log_probs, mask)
        cap = settings["cap"] if kind == "token_truncate" else settings["high"]
        weights = algorithm.truncated_importance_weights(*inputs, cap=cap)
        if kind == "token_truncate":
            return weights.numpy()
        of: Any = kind.removesuffix("_mask")
        kept = algorithm.within_ratio_band(*inputs, of=of, low=settings["low"], high=settings["high"])
        return (weights * kept if of == "token" else kept).double().numpy()

    def reward_loss(self, scores: Array, mask: Mask, settings: Settings) -> tuple[float, Array]:
        """See `protocol.Adapter`."""
        ranks = torch.arange(scores.shape[1]).expand(scores.shape).double()
        return value_and_gradient(lambda x: algorithm.ranking_loss(x, ranks, mask=torch.tensor(mask)), scores)

    def optimizer_steps(self, parameters: Array, gradients: Array, settings: Settings) -> Array:
        """See `protocol.Adapter`; a matrix, because others are not decayed."""
        if tuple(settings["betas"]) != BETAS:
            raise NotOffered(f"the betas are {BETAS}")
        weight = nn.Parameter(torch.tensor(parameters).unsqueeze(0))
        mode: Any = {"after_debiasing": "torch", "before_debiasing": "tf1"}[settings["adam_eps"]]
        optimizer = build_optimizer(
            [weight],
            learning_rate=settings["lr"],
            adam_eps=settings["eps"],
            adam_eps_mode=mode,
            weight_decay=settings["weight_decay"],
        )
        for gradient in tensors(*gradients):
            weight.grad = gradient.unsqueeze(0)
            optimizer.step()
        return weight.detach()[0].numpy()

    def update(self, case: Mapping[str, Any]) -> dict[str, Array]:
        """See `protocol.Adapter`."""
        from ppo_conformance.adapters import kedge_update  # imports all of kedge

        return kedge_update.update(case)

    def trained_tokens(self, case: Any) -> dict[str, Any]:
        """See `protocol.Adapter`."""
        from ppo_conformance.adapters import kedge_tokens  # which imports transformers

        return kedge_tokens.trained_tokens(case)

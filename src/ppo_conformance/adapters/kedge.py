"""kedge: its objective, which computes what its updates minimize, and the functions of `kedge.algorithm`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from kedge import __version__, algorithm
from kedge.algorithm.experience import CriticOutputs, PolicyOutputs
from kedge.algorithm.policy_losses import named_surrogate
from kedge.training.objective import Objective
from kedge.training.optimizer import BETAS, build_optimizer
from ppo_conformance import protocol
from ppo_conformance.adapters.torch_tools import sum_over_batches, tensors, value_and_gradient
from ppo_conformance.protocol import NotOffered

AGGREGATIONS: Any = {"token": "token", "response": "sequence", "response_sum": "constant", "fixed_length": "constant"}
BASELINES = {
    "rloo": algorithm.LeaveOneOutAdvantage(),
    "grpo": algorithm.GroupMeanAdvantage(scale_by_std=True),
    "dr_grpo": algorithm.GroupMeanAdvantage(),
    "reinforce++": algorithm.TotalReward(gamma=1.0),
}


class Adapter(protocol.Adapter):
    """All of the protocol."""

    name = "kedge"
    profile = {
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

    def version(self):
        return __version__

    def log_probs(self, logits, tokens, settings):
        ids = torch.tensor(tokens)
        return value_and_gradient(lambda x: algorithm.token_logprobs_and_entropy(x, ids, **settings)[0], logits)

    def entropy(self, logits, settings):
        ids, both = torch.zeros(logits.shape[:2], dtype=torch.long), algorithm.token_logprobs_and_entropy
        return value_and_gradient(lambda x: both(x, ids, entropy_gradient=True, **settings)[1], logits)

    def kl(self, log_probs, reference, settings):
        ref = torch.tensor(reference)
        return value_and_gradient(lambda x: algorithm.kl_estimate(x, ref, estimator=settings["kl"]), log_probs)

    def kl_loss(self, log_probs, reference, mask, settings):
        """The surrogate's part is 0, because the advantages are."""
        frozen = {"old_logprobs": log_probs, "advantages": 0 * log_probs, "ref_logprobs": reference}
        return objective(log_probs, mask, settings, frozen, kl_coef=settings["coef"], kl_estimator=settings["kl_loss"])

    def shaped_rewards(self, scores, log_probs, reference, mask, settings):
        return algorithm.shape_rewards(
            *tensors(scores, log_probs, reference, mask),
            kl_coef=settings["coef"],
            kl_estimator=settings["kl"],
            score_at=settings["score_at"],
        ).rewards.numpy()

    def gae(self, rewards, values, mask, last_values, settings):
        *inputs, after = tensors(rewards, values, mask, last_values)
        found = algorithm.generalized_advantages(
            *inputs, gamma=settings["gamma"], gae_lambda=settings["lam"], bootstrap_values=after
        )
        return found.advantages.numpy(), found.returns.numpy()

    def whiten(self, values, mask, settings):
        shift, bessel = settings["whitening"] == "mean_and_std", settings["whitening_bessel"] == "yes"
        return algorithm.masked_whiten(*tensors(values, mask), shift_mean=shift, correction=int(bessel)).numpy()

    def policy_loss(self, log_probs, old_log_probs, advantages, mask, settings):
        return objective(log_probs, mask, settings, {"old_logprobs": old_log_probs, "advantages": advantages})

    def value_loss(self, values, old_values, returns, mask, settings):
        return objective(values, mask, settings, {"values": old_values, "returns": returns})

    def group_advantages(self, scores, groups, valid, settings):
        """A response is one step."""
        kind, correction = settings["baseline"], int(settings["group_bessel"] == "yes")
        if kind == "grpo" and not correction:
            raise NotOffered("GRPO's deviation has Bessel's correction")
        rewards, mask, group = tensors(scores[:, None], valid[:, None], groups)
        found = BASELINES[kind](rewards, mask, group=group).advantages
        if kind == "reinforce++":
            found = algorithm.masked_whiten(found, mask, correction=correction)
        return found[:, 0].numpy()

    def off_policy_weights(self, train_log_probs, sample_log_probs, mask, settings):
        inputs = tensors(train_log_probs, sample_log_probs, mask)
        of: Any
        of, _, how = settings["off_policy"].partition("_")
        cap = settings["cap"] if how == "truncate" else settings["high"]
        weights = algorithm.truncated_importance_weights(*inputs, cap=cap)
        if how == "truncate":
            return weights.numpy()
        kept = algorithm.within_ratio_band(*inputs, of=of, low=settings["low"], high=settings["high"]).double()
        return (weights * kept if of == "token" else kept).numpy()

    def reward_loss(self, scores, mask, settings):
        present, ranks = torch.tensor(mask), torch.arange(scores.shape[1]).expand(scores.shape).double()
        return value_and_gradient(lambda x: algorithm.ranking_loss(x, ranks, mask=present), scores)

    def optimizer_steps(self, parameters, gradients, settings):
        """As a matrix, because nothing else is decayed."""
        if tuple(settings["betas"]) != BETAS:
            raise NotOffered(f"the betas are {BETAS}")
        weight = nn.Parameter(torch.tensor(parameters[None]))
        mode: Any = {"after_debiasing": "torch", "before_debiasing": "tf1"}[settings["adam_eps"]]
        optimizer = build_optimizer(
            [weight],
            learning_rate=settings["lr"],
            adam_eps=settings["eps"],
            adam_eps_mode=mode,
            weight_decay=settings["weight_decay"],
        )
        for gradient in tensors(*gradients):
            weight.grad = gradient[None]
            optimizer.step()
        return weight.detach()[0].numpy()

    def update(self, case):
        from ppo_conformance.adapters import kedge_update  # imports all of kedge

        return kedge_update.update(case)

    def trained_tokens(self, case):
        from ppo_conformance.adapters import kedge_tokens  # which imports transformers

        return kedge_tokens.trained_tokens(case)


def objective(array, mask, settings, frozen, **options):
    """The sum of the objective's terms over micro-batches, with the divisors of the minibatch of all ranks."""
    aggregation = settings["aggregation"]
    clip = (settings.get("clip_low", 0.2), settings.get("clip_high", 0.2))
    total: Any = Objective(
        surrogate=named_surrogate("clipped", clip=clip, dual_clip=settings.get("dual_clip")),
        ratio=settings.get("ratio", "token"),
        value_clip_range=settings.get("value_clip"),
        value_coef=1.0,
        aggregation=AGGREGATIONS[aggregation],
        constant_length=1 if aggregation == "response_sum" else settings.get("length"),
        **options,
    )
    given = {name: torch.tensor(x) for name, x in {"action_mask": mask, "reward_mask": mask, **frozen}.items()}
    nothing = dict.fromkeys(("importance_weights", "positive", "rollout"))
    divisors = total.divisors(SimpleNamespace(**nothing, **given))

    def term(x, rows):
        batch = SimpleNamespace(**nothing, **{name: every[rows] for name, every in given.items()})
        if "returns" in frozen:
            return total.critic_terms(CriticOutputs(values=x), batch, divisors).loss
        return total(PolicyOutputs(logprobs=x, entropy=torch.zeros_like(x), values=None), batch, divisors).loss

    return sum_over_batches(term, array, settings)

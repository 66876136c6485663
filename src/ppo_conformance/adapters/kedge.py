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
from ppo_conformance.adapters.torch_tools import TorchAdapter
from ppo_conformance.protocol import NotOffered

AGGREGATIONS: Any = {"token": "token", "response": "sequence", "response_sum": "constant", "fixed_length": "constant"}
BASELINES = {
    "rloo": algorithm.LeaveOneOutAdvantage(),
    "grpo": algorithm.GroupMeanAdvantage(scale_by_std=True),
    "dr_grpo": algorithm.GroupMeanAdvantage(),
    "reinforce++": algorithm.TotalReward(gamma=1.0),
}


class Adapter(TorchAdapter):
    """The whole protocol."""

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
        return algorithm.token_logprobs_and_entropy(logits, tokens, **settings)[0]

    def entropy(self, logits, settings):
        tokens = torch.zeros(logits.shape[:2], dtype=torch.long)
        return algorithm.token_logprobs_and_entropy(logits, tokens, entropy_gradient=True, **settings)[1]

    def kl(self, log_probs, reference, settings):
        return algorithm.kl_estimate(log_probs, reference, estimator=settings["kl"])

    def kl_loss(self, log_probs, reference, mask, settings):
        """Use the policy loss with advantages of 0, so that only the KL is left."""
        old = log_probs.detach()
        given = {"old_logprobs": old, "advantages": 0 * old, "ref_logprobs": reference, "action_mask": mask}
        return policy_terms(log_probs, given, settings, kl_coef=settings["coef"], kl_estimator=settings["kl_loss"])

    def shaped_rewards(self, scores, log_probs, reference, mask, settings):
        return algorithm.shape_rewards(
            *(scores, log_probs, reference, mask),
            kl_coef=settings["coef"],
            kl_estimator=settings["kl"],
            score_at=settings["score_at"],
        ).rewards

    def gae(self, rewards, values, mask, last_values, settings):
        use = {"gamma": settings["gamma"], "gae_lambda": settings["lam"], "bootstrap_values": last_values}
        found = algorithm.generalized_advantages(rewards, values, mask, **use)
        return found.advantages, found.returns

    def whiten(self, values, mask, settings):
        shift, bessel = settings["whitening"] == "mean_and_std", settings["whitening_bessel"] == "yes"
        return algorithm.masked_whiten(values, mask, shift_mean=shift, correction=int(bessel))

    def policy_loss(self, log_probs, old_log_probs, advantages, mask, settings):
        given = {"old_logprobs": old_log_probs, "advantages": advantages, "action_mask": mask}
        return policy_terms(log_probs, given, settings)

    def value_loss(self, values, old_values, returns, mask, settings):
        total = objective(settings)
        batch = experience(values=old_values, returns=returns, reward_mask=mask)
        return total.critic_terms(CriticOutputs(values=values), batch, divisors(total, settings)).loss

    def group_advantages(self, scores, groups, valid, settings):
        """Treat each response as one step."""
        kind, correction = settings["baseline"], int(settings["group_bessel"] == "yes")
        if kind == "grpo" and not correction:
            raise NotOffered("GRPO's deviation has Bessel's correction")
        found = BASELINES[kind](scores[:, None], valid[:, None], group=groups).advantages
        if kind == "reinforce++":
            found = algorithm.masked_whiten(found, valid[:, None], correction=correction)
        return found[:, 0]

    def off_policy_weights(self, train_log_probs, sample_log_probs, mask, settings):
        given = (train_log_probs, sample_log_probs, mask)
        of: Any
        of, _, how = settings["off_policy"].partition("_")
        cap = settings["cap"] if how == "truncate" else settings["high"]
        weights = algorithm.truncated_importance_weights(*given, cap=cap)
        if how == "truncate":
            return weights
        kept = algorithm.within_ratio_band(*given, of=of, low=settings["low"], high=settings["high"]).double()
        return weights * kept if of == "token" else kept

    def reward_loss(self, scores, mask, settings):
        ranks = torch.arange(scores.shape[1]).expand(scores.shape).double()
        return algorithm.ranking_loss(scores, ranks, mask=mask)

    def optimizer_steps(self, parameters, gradients, settings):
        """Pass the parameters as a matrix, because only matrices are decayed."""
        if tuple(settings["betas"]) != BETAS:
            raise NotOffered(f"the betas are {BETAS}")
        weight = nn.Parameter(parameters[None])
        mode: Any = {"after_debiasing": "torch", "before_debiasing": "tf1"}[settings["adam_eps"]]
        optimizer = build_optimizer(
            [weight],
            learning_rate=settings["lr"],
            adam_eps=settings["eps"],
            adam_eps_mode=mode,
            weight_decay=settings["weight_decay"],
        )
        for gradient in gradients:
            weight.grad = gradient[None]
            optimizer.step()
        return weight.detach()[0]

    def update(self, case):
        from ppo_conformance.adapters import kedge_update  # imports all of kedge

        return kedge_update.update(case)

    def trained_tokens(self, case):
        from ppo_conformance.adapters import kedge_tokens  # which imports transformers

        return kedge_tokens.trained_tokens(case)


def objective(settings, **options):
    """The objective of updates with the settings of a case."""
    aggregation = settings["aggregation"]
    return Objective(
        surrogate=named_surrogate(
            "clipped",
            clip=(settings.get("clip_low", 0.2), settings.get("clip_high", 0.2)),
            dual_clip=settings.get("dual_clip"),
        ),
        ratio=settings.get("ratio", "token"),
        value_clip_range=settings.get("value_clip"),
        value_coef=1.0,
        aggregation=AGGREGATIONS[aggregation],
        constant_length=1 if aggregation == "response_sum" else settings.get("length"),
        **options,
    )


def divisors(total, settings):
    """The divisors of the minibatch of all ranks."""
    mask = settings["whole"][-1]
    return total.divisors(experience(action_mask=mask, reward_mask=mask))


def experience(**given) -> Any:
    """Make a batch with the attributes that the objective reads."""
    return SimpleNamespace(importance_weights=None, positive=None, rollout=None, **given)


def policy_terms(log_probs, given, settings, **options):
    """The terms of the objective for the policy, of a micro-batch."""
    total = objective(settings, **options)
    outputs = PolicyOutputs(logprobs=log_probs, entropy=torch.zeros_like(log_probs), values=None)
    return total(outputs, experience(**given), divisors(total, settings)).loss

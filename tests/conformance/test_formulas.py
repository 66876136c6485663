"""The vectors against a second statement of every formula: whole tensors in torch, with the gradients of autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ppo_conformance.adapters.reference import Adapter as Reference
from ppo_conformance.adapters.torch_tools import TorchAdapter
from ppo_conformance.checks import metamorphic
from ppo_conformance.checks import vectors as checks_of_vectors

MASKED = torch.nan
"""What formulas see in masked slots, so that a use of them shows."""


def per_response(mask: Tensor, numbers: Tensor) -> Tensor:
    """The mean of each row over its counted tokens."""
    return torch.where(mask, numbers, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


class Independent(TorchAdapter):
    profile = Reference.profile

    def log_probs(self, logits, tokens, settings):
        scaled = logits / settings["temperature"]
        return scaled.gather(-1, tokens[..., None])[..., 0] - scaled.logsumexp(-1)

    def entropy(self, logits, settings):
        return torch.distributions.Categorical(logits=logits / settings["temperature"]).entropy()

    def kl(self, log_probs, reference, settings):
        log_ratio = reference - log_probs
        k2, k3 = log_ratio.square() / 2, torch.expm1(log_ratio) - log_ratio
        return {
            "k1": -log_ratio,
            "k2": k2,
            "k3": k3,
            "k3_with_kl_gradient": k2 + (k3 - k2).detach(),
        }[settings["kl"]]

    def kl_loss(self, log_probs, reference, mask, settings):
        kl = self.kl(log_probs, reference, {"kl": settings["kl_loss"]})
        return settings["coef"] * self.reduced(kl, settings)

    def shaped_rewards(self, scores, log_probs, reference, mask, settings):
        kl = self.kl(log_probs, reference, settings)
        width = mask.shape[1]
        last = width - 1 - mask.flip(1).int().argmax(1)
        slot = (last + (settings["score_at"] == "after_last")).clamp(max=width - 1)
        at = torch.arange(width) == slot[:, None]
        return torch.where(mask, -settings["coef"] * kl, 0.0) + at * scores[:, None]

    def gae(self, rewards, values, mask, last_values, settings):
        """A = (I − γλ·N)⁻¹ δ with N the step to the next counted token of the row."""
        size = mask.shape[1]
        found = torch.full_like(rewards, MASKED)
        for row in range(len(mask)):
            places = mask[row].nonzero()[:, 0]
            if not len(places):
                continue
            shift = torch.diag(torch.ones(len(places) - 1, dtype=torch.float64), 1)
            held = values[row, places]
            following = shift @ held
            following[-1] = last_values[row]
            delta = rewards[row, places] + settings["gamma"] * following - held
            whole = torch.eye(len(places), dtype=torch.float64) - settings["gamma"] * settings["lam"] * shift
            found[row, places] = torch.linalg.solve(whole, delta)
        assert found.shape[1] == size
        returns = found + values
        if settings["gae_whitening"] != "no":
            counted = found[mask]
            found = (found - counted.mean()) / counted.std(correction=int(settings["gae_whitening"] == "bessel"))
        return found, returns

    def whiten(self, values, mask, settings):
        counted = values[mask]
        centered = values - counted.mean()
        if len(counted.unique()) > 1:
            centered = centered / counted.std(correction=int(settings["whitening_bessel"] == "yes"))
        return centered + counted.mean() * (settings["whitening"] == "std_only")

    def reduced(self, losses, settings):
        """The part of a micro-batch in the loss of the minibatch."""
        rows, mask = settings["rows"], settings["whole"][-1]
        counts, own = mask.sum(1).double(), mask[rows]
        sums = torch.where(own, losses, 0.0).sum(1)
        everything = settings["empty_rows"] == "counted"
        how = settings["aggregation"]
        if how == "token":
            return sums.sum() / counts.sum()
        if how == "episode":
            episodes = torch.tensor(settings["episodes"])
            same = (episodes[:, None] == episodes).double()
            totals = same @ counts
            firsts = torch.tensor([settings["episodes"].index(e) == i for i, e in enumerate(settings["episodes"])])
            number = (firsts & ((totals > 0) | everything)).sum()
            return (sums / totals[rows].clamp(min=1)).sum() / number
        number = len(mask) if everything else (counts > 0).sum()
        divisor = {"response": counts[rows].clamp(min=1), "response_sum": 1.0, "fixed_length": settings.get("length")}
        return (sums / divisor[how]).sum() / number

    def policy_loss(self, log_probs, old_log_probs, advantages, mask, settings):
        log_ratio = log_probs - old_log_probs
        if settings["ratio"] == "sequence":
            whole = per_response(mask, log_ratio)
            log_ratio = (
                whole.expand_as(log_ratio)
                if settings["sequence_gradient"] == "through_ratio"
                else whole.detach() + log_probs - log_probs.detach()
            )
        ratio = torch.where(mask, log_ratio, 0.0).exp()
        gains = torch.where(mask, advantages, 0.0)
        bounded = ratio.clamp(1 - settings["clip_low"], 1 + settings["clip_high"])
        # Where both are equal, the gradient is that of the ratio within the clip.
        objective = torch.where(ratio * gains <= bounded * gains, ratio * gains, bounded * gains)
        if settings["dual_clip"] is not None:
            floor = settings["dual_clip"] * gains
            objective = torch.where((gains < 0) & (objective < floor), floor, objective)
        return -self.reduced(objective, settings)

    def value_loss(self, values, old_values, returns, mask, settings):
        errors = (values - returns).square()
        near = settings["value_clip"]
        if near is not None:
            bounded = (values.clamp(old_values - near, old_values + near) - returns).square()
            only = settings["value_clip_form"] == "clipped_only"
            errors = bounded if only else torch.where(errors >= bounded, errors, bounded)
        return self.reduced(errors, settings) * (0.5 if settings["value_loss_scale"] == "half" else 1.0)

    def group_advantages(self, scores, groups, valid, settings):
        kind, bessel = settings["baseline"], settings["group_bessel"] == "yes"
        together = torch.zeros_like(groups) if kind == "reinforce++" else groups
        found = torch.full_like(scores, torch.nan)
        for group in together[valid].unique():
            members = valid & (together == group)
            own = scores[members]
            if len(own) == 1:
                found[members] = own * (settings["single_response"] == "score")
                continue
            centered = own - own.mean()
            if kind == "rloo":
                centered = own - (own.sum() - own) / (len(own) - 1)
            elif kind != "dr_grpo" and len(own.unique()) > 1:
                centered = centered / own.std(correction=int(bessel))
            found[members] = centered
        return found

    def off_policy_weights(self, train_log_probs, sample_log_probs, mask, settings):
        level, how = settings["off_policy"].split("_")
        logs = torch.where(mask, train_log_probs - sample_log_probs, 0.0)
        if level == "sequence":
            logs = (per_response(mask, logs) if how == "mask" else logs.sum(1, keepdim=True)).expand_as(logs)
        weights = logs.exp()
        if how == "truncate":
            return weights.clamp(max=settings["cap"])
        inside = (weights >= settings["low"]) & (weights <= settings["high"])
        return inside.double() * (weights if level == "token" else 1.0)

    def reward_loss(self, scores, mask, settings):
        better = torch.ones(scores.shape[1], scores.shape[1], dtype=torch.bool).triu(1)
        pairs = mask[:, :, None] & mask[:, None] & better
        losses = torch.where(pairs, -logsigmoid(scores[:, :, None] - scores[:, None]), 0.0).sum((1, 2))
        counts = pairs.sum((1, 2))
        if settings["ranking_weight"] == "pair":
            return losses.sum() / counts.sum()
        return (losses / counts.clamp(min=1)).sum() / (counts > 0).sum()

    def optimizer_steps(self, parameters, gradients, settings):
        """torch's AdamW; the other ε is the one that grows with √(1 − β₂ᵗ)⁻¹."""
        weight = torch.nn.Parameter(parameters)
        betas = tuple(settings["betas"])
        made = torch.optim.AdamW([weight], settings["lr"], betas, settings["eps"], settings["weight_decay"])
        for step, gradient in enumerate(gradients, 1):
            if settings["adam_eps"] == "before_debiasing":
                made.param_groups[0]["eps"] = settings["eps"] / math.sqrt(1 - betas[1] ** step)
            weight.grad = gradient
            made.step()
        return weight.detach()


CHECKS = [*checks_of_vectors.checks(), *metamorphic.checks()]


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_a_second_statement_of_the_formulas_agrees(check):
    error = check.run(Independent())
    assert error is None or error < 1e-10

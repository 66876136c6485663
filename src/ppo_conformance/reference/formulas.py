"""The formulas of PPO and its relatives in numpy float64, with their gradients by hand.

Each method is one of the protocol's (`ppo_conformance.protocol`), which says what the arguments and settings are. The
trainer calls these same methods, so that replacing one changes the whole update.
"""

from __future__ import annotations

import numpy as np

from ppo_conformance.protocol import Adapter, Array, Mask, Settings
from ppo_conformance.reference.model import NEVER, Ints


class Formulas(Adapter):
    """Everything between the logits of the model and the gradient of the loss with respect to them."""

    # --- probabilities

    def log_softmax(self, logits: Array, settings: Settings) -> Array:
        """The logarithm of softmax(z/τ) over all ids, without the ids `never_sampled`."""
        scaled = logits / settings["temperature"]
        scaled[..., list(settings.get("never_sampled", ()))] = NEVER
        scaled -= scaled.max(-1, keepdims=True)
        return scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))

    def log_probs(self, logits: Array, tokens: Ints, settings: Settings) -> tuple[Array, Array]:
        """The logarithm of π(a);  ∂/∂z = (1[a] − π)/τ."""
        table = self.log_softmax(logits, settings)
        chosen = np.eye(logits.shape[-1])[tokens]
        return (table * chosen).sum(-1), (chosen - np.exp(table)) / settings["temperature"]

    def entropy(self, logits: Array, settings: Settings) -> tuple[Array, Array]:
        """H = −Σ π log π;  ∂H/∂z = −π(log π + H)/τ."""
        table = self.log_softmax(logits, settings)
        entropy = -(np.exp(table) * table).sum(-1)
        return entropy, -np.exp(table) * (table + entropy[..., None]) / settings["temperature"]

    # --- KL and rewards

    def kl(self, log_probs: Array, reference: Array, settings: Settings) -> tuple[Array, Array]:
        """With log r = log π_ref − log π: k1 = −log r, k2 = ½(log r)², k3 = r − 1 − log r.

        Source: Schulman, "Approximating KL divergence" (2020). The gradient of k2 is an unbiased estimate of the KL's.
        """
        log_ratio = reference - log_probs
        ratio = np.exp(log_ratio)
        found = {
            "k1": (-log_ratio, np.ones_like(ratio)),
            "k2": (log_ratio**2 / 2, -log_ratio),
            "k3": (ratio - 1 - log_ratio, 1 - ratio),
            "k3_with_kl_gradient": (ratio - 1 - log_ratio, -log_ratio),
        }
        return found[settings["kl"]]

    def kl_loss(self, log_probs: Array, reference: Array, mask: Mask, settings: Settings) -> tuple[float, Array]:
        """β·Σ w·KL, with the weights w of the aggregation."""
        values, slopes = self.kl(kept(mask, log_probs), kept(mask, reference), {**settings, "kl": settings["kl_loss"]})
        weights = settings["coef"] * self.token_weights(mask, settings)
        return float((weights * values).sum()), weights * slopes

    def shaped_rewards(
        self, scores: Array, log_probs: Array, reference: Array, mask: Mask, settings: Settings
    ) -> Array:
        """r_t = −β·KL_t + score·[t is the slot of the score]."""
        rewards = -settings["coef"] * mask * self.kl(kept(mask, log_probs), kept(mask, reference), settings)[0]
        for row, counted in enumerate(mask):
            slot = np.flatnonzero(counted)[-1] + (settings["score_at"] == "after_last")
            rewards[row, min(slot, mask.shape[1] - 1)] += scores[row]
        return rewards

    # --- advantages

    def gae(
        self, rewards: Array, values: Array, mask: Mask, last_values: Array, settings: Settings
    ) -> tuple[Array, Array]:
        """Advantages of `recursion`, and returns A + V."""
        advantages = self.recursion(rewards, values, mask, last_values, settings)
        returns = mask * (advantages + values)
        if (kind := settings.get("gae_whitening", "no")) != "no":
            bessel = "yes" if kind == "bessel" else "no"
            advantages = self.whiten(advantages, mask, {"whitening": "mean_and_std", "whitening_bessel": bessel})
        return advantages, returns

    def recursion(self, rewards: Array, values: Array, mask: Mask, last_values: Array, settings: Settings) -> Array:
        """A_t = δ_t + γλ·A_{t+1} with δ_t = r_t + γ·V_{t+1} − V_t, over the counted tokens.

        Source: Schulman et al. 2016 (arXiv 1506.02438), eq. 16.
        """
        advantages = np.zeros_like(rewards)
        for row, counted in enumerate(mask):
            later, value = 0.0, last_values[row]
            for t in reversed(np.flatnonzero(counted)):
                delta = rewards[row, t] + settings["gamma"] * value - values[row, t]
                later = advantages[row, t] = delta + settings["gamma"] * settings["lam"] * later
                value = values[row, t]
        return advantages

    def whiten(self, values: Array, mask: Mask, settings: Settings) -> Array:
        """(x − μ)/σ over the counted entries, + μ for `std_only`; equal entries have no spread to scale."""
        counted = values[mask]
        mean, std = counted.mean(), self.std(counted, bessel=settings["whitening_bessel"] == "yes")
        return mask * ((values - mean) / std + mean * (settings["whitening"] == "std_only"))

    def std(self, numbers: Array, *, bessel: bool) -> float:
        """The standard deviation; 1 where the numbers are equal, so that dividing by it leaves their difference 0."""
        if np.ptp(numbers) <= 1e-12 * np.abs(numbers).max():
            return 1.0
        return float(numbers.std(ddof=int(bessel)))

    def group_advantages(self, scores: Array, groups: Ints, valid: Mask, settings: Settings) -> Array:
        """Compare each score with those of the responses to the same prompt.

        Source: GRPO (arXiv 2402.03300) §4.1.2; Dr. GRPO (arXiv 2503.20783) §3.2; RLOO (arXiv 2402.14740) §2.3.
        """
        advantages = np.zeros_like(scores)
        bessel = settings["group_bessel"] == "yes"
        for group in set(groups[valid]):
            rows = valid & (groups == group)
            advantages[rows] = self.compared(scores[rows], settings["baseline"], bessel=bessel)
            if rows.sum() == 1 and settings["single_response"] == "score":
                advantages[rows] = scores[rows]
        if settings["baseline"] == "reinforce++":
            advantages[valid] = self.compared(scores[valid], "grpo", bessel=bessel)
        return advantages

    def compared(self, scores: Array, baseline: str, *, bessel: bool) -> Array:
        """The advantages of one group."""
        centered = scores - scores.mean()
        if baseline == "grpo":
            return centered / self.std(scores, bessel=bessel)
        return centered * (len(scores) / max(len(scores) - 1, 1) if baseline == "rloo" else 1)

    # --- losses

    def token_weights(self, mask: Mask, settings: Settings) -> Array:
        """The weight of each token's loss; the loss is their weighted sum, however it is split into parts.

        `micro_batches` and `ranks` have no effect: the counts are those of all rows that make a step.
        """
        lengths = mask.sum(1)
        responses = len(mask) if settings.get("empty_rows") == "counted" else (lengths > 0).sum()
        kind = settings["aggregation"]
        if kind == "token":
            return mask / lengths.sum()
        if kind == "episode":
            episodes = np.asarray(settings["episodes"])
            totals = np.array([lengths[episodes == each].sum() for each in episodes])
            return mask / np.maximum(totals, 1)[:, None] / len(set(episodes[lengths > 0]))
        divisor = {"response": np.maximum(lengths, 1), "response_sum": 1, "fixed_length": settings.get("length")}[kind]
        return mask / (np.ones(len(mask)) * divisor)[:, None] / responses

    def policy_loss(
        self, log_probs: Array, old_log_probs: Array, advantages: Array, mask: Mask, settings: Settings
    ) -> tuple[float, Array]:
        """−Σ w·min(ρ·A, clip(ρ, 1 − ε, 1 + ε)·A), where A < 0 at most c·|A|.

        Source: PPO (arXiv 1707.06347) eq. 7; dual clip: arXiv 1912.09729 eq. 5; GSPO: arXiv 2507.18071 eq. 5, 13.
        """
        log_ratio = kept(mask, log_probs - old_log_probs)
        lengths = np.maximum(mask.sum(1, keepdims=True), 1)
        if settings["ratio"] == "sequence":
            log_ratio = mask * log_ratio.sum(1, keepdims=True) / lengths
        ratio = np.exp(log_ratio)
        losses, slopes = self.clipped(ratio, kept(mask, advantages), settings)
        weights = self.token_weights(mask, settings)
        slopes = weights * slopes * ratio
        if settings["ratio"] == "sequence" and settings.get("sequence_gradient") == "through_ratio":
            slopes = mask * slopes.sum(1, keepdims=True) / lengths
        return float((weights * losses).sum()), slopes

    def clipped(self, ratio: Array, advantages: Array, settings: Settings) -> tuple[Array, Array]:
        """The loss of each token, and its derivative with respect to the ratio."""
        free = -ratio * advantages
        held = -ratio.clip(1 - settings["clip_low"], 1 + settings["clip_high"]) * advantages
        losses, slopes = np.maximum(free, held), np.where(free >= held, -advantages, 0.0)
        if bound := settings.get("dual_clip"):
            over = (advantages < 0) & (losses > -bound * advantages)
            losses, slopes = np.where(over, -bound * advantages, losses), np.where(over, 0.0, slopes)
        return losses, slopes

    def value_loss(
        self, values: Array, old_values: Array, returns: Array, mask: Mask, settings: Settings
    ) -> tuple[float, Array]:
        """Σ w·½·max((V − R)², (clip(V, V_old ± ε) − R)²).

        Source: Schulman et al., baselines' ppo2 (2017); Ziegler et al. 2019.
        """
        scale = self.token_weights(mask, settings) / (2 if settings["value_loss_scale"] == "half" else 1)
        values, old_values, returns = (kept(mask, each) for each in (values, old_values, returns))
        errors, slopes = (values - returns) ** 2, 2 * (values - returns)
        if limit := settings.get("value_clip"):
            moved = (values - old_values).clip(-limit, limit)
            held = (old_values + moved - returns) ** 2
            inside = moved == values - old_values
            taken = held > errors if settings["value_clip_form"] == "larger_error" else np.full(mask.shape, True)
            slopes = np.where(taken & ~inside, 0.0, slopes)
            errors = np.where(taken, held, errors)
        return float((scale * errors).sum()), scale * slopes

    def off_policy_weights(
        self, train_log_probs: Array, sample_log_probs: Array, mask: Mask, settings: Settings
    ) -> Array:
        """Importance weights w = π_trainer/π_sampler, truncated or masked."""
        log_weights = kept(mask, train_log_probs - sample_log_probs)
        totals = log_weights.sum(1, keepdims=True) + np.zeros_like(log_weights)
        of, how = settings["off_policy"].split("_")
        if how == "truncate":
            return kept(mask, np.minimum(np.exp(log_weights if of == "token" else totals), settings["cap"]))
        weights = np.exp(log_weights if of == "token" else totals / np.maximum(mask.sum(1, keepdims=True), 1))
        inside = (settings["low"] <= weights) & (weights <= settings["high"])
        return kept(mask & inside, weights if of == "token" else np.ones_like(weights))

    def reward_loss(self, scores: Array, mask: Mask, settings: Settings) -> tuple[float, Array]:
        """Mean of −log σ(s_better − s_worse) over the pairs of each ranking.

        Source: Christiano et al. 2017; InstructGPT (arXiv 2203.02155) eq. 1.
        """
        pairs = [
            (row, better, worse)
            for row, known in enumerate(mask)
            for better in np.flatnonzero(known)
            for worse in np.flatnonzero(known)
            if better < worse
        ]
        of_row = [sum(pair[0] == row for pair in pairs) for row in range(len(mask))]
        loss, gradient = 0.0, np.zeros_like(scores)
        for row, better, worse in pairs:
            by_prompt = of_row[row] * sum(count > 0 for count in of_row)
            weight = 1 / (by_prompt if settings.get("ranking_weight", "prompt") == "prompt" else len(pairs))
            margin = scores[row, better] - scores[row, worse]
            loss += weight * np.logaddexp(0, -margin)
            slope = -weight * np.exp(-np.logaddexp(0, margin))
            gradient[row, better] += slope
            gradient[row, worse] -= slope
        return float(loss), gradient

    # --- optimizer

    def optimizer_steps(self, parameters: Array, gradients: Array, settings: Settings) -> Array:
        """AdamW from moments of 0."""
        first = second = np.zeros_like(parameters)
        for step, gradient in enumerate(gradients, 1):
            parameters, first, second = self.adam(parameters, gradient, first, second, step, settings)
        return parameters

    def adam(
        self, weight: Array, gradient: Array, first: Array, second: Array, step: int, settings: Settings
    ) -> tuple[Array, Array, Array]:
        """One step: m ← β₁m + (1−β₁)g,  v ← β₂v + (1−β₂)g²,  w ← w − η·(m̂/(√v̂ + ε) + decay·w).

        Source: Kingma & Ba 2015 (arXiv 1412.6980) algorithm 1, and the end of §2 for the other ε; AdamW: 1711.05101.
        """
        slow, fast = settings["betas"]
        first = slow * first + (1 - slow) * gradient
        second = fast * second + (1 - fast) * gradient**2
        unbiased = np.sqrt(1 - fast**step)
        eps = settings["eps"] / (unbiased if settings["adam_eps"] == "before_debiasing" else 1)
        change = first / (1 - slow**step) / (np.sqrt(second) / unbiased + eps)
        return weight - settings["lr"] * (change + settings["weight_decay"] * weight), first, second


def kept(mask: Mask, array: Array) -> Array:
    """The array with 0 in masked slots."""
    return np.where(mask, array, 0.0)

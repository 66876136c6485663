"""The formulas of the papers, one number at a time, in float64; nothing is rearranged for speed.

A derivative is the imaginary part of f(x + ih)/h, exact to rounding. So a number may be complex, or an array of complex
numbers, one for each direction in which something is moved; their real parts are equal, and comparisons read these.
Tables are rows of numbers; in a mask, True counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ppo_conformance.protocol import METHODS, Adapter, Array

Table = Any
"""Numbers by row and position."""

STEP = 1e-30
"""Imaginary step of a derivative: any size that does not underflow, since nothing is subtracted."""

NEVER = -1e9
"""A logit whose probability is exactly 0."""


def with_gradient(function: Callable[[Any], Any], array: Array, inner: Sequence[int]) -> tuple[Array, Array]:
    """A function's value at an array, and the gradient of its sum.

    Args:
        function: of the numbers.
        array: where.
        inner: the axes of the numbers that one result has; all, if it is a single one.
    """
    directions = np.eye(int(np.prod(inner))).reshape(*inner, -1)
    found = np.array(function(array[..., None] + STEP * 1j * directions)) + np.zeros(directions.shape[-1])
    return found.real[..., 0], (found.imag / STEP).reshape(array.shape)


def real(x) -> float:
    """The real part."""
    return np.ravel(x)[0].real


def larger(*numbers) -> Any:
    """The number with the largest real part."""
    return max(numbers, key=real)


def smaller(*numbers) -> Any:
    """The number with the smallest real part."""
    return min(numbers, key=real)


def clip(x, low, high) -> Any:
    """The number within [low, high]."""
    return smaller(larger(x, low), high)


def flat(found: Iterable[list[Any]]) -> list[Any]:
    """The entries of all rows."""
    return [x for row in found for x in row]


def mean(numbers) -> Any:
    """Arithmetic mean."""
    return sum(numbers) / len(numbers)


def rows(mask: Table, *tables: Table) -> Iterator[list[Any]]:
    """The counted tokens of each row, each with its numbers from all tables."""
    for of_row in zip(mask, *tables, strict=True):
        yield [numbers for counts, *numbers in zip(*of_row, strict=True) if counts]


def spread(found: list[list[Any]], mask: Table) -> Table:
    """Put the numbers of counted tokens in their places; None, which is not compared, elsewhere."""
    return [
        [following.pop(0) if counts else None for counts in of_row]
        for following, of_row in zip(map(list, found), mask, strict=True)
    ]


class Formulas(Adapter):
    """The methods of the protocol, where arguments and settings are documented, and their components."""

    def call(self, name, inputs, settings):
        """Call the method of a name; `held` is the copy of the first input that a stop-gradient holds fixed."""
        (first, *others), outputs = inputs, METHODS[name].outputs
        if "gradient" not in outputs:
            return getattr(self, name)(*inputs, settings)
        given = {**settings, "held": first}
        inner = first.shape[2:] if "values" in outputs else first.shape  # a token's values are its own logits' alone
        return with_gradient(lambda moved: getattr(self, name)(moved, *others, given), first, inner)

    # --- per token

    def log_softmax(self, logits, settings):
        """Log softmax(z/τ) without the ids `never_sampled`; the largest logit is subtracted, which changes no value."""
        scaled = (logits - np.real(logits).max(2, keepdims=True)) / settings["temperature"]
        scaled[:, :, list(settings.get("never_sampled", ()))] = NEVER
        return scaled - np.log(np.exp(scaled).sum(2, keepdims=True))

    def log_probs(self, logits, tokens, settings):
        """Log probability of each token."""
        return self.log_softmax(logits, settings)[(*np.indices(tokens.shape), tokens)]

    def entropy(self, logits, settings):
        """H = −Σ_v p_v·log p_v."""
        logs = self.log_softmax(logits, settings)
        return -(np.exp(logs) * logs).sum(2)

    def kl_estimate(self, kind, log_prob, reference, held):
        """Schulman's estimators, with log r = log π_ref − log π: −log r, ½(log r)², r − 1 − log r."""
        away = reference - log_prob
        if kind == "k1":
            return -away
        if kind == "k2":
            return away**2 / 2
        if kind == "k3":
            return np.exp(away) - 1 - away
        value, fixed = (self.kl_estimate(each, held, reference, held) for each in ("k3", "k2"))
        return value + self.kl_estimate("k2", log_prob, reference, held) - fixed

    def kl(self, log_probs, reference, settings):
        """A KL estimate of each token."""
        tokens = rows(np.ones(reference.shape), log_probs, reference, settings["held"])
        return [[self.kl_estimate(settings["kl"], *token) for token in row] for row in tokens]

    # --- losses

    def aggregate(self, losses, settings):
        """One number from the losses of counted tokens by row: DAPO eq. 8, GRPO eq. 3, Dr. GRPO §3.2."""
        how = settings["aggregation"]
        if how == "token":
            return mean(flat(losses))
        if how == "episode":
            episodes = settings["episodes"]
            losses = [flat(row for row, e in zip(losses, episodes, strict=True) if e == one) for one in set(episodes)]
        divisors = {"response_sum": 1, "fixed_length": settings.get("length")}
        numbers = [sum(row) / divisors.get(how, len(row)) for row in losses if row]
        return sum(numbers) / len(losses if settings["empty_rows"] == "counted" else numbers)

    def kl_loss(self, log_probs, reference, mask, settings):
        """β·KL as it is added to the loss: GRPO eq. 3."""
        tokens = rows(mask, log_probs, reference, settings["held"])
        losses = [[self.kl_estimate(settings["kl_loss"], *x) for x in row] for row in tokens]
        return settings["coef"] * self.aggregate(losses, settings)

    def policy_loss(self, log_probs, old, advantages, mask, settings):
        """−min(ρA, clip(ρ, 1−ε, 1+ε)A) per token: PPO eq. 7; for A < 0 at most c·|A|: Ye et al. 2019, eq. 5.

        With the ratio of sequences: GSPO eq. 7, or eq. 13, in which a token has the sequence's ratio as its value and
        its own log probability as its gradient.
        """

        def of_token(log_ratio, gain):
            ratio = np.exp(log_ratio)
            objective = smaller(ratio * gain, clip(ratio, 1 - settings["clip_low"], 1 + settings["clip_high"]) * gain)
            if settings["dual_clip"] is not None and gain < 0:
                objective = larger(objective, settings["dual_clip"] * gain)
            return -objective

        losses = []
        for row in rows(mask, log_probs, old, advantages, settings["held"]):
            logs = [now - before for now, before, _, _ in row]
            if settings["ratio"] == "sequence" and row:
                if settings["sequence_gradient"] == "through_ratio":
                    logs = [mean(logs)] * len(logs)
                else:
                    of_sequence = mean([fixed - before for _, before, _, fixed in row])
                    logs = [now - fixed + of_sequence for now, _, _, fixed in row]
            losses.append([of_token(x, gain) for x, (_, _, gain, _) in zip(logs, row, strict=True)])
        return self.aggregate(losses, settings)

    def value_error(self, settings, value, old, target):
        """max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²): OpenAI baselines, ppo2."""
        error, near = (value - target) ** 2, settings["value_clip"]
        if near is None:
            return error
        limited = (clip(value, old - near, old + near) - target) ** 2
        return limited if settings["value_clip_form"] == "clipped_only" else larger(error, limited)

    def value_loss(self, values, old_values, returns, mask, settings):
        """½ of the errors."""
        scale = 1.0 if settings["value_loss_scale"] == "one" else 0.5
        tokens = rows(mask, values, old_values, returns)
        return self.aggregate([[scale * self.value_error(settings, *x) for x in row] for row in tokens], settings)

    def reward_loss(self, scores, mask, settings):
        """−log σ(better − worse) over the pairs of each prompt: InstructGPT eq. 1."""
        prompts = []
        for row in rows(mask, scores):
            margins = [better - worse for i, [better] in enumerate(row) for [worse] in row[i + 1 :]]
            # log(1 + e⁻ᵐ), whose exponent must not overflow.
            prompts.append([np.log(1 + np.exp(-m)) if real(m) > 0 else np.log(1 + np.exp(m)) - m for m in margins])
        return mean(flat(prompts) if settings["ranking_weight"] == "pair" else [mean(each) for each in prompts if each])

    # --- rewards, advantages, weights

    def shaped_rewards(self, scores, log_probs, reference, mask, settings):
        """−β·KL at each counted token, and the score at the last one, or in the slot after it: N+ details 12 and 15."""
        tokens = rows(mask, log_probs, reference, log_probs)
        found = [[-settings["coef"] * self.kl_estimate(settings["kl"], *x) for x in row] for row in tokens]
        rewards = spread(found, mask)
        for score, row, of_row in zip(scores, rewards, mask, strict=True):
            slot = max(t for t, counts in enumerate(of_row) if counts)
            if settings["score_at"] == "after_last":
                slot = min(slot + 1, len(row) - 1)
            row[slot] = (row[slot] or 0.0) + score
        return rewards

    def gae(self, rewards, values, mask, last_values, settings):
        """A_t = Σ_k (γλ)ᵏ·δ_{t+k}, δ_t = r_t + γ·V_{t+1} − V_t, over the counted tokens: GAE eq. 12 and 16."""
        gamma, lam = settings["gamma"], settings["lam"]
        advantages, returns = [], []
        for row, after in zip(rows(mask, rewards, values), last_values, strict=True):
            states = [*(value for _, value in row), after]
            deltas = [reward + gamma * states[t + 1] - value for t, (reward, value) in enumerate(row)]
            advantages.append([sum((gamma * lam) ** k * x for k, x in enumerate(deltas[t:])) for t in range(len(row))])
            returns.append([a + value for a, (_, value) in zip(advantages[-1], row, strict=True)])
        found = spread(advantages, mask)
        how = settings["gae_whitening"]
        if how != "no":
            bessel = "yes" if how == "bessel" else "no"
            found = self.whiten(found, mask, {"whitening": "mean_and_std", "whitening_bessel": bessel})
        return found, spread(returns, mask)

    def std(self, numbers, bessel):
        """Standard deviation, with Bessel's correction if it says "yes"; 1 if all numbers are equal."""
        if max(numbers) == min(numbers):
            return 1.0
        center = mean(numbers)
        return np.sqrt(sum((x - center) ** 2 for x in numbers) / (len(numbers) - (bessel == "yes")))

    def whiten(self, values, mask, settings):
        """(x − μ)/σ, and + μ where the mean is kept: N+ detail 18."""
        tokens = [[x for [x] in row] for row in rows(mask, values)]
        center, scale = mean(flat(tokens)), self.std(flat(tokens), settings["whitening_bessel"])
        shift = center if settings["whitening"] == "std_only" else 0.0
        return spread([[(x - center) / scale + shift for x in row] for row in tokens], mask)

    def compared(self, score, members, others, settings):
        """GRPO §4.1.2, Dr. GRPO §3.2, RLOO §2.3, REINFORCE++ eq. 5."""
        kind = settings["baseline"]
        if not others:
            return 0.0 if settings["single_response"] == "zero" else score
        if kind == "rloo":
            return score - mean(others)
        return (score - mean(members)) / (1.0 if kind == "dr_grpo" else self.std(members, settings["group_bessel"]))

    def group_advantages(self, scores, groups, valid, settings):
        """Each score beside those of its group, or of the batch for REINFORCE++; what is not valid is in none."""
        whole = settings["baseline"] == "reinforce++"
        found: list[float | None] = []
        for i, score in enumerate(scores):
            group = [j for j, kept in enumerate(valid) if kept and (whole or groups[j] == groups[i])]
            members, others = [scores[j] for j in group], [scores[j] for j in group if j != i]
            found.append(self.compared(score, members, others, settings) if valid[i] else None)
        return found

    def off_policy_weights(self, train_log_probs, sample_log_probs, mask, settings):
        """Truncated importance sampling by token or sequence; IcePop's band, and the one of the geometric mean."""
        of, how = settings["off_policy"].split("_")
        found = []
        for row in rows(mask, train_log_probs, sample_log_probs):
            logs = [trained - sampled for trained, sampled in row]
            if of == "sequence" and row:
                logs = [sum(logs) if how == "truncate" else mean(logs)] * len(row)
            weights = list(map(np.exp, logs))
            if how == "truncate":
                found.append([min(w, settings["cap"]) for w in weights])
            else:
                inside = [settings["low"] <= w <= settings["high"] for w in weights]
                found.append([(w if of == "token" else 1.0) * kept for w, kept in zip(weights, inside, strict=True)])
        return spread(found, mask)

    # --- optimizer

    def optimizer_steps(self, parameters, gradients, settings):
        """Steps of `adam` from moments of 0."""
        first = second = np.zeros(len(parameters))
        for step, gradient in enumerate(gradients, start=1):
            parameters, first, second = self.adam(parameters, gradient, first, second, step, settings)
        return parameters

    def adam(self, x, gradient, m, v, step, settings):
        """AdamW: Kingma & Ba, algorithm 1 or the end of §2; Loshchilov & Hutter, algorithm 2."""
        (first, second), lr, eps = settings["betas"], settings["lr"], settings["eps"]
        m = first * m + (1 - first) * gradient
        v = second * v + (1 - second) * gradient**2
        if settings["adam_eps"] == "after_debiasing":
            move = m / (1 - first**step) / (np.sqrt(v / (1 - second**step)) + eps)
        else:
            move = m * np.sqrt(1 - second**step) / (1 - first**step) / (np.sqrt(v) + eps)
        return x - lr * settings["weight_decay"] * x - lr * move, m, v

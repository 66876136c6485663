"""The formulas of the papers, one number at a time, in float64; nothing is rearranged for speed.

Numbers may be complex: a derivative is the imaginary part of f(x + ih)/h, exact to rounding. Comparisons read the real
part. An argument `held` is the copy of a differentiated table that a stop-gradient holds fixed.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence
from typing import Any

Table = Sequence[Sequence[Any]]
"""Numbers by row and position."""


def exp(x: Any) -> Any:
    """eˣ."""
    return cmath.exp(x) if isinstance(x, complex) else math.exp(x)


def log(x: Any) -> Any:
    """Natural logarithm."""
    return cmath.log(x) if isinstance(x, complex) else math.log(x)


def larger(x: Any, y: Any) -> Any:
    """The number with the larger real part."""
    return x if x.real >= y.real else y


def smaller(x: Any, y: Any) -> Any:
    """The number with the smaller real part."""
    return x if x.real <= y.real else y


def clip(x: Any, low: Any, high: Any) -> Any:
    """The number within [low, high]."""
    return smaller(larger(x, low), high)


def mean(numbers: Sequence[Any]) -> Any:
    """Arithmetic mean."""
    return sum(numbers) / len(numbers)


def std(numbers: Sequence[float], bessel: str) -> float:
    """Standard deviation; with Bessel's correction if it says "yes"."""
    center = mean(numbers)
    return math.sqrt(sum((x - center) ** 2 for x in numbers) / (len(numbers) - (bessel == "yes")))


def counted(row: Sequence[Any], mask: Sequence[int]) -> list[Any]:
    """The counted entries of a row."""
    return [x for x, counts in zip(row, mask, strict=True) if counts]


def spread(numbers: Sequence[Any], mask: Sequence[int], rest: Any = None) -> list[Any]:
    """Put numbers back at the counted positions of a row."""
    following = iter(numbers)
    return [next(following) if counts else rest for counts in mask]


# --- per token


def token_log_prob(logits: Sequence[Any], token: int, temperature: float) -> Any:
    """Log softmax(z/τ)_a; the largest logit is subtracted first, which changes no value."""
    top = max(z.real for z in logits)
    scaled = [(z - top) / temperature for z in logits]
    return scaled[token] - log(sum(exp(z) for z in scaled))


def log_probs(logits: Sequence[Table], tokens: Table, *, temperature: float) -> list[list[Any]]:
    """Log probability of each token."""
    return [
        [token_log_prob(z, a, temperature) for z, a in zip(row, of_row, strict=True)]
        for row, of_row in zip(logits, tokens, strict=True)
    ]


def entropy(logits: Sequence[Table], *, temperature: float) -> list[list[Any]]:
    """H = −Σ_v p_v·log p_v."""
    found = []
    for row in logits:
        logs = [[token_log_prob(z, v, temperature) for v in range(len(z))] for z in row]
        found.append([-sum(exp(x) * x for x in of_token) for of_token in logs])
    return found


def kl_estimate(log_prob: Any, reference: float, kind: str, held: float) -> Any:
    """Schulman's estimators, with log r = log π_ref − log π: −log r, ½(log r)², r − 1 − log r."""
    away = reference - log_prob
    if kind == "k1":
        return -away
    if kind == "k2":
        return away**2 / 2
    if kind == "k3":
        return exp(away) - 1 - away
    value = kl_estimate(held, reference, "k3", held)
    return value + kl_estimate(log_prob, reference, "k2", held) - kl_estimate(held, reference, "k2", held)


def kl(log_probs: Table, reference: Table, held: Table, *, kl: str) -> list[list[Any]]:
    """A KL estimate of each token."""
    return [
        [kl_estimate(x, ref, kl, h) for x, ref, h in zip(row, of_ref, of_held, strict=True)]
        for row, of_ref, of_held in zip(log_probs, reference, held, strict=True)
    ]


# --- losses


def aggregate(losses: Table, mask: Table, settings: dict[str, Any]) -> Any:
    """One number from the losses of the counted tokens: DAPO eq. 8, GRPO eq. 3, Dr. GRPO §3.2."""
    rows = [counted(row, of_row) for row, of_row in zip(losses, mask, strict=True)]
    how = settings["aggregation"]
    if how == "token":
        return mean([x for row in rows for x in row])
    if how == "episode":
        episodes: dict[int, list[Any]] = {}
        for episode, row in zip(settings["episodes"], rows, strict=True):
            episodes.setdefault(episode, []).extend(row)
        return mean([mean(tokens) for tokens in episodes.values() if tokens])
    divisors = {"response": lambda row: len(row), "response_sum": lambda row: 1}
    divisor = divisors.get(how, lambda row: settings["length"])
    numbers = [sum(row) / divisor(row) for row in rows if row]
    return sum(numbers) / (len(rows) if settings.get("empty_rows") == "counted" else len(numbers))


def kl_loss(log_probs: Table, reference: Table, mask: Table, held: Table, **settings: Any) -> Any:
    """β·KL as it is added to the loss: GRPO eq. 3."""
    return settings["coef"] * aggregate(kl(log_probs, reference, held, kl=settings["kl_loss"]), mask, settings)


def policy_loss(log_probs: Table, old_log_probs: Table, advantages: Table, mask: Table, held: Table, **settings) -> Any:
    """−min(ρA, clip(ρ, 1−ε, 1+ε)A) per token: PPO eq. 7; for A < 0 at most c·|A|: Ye et al. 2019, eq. 3.

    With the ratio of sequences: GSPO eq. 7, and eq. 13 where a token's ratio has the value of the sequence's and the
    gradient of its own.
    """
    losses = []
    for now, old, gains, fixed, of_row in zip(log_probs, old_log_probs, advantages, held, mask, strict=True):
        logs = [x - y for x, y in zip(counted(now, of_row), counted(old, of_row), strict=True)]
        if settings["ratio"] == "sequence" and logs:
            if settings.get("sequence_gradient") == "through_ratio":
                logs = [mean(logs)] * len(logs)
            else:
                frozen = [x - y for x, y in zip(counted(fixed, of_row), counted(old, of_row), strict=True)]
                logs = [x - y + mean(frozen) for x, y in zip(logs, frozen, strict=True)]
        line = []
        for ratio, gain in zip(map(exp, logs), counted(gains, of_row), strict=True):
            clipped = clip(ratio, 1 - settings["clip_low"], 1 + settings["clip_high"])
            objective = smaller(ratio * gain, clipped * gain)
            if settings["dual_clip"] is not None and gain < 0:
                objective = larger(objective, settings["dual_clip"] * gain)
            line.append(-objective)
        losses.append(spread(line, of_row, 0.0))
    return aggregate(losses, mask, settings)


def value_loss(values: Table, old_values: Table, returns: Table, mask: Table, **settings: Any) -> Any:
    """½·max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²): OpenAI baselines, ppo2."""
    losses, near = [], settings["value_clip"]
    for of_row in zip(values, old_values, returns, strict=True):
        line = []
        for value, old, target in zip(*of_row, strict=True):
            error = (value - target) ** 2
            if near is not None:
                limited = (clip(value, old - near, old + near) - target) ** 2
                error = limited if settings.get("value_clip_form") == "clipped_only" else larger(error, limited)
            line.append(error * (1.0 if settings.get("value_loss_scale") == "one" else 0.5))
        losses.append(line)
    return aggregate(losses, mask, settings)


def reward_loss(scores: Table, mask: Table, **settings: Any) -> Any:
    """−log σ(better − worse) over the pairs of each prompt: InstructGPT eq. 1."""
    prompts = []
    for row, of_row in zip(scores, mask, strict=True):
        present = counted(row, of_row)
        margins = [better - worse for i, better in enumerate(present) for worse in present[i + 1 :]]
        # log(1 + e⁻ᵐ), whose exponent must not overflow.
        prompts.append([log(1 + exp(-m)) if m.real > 0 else log(1 + exp(m)) - m for m in margins])
    if settings.get("ranking_weight") == "pair":
        return mean([x for pairs in prompts for x in pairs])
    return mean([mean(pairs) for pairs in prompts if pairs])


# --- rewards, advantages, weights


def shaped_rewards(scores: Sequence[float], log_probs: Table, reference: Table, mask: Table, **settings: Any) -> Any:
    """−β·KL at each counted token, and the score at the last one, or in the slot after it: N+ details 12 and 15."""
    found = []
    for score, now, ref, of_row in zip(scores, log_probs, reference, mask, strict=True):
        row = [
            -settings["coef"] * kl_estimate(x, y, settings["kl"], x) if counts else None
            for x, y, counts in zip(now, ref, of_row, strict=True)
        ]
        slot = max(t for t, counts in enumerate(of_row) if counts)
        if settings["score_at"] == "after_last":
            slot = min(slot + 1, len(row) - 1)
        row[slot] = (row[slot] or 0.0) + score
        found.append(row)
    return found


def gae(rewards: Table, values: Table, mask: Table, last_values: Sequence[float], **settings: Any) -> Any:
    """A_t = Σ_k (γλ)ᵏ·δ_{t+k}, δ_t = r_t + γ·V_{t+1} − V_t, over the counted tokens: GAE eq. 12 and 16."""
    gamma, lam = settings["gamma"], settings["lam"]
    advantages, returns = [], []
    for of_rewards, of_values, of_row, after in zip(rewards, values, mask, last_values, strict=True):
        steps, state = counted(of_rewards, of_row), [*counted(of_values, of_row), after]
        deltas = [r + gamma * state[t + 1] - state[t] for t, r in enumerate(steps)]
        row = [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(steps))]
        advantages.append(spread(row, of_row))
        returns.append(spread([a + v for a, v in zip(row, state[:-1], strict=True)], of_row))
    how = settings.get("gae_whitening", "no")
    if how != "no":
        bessel = "yes" if how == "bessel" else "no"
        advantages = whiten(advantages, mask, whitening="mean_and_std", whitening_bessel=bessel)
    return advantages, returns


def whiten(values: Table, mask: Table, **settings: Any) -> list[list[Any]]:
    """(x − μ)/σ, and + μ where the mean is kept; equal numbers have no deviation: N+ detail 18."""
    numbers = [x for row, of_row in zip(values, mask, strict=True) for x in counted(row, of_row)]
    center = mean(numbers)
    shift = center if settings["whitening"] == "std_only" else 0.0
    if max(numbers) == min(numbers):
        return [spread([shift] * sum(of_row), of_row) for of_row in mask]
    scale = std(numbers, settings["whitening_bessel"])
    return [
        spread([(x - center) / scale + shift for x in counted(row, of_row)], of_row)
        for row, of_row in zip(values, mask, strict=True)
    ]


def group_advantages(
    scores: Sequence[float], groups: Sequence[int], valid: Sequence[int], **settings: Any
) -> list[float | None]:
    """GRPO §4.1.2, Dr. GRPO §3.2, RLOO §2.3, REINFORCE++ eq. 5; what is not valid is in no statistic."""
    kind, found = settings["baseline"], list[Any]()
    for i, score in enumerate(scores):
        others = [
            s for j, s in enumerate(scores) if valid[j] and j != i and (kind == "reinforce++" or groups[j] == groups[i])
        ]
        if not valid[i]:
            found.append(None)
        elif not others:
            found.append(0.0 if settings.get("single_response") == "zero" else score)
        elif max(*others, score) == min(*others, score):
            found.append(0.0)
        elif kind == "rloo":
            found.append(score - mean(others))
        else:
            scale = 1.0 if kind == "dr_grpo" else std([score, *others], settings["group_bessel"])
            found.append((score - mean([score, *others])) / scale)
    return found


def off_policy_weights(train_log_probs: Table, sample_log_probs: Table, mask: Table, **settings: Any) -> Any:
    """Truncated importance sampling by token or sequence; IcePop's band, and the one of the geometric mean."""
    found, kind = [], settings["off_policy"]
    for trained, sampled, of_row in zip(train_log_probs, sample_log_probs, mask, strict=True):
        logs = [x - y for x, y in zip(counted(trained, of_row), counted(sampled, of_row), strict=True)]
        if kind == "token_truncate":
            row = [min(math.exp(x), settings["cap"]) for x in logs]
        elif kind == "sequence_truncate":
            row = [min(math.exp(sum(logs)), settings["cap"])] * len(logs)
        elif kind == "token_mask":
            row = [w if settings["low"] <= w <= settings["high"] else 0.0 for w in map(math.exp, logs)]
        else:
            inside = bool(logs) and settings["low"] <= math.exp(mean(logs)) <= settings["high"]
            row = [float(inside)] * len(logs)
        found.append(spread(row, of_row))
    return found


def optimizer_steps(parameters: Sequence[float], gradients: Table, **settings: Any) -> list[float]:
    """AdamW: Kingma & Ba, algorithm 1 or the end of §2; Loshchilov & Hutter, algorithm 2."""
    (first, second), lr, eps = settings["betas"], settings["lr"], settings["eps"]
    found = []
    for i, x in enumerate(parameters):
        m = v = 0.0
        for step, gradient in enumerate(gradients, start=1):
            m = first * m + (1 - first) * gradient[i]
            v = second * v + (1 - second) * gradient[i] ** 2
            if settings["adam_eps"] == "after_debiasing":
                move = m / (1 - first**step) / (math.sqrt(v / (1 - second**step)) + eps)
            else:
                move = m * math.sqrt(1 - second**step) / (1 - first**step) / (math.sqrt(v) + eps)
            x -= lr * settings["weight_decay"] * x + lr * move
        found.append(x)
    return found

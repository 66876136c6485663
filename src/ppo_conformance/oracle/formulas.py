"""The formulas of the papers, one number at a time, in float64; nothing is rearranged for speed.

Numbers may be complex: a derivative is the imaginary part of f(x + ih)/h, exact to rounding. Comparisons read the real
part. An argument `held` is the copy of a differentiated table that a stop-gradient holds fixed. Tables are lists of
rows; in a mask, 1 counts.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterable, Iterator
from typing import Any

Table = Any
"""Numbers by row and position."""


def exp(x: Any) -> Any:
    """eˣ."""
    return cmath.exp(x) if isinstance(x, complex) else math.exp(x)


def log(x: Any) -> Any:
    """Natural logarithm."""
    return cmath.log(x) if isinstance(x, complex) else math.log(x)


def larger(*numbers: Any) -> Any:
    """The number with the largest real part."""
    return max(numbers, key=lambda x: x.real)


def smaller(*numbers: Any) -> Any:
    """The number with the smallest real part."""
    return min(numbers, key=lambda x: x.real)


def clip(x: Any, low: Any, high: Any) -> Any:
    """The number within [low, high]."""
    return smaller(larger(x, low), high)


def flat(found: Iterable[list[Any]]) -> list[Any]:
    """The entries of all rows."""
    return [x for row in found for x in row]


def mean(numbers: Any) -> Any:
    """Arithmetic mean."""
    return sum(numbers) / len(numbers)


def std(numbers: Any, bessel: str) -> float:
    """Standard deviation; with Bessel's correction if it says "yes"."""
    center = mean(numbers)
    return math.sqrt(sum((x - center) ** 2 for x in numbers) / (len(numbers) - (bessel == "yes")))


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


# --- per token


def token_log_prob(logits: Any, token: int, temperature: float) -> Any:
    """Log softmax(z/τ)_a; the largest logit is subtracted first, which changes no value."""
    top = max(z.real for z in logits)
    scaled = [(z - top) / temperature for z in logits]
    return scaled[token] - log(sum(map(exp, scaled)))


def log_probs(logits: Table, tokens: Table, *, temperature: float) -> Table:
    """Log probability of each token."""
    return [
        [token_log_prob(z, a, temperature) for z, a in zip(*of_row, strict=True)]
        for of_row in zip(logits, tokens, strict=True)
    ]


def entropy(logits: Table, *, temperature: float) -> Table:
    """H = −Σ_v p_v·log p_v."""

    def of_token(z: Any) -> Any:
        logs = [token_log_prob(z, v, temperature) for v in range(len(z))]
        return -sum(exp(x) * x for x in logs)

    return [list(map(of_token, row)) for row in logits]


def kl_estimate(log_prob: Any, reference: float, held: float, kind: str) -> Any:
    """Schulman's estimators, with log r = log π_ref − log π: −log r, ½(log r)², r − 1 − log r."""
    away = reference - log_prob
    if kind == "k1":
        return -away
    if kind == "k2":
        return away**2 / 2
    if kind == "k3":
        return exp(away) - 1 - away
    value, fixed = (kl_estimate(held, reference, held, each) for each in ("k3", "k2"))
    return value + kl_estimate(log_prob, reference, held, "k2") - fixed


def kl(log_probs: Table, reference: Table, held: Table, *, kl: str) -> Table:
    """A KL estimate of each token."""
    every = [[1] * len(row) for row in reference]
    return [[kl_estimate(*token, kind=kl) for token in row] for row in rows(every, log_probs, reference, held)]


# --- losses


def aggregate(losses: list[list[Any]], settings: dict[str, Any]) -> Any:
    """One number from the losses of counted tokens by row: DAPO eq. 8, GRPO eq. 3, Dr. GRPO §3.2."""
    how = settings["aggregation"]
    if how == "token":
        return mean(flat(losses))
    if how == "episode":
        episodes = settings["episodes"]
        losses = [flat(row for row, e in zip(losses, episodes, strict=True) if e == one) for one in set(episodes)]
    divisors = {"response_sum": 1, "fixed_length": settings.get("length")}
    numbers = [sum(row) / divisors.get(how, len(row)) for row in losses if row]
    return sum(numbers) / len(losses if settings.get("empty_rows") == "counted" else numbers)


def kl_loss(log_probs: Table, reference: Table, mask: Table, held: Table, **settings: Any) -> Any:
    """β·KL as it is added to the loss: GRPO eq. 3."""
    tokens = rows(mask, log_probs, reference, held)
    return settings["coef"] * aggregate(
        [[kl_estimate(*x, kind=settings["kl_loss"]) for x in row] for row in tokens], settings
    )


def policy_loss(log_probs: Table, old: Table, advantages: Table, mask: Table, held: Table, **settings: Any) -> Any:
    """−min(ρA, clip(ρ, 1−ε, 1+ε)A) per token: PPO eq. 7; for A < 0 at most c·|A|: Ye et al. 2019, eq. 3.

    With the ratio of sequences: GSPO eq. 7, and eq. 13 where a token's ratio has the value of the sequence's and the
    gradient of its own.
    """

    def of_token(log_ratio: Any, gain: float) -> Any:
        ratio = exp(log_ratio)
        objective = smaller(ratio * gain, clip(ratio, 1 - settings["clip_low"], 1 + settings["clip_high"]) * gain)
        if settings["dual_clip"] is not None and gain < 0:
            objective = larger(objective, settings["dual_clip"] * gain)
        return -objective

    losses = []
    for row in rows(mask, log_probs, old, advantages, held):
        logs = [now - before for now, before, _, _ in row]
        if settings["ratio"] == "sequence" and row:
            if settings.get("sequence_gradient") == "through_ratio":
                logs = [mean(logs)] * len(logs)
            else:
                of_sequence = mean([fixed - before for _, before, _, fixed in row])
                logs = [now - fixed + of_sequence for now, _, _, fixed in row]
        losses.append([of_token(x, gain) for x, (_, _, gain, _) in zip(logs, row, strict=True)])
    return aggregate(losses, settings)


def value_loss(values: Table, old_values: Table, returns: Table, mask: Table, **settings: Any) -> Any:
    """½·max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²): OpenAI baselines, ppo2."""
    near = settings["value_clip"]
    scale = 1.0 if settings.get("value_loss_scale") == "one" else 0.5

    def of_token(value: Any, old: float, target: float) -> Any:
        error = (value - target) ** 2
        if near is not None:
            limited = (clip(value, old - near, old + near) - target) ** 2
            error = limited if settings.get("value_clip_form") == "clipped_only" else larger(error, limited)
        return scale * error

    return aggregate([[of_token(*x) for x in row] for row in rows(mask, values, old_values, returns)], settings)


def reward_loss(scores: Table, mask: Table, **settings: Any) -> Any:
    """−log σ(better − worse) over the pairs of each prompt: InstructGPT eq. 1."""
    prompts = []
    for row in rows(mask, scores):
        margins = [better - worse for i, [better] in enumerate(row) for [worse] in row[i + 1 :]]
        # log(1 + e⁻ᵐ), whose exponent must not overflow.
        prompts.append([log(1 + exp(-m)) if m.real > 0 else log(1 + exp(m)) - m for m in margins])
    by_pair = settings.get("ranking_weight") == "pair"
    return aggregate(prompts, {"aggregation": "token" if by_pair else "response"})


# --- rewards, advantages, weights


def shaped_rewards(scores: Any, log_probs: Table, reference: Table, mask: Table, **settings: Any) -> Table:
    """−β·KL at each counted token, and the score at the last one, or in the slot after it: N+ details 12 and 15."""
    tokens = rows(mask, log_probs, reference, log_probs)
    found = spread([[-settings["coef"] * kl_estimate(*x, kind=settings["kl"]) for x in row] for row in tokens], mask)
    for score, row, of_row in zip(scores, found, mask, strict=True):
        slot = max(t for t, counts in enumerate(of_row) if counts)
        if settings["score_at"] == "after_last":
            slot = min(slot + 1, len(row) - 1)
        row[slot] = (row[slot] or 0.0) + score
    return found


def gae(rewards: Table, values: Table, mask: Table, last_values: Any, **settings: Any) -> tuple[Table, Table]:
    """A_t = Σ_k (γλ)ᵏ·δ_{t+k}, δ_t = r_t + γ·V_{t+1} − V_t, over the counted tokens: GAE eq. 12 and 16."""
    gamma, lam = settings["gamma"], settings["lam"]
    advantages, returns = [], []
    for row, after in zip(rows(mask, rewards, values), last_values, strict=True):
        states = [*(value for _, value in row), after]
        deltas = [reward + gamma * states[t + 1] - value for t, (reward, value) in enumerate(row)]
        advantages.append([sum((gamma * lam) ** k * x for k, x in enumerate(deltas[t:])) for t in range(len(row))])
        returns.append([a + value for a, (_, value) in zip(advantages[-1], row, strict=True)])
    found = spread(advantages, mask)
    how = settings.get("gae_whitening", "no")
    if how != "no":
        bessel = "yes" if how == "bessel" else "no"
        found = whiten(found, mask, whitening="mean_and_std", whitening_bessel=bessel)
    return found, spread(returns, mask)


def whiten(values: Table, mask: Table, *, whitening: str, whitening_bessel: str) -> Table:
    """(x − μ)/σ, and + μ where the mean is kept; equal numbers have no deviation: N+ detail 18."""
    tokens = [[x for [x] in row] for row in rows(mask, values)]
    numbers = flat(tokens)
    center = mean(numbers)
    if max(numbers) == min(numbers):
        center, scale = numbers[0], 1.0
    else:
        scale = std(numbers, whitening_bessel)
    shift = center if whitening == "std_only" else 0.0
    return spread([[(x - center) / scale + shift for x in row] for row in tokens], mask)


def group_advantages(scores: Any, groups: Any, valid: Any, **settings: Any) -> list[float | None]:
    """GRPO §4.1.2, Dr. GRPO §3.2, RLOO §2.3, REINFORCE++ eq. 5; what is not valid is in no statistic."""
    kind = settings["baseline"]

    def of_response(i: int) -> float | None:
        group = [j for j, kept in enumerate(valid) if kept and (kind == "reinforce++" or groups[j] == groups[i])]
        members, others = [scores[j] for j in group], [scores[j] for j in group if j != i]
        if not valid[i]:
            return None
        if not others:
            return 0.0 if settings.get("single_response") == "zero" else scores[i]
        if max(members) == min(members):
            return 0.0
        if kind == "rloo":
            return scores[i] - mean(others)
        return (scores[i] - mean(members)) / (1.0 if kind == "dr_grpo" else std(members, settings["group_bessel"]))

    return list(map(of_response, range(len(scores))))


def off_policy_weights(train_log_probs: Table, sample_log_probs: Table, mask: Table, **settings: Any) -> Table:
    """Truncated importance sampling by token or sequence; IcePop's band, and the one of the geometric mean."""
    of, how = settings["off_policy"].split("_")
    found = []
    for row in rows(mask, train_log_probs, sample_log_probs):
        logs = [trained - sampled for trained, sampled in row]
        if of == "sequence" and row:
            logs = [sum(logs) if how == "truncate" else mean(logs)] * len(row)
        weights = list(map(math.exp, logs))
        if how == "truncate":
            found.append([min(w, settings["cap"]) for w in weights])
        else:
            inside = [settings["low"] <= w <= settings["high"] for w in weights]
            found.append([(w if of == "token" else 1.0) * kept for w, kept in zip(weights, inside, strict=True)])
    return spread(found, mask)


def optimizer_steps(parameters: Any, gradients: Table, **settings: Any) -> list[float]:
    """AdamW: Kingma & Ba, algorithm 1 or the end of §2; Loshchilov & Hutter, algorithm 2."""
    (first, second), lr, eps = settings["betas"], settings["lr"], settings["eps"]
    found = []
    for x, of_one in zip(parameters, zip(*gradients, strict=True), strict=True):
        m = v = 0.0
        for step, gradient in enumerate(of_one, start=1):
            m = first * m + (1 - first) * gradient
            v = second * v + (1 - second) * gradient**2
            if settings["adam_eps"] == "after_debiasing":
                move = m / (1 - first**step) / (math.sqrt(v / (1 - second**step)) + eps)
            else:
                move = m * math.sqrt(1 - second**step) / (1 - first**step) / (math.sqrt(v) + eps)
            x -= lr * settings["weight_decay"] * x + lr * move
        found.append(x)
    return found

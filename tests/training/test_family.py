"""The policy gradient of every preset of the family, against its paper's objective written as a loop over tokens."""

import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kedge.algorithm import Turns, masked_whiten, shape_rewards
from kedge.algorithm.experience import Experience, PolicyOutputs, Rollout
from kedge.config import Config, config_from_settings
from kedge.config.presets import FAMILY
from kedge.stages.ppo.settings import PpoSettings, coefficients_of

LENGTHS = [5, 2, 3, 1, 4, 5]
GROUP = torch.tensor([0, 0, 0, 1, 1, 1])
MASK = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
WIDTH = 7
"""rollout.max_new_tokens, the constant of Dr. GRPO."""


def draw(seed: int, mean: float = 0.0, scale: float = 1.0) -> Tensor:
    noise = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(MASK, mean + scale * noise, 0.0)


OLD, REF = draw(1, -2.0, 0.3), draw(2, -2.0, 0.3)
NOW = OLD + draw(4, 0.0, 0.8)  # ratios from a fifth to five
SCORES = torch.tensor([1.0, 0.2, -0.4, 0.0, 2.0, 0.5], dtype=torch.float64)
VALUES = torch.where(MASK, SCORES[:, None], 0.0) + draw(3, scale=0.5)
"""Of a critic that explains something."""
BASELINE = torch.tensor([0.3, 0.3, 0.3, 0.8, 0.8, 0.8], dtype=torch.float64)
"""Mean of each prompt's earlier scores."""


def experience_of(config: Config) -> Experience:
    """What the configuration makes of the responses."""
    settings = PpoSettings.of(config, exact=True)
    estimation = settings.estimation
    rewards, mask = shape_rewards(
        SCORES,
        OLD,
        REF,
        MASK,
        kl_coef=settings.reward_kl_coef(coefficients_of(config)),
        kl_estimator=estimation.kl_estimator,
        kl_scope=estimation.kl_scope,
    )
    turns = Turns.of(None, MASK)
    if estimation.credit == "turn":
        rewards, mask = turns.summed(rewards), turns.starts
    states = torch.where(mask, GROUP[:, None], -1)  # all turns begin after the prompt
    advantages, returns = estimation.advantage(
        rewards, mask, values=VALUES, group=GROUP, states=states, baseline=BASELINE
    )
    if estimation.credit == "turn":
        advantages = turns.spread(advantages)
    if estimation.whiten_advantages:
        advantages = masked_whiten(advantages, mask)
    ids, rows = torch.full((6, 5), 3), torch.arange(6)
    rollout = Rollout(ids, MASK | True, ids, MASK, MASK, OLD, rows >= 0, group=GROUP, policy_version=0 * rows)
    return Experience(
        rollout=rollout,
        scores=SCORES,
        old_logprobs=OLD,
        ref_logprobs=REF,
        values=None,
        rewards=rewards,
        reward_mask=mask,
        advantages=advantages,
        returns=returns,
        positive=SCORES.ge(1),
    )


def found(preset: str) -> Tensor:
    """The gradient of kedge's loss in the log probabilities."""
    small = {"num_prompts": 8, "num_responses": 2, "max_new_tokens": WIDTH, "num_minibatches": 1}
    config = config_from_settings("ppo", {"preset": preset, **small})
    experience, logprobs = experience_of(config), NOW.clone().requires_grad_()
    objective = PpoSettings.of(config, exact=True).objective(experience, coefficients_of(config))
    terms = objective(PolicyOutputs(logprobs, 0 * NOW, None), experience, objective.divisors(experience))
    (gradient,) = torch.autograd.grad(terms.loss, logprobs)
    return gradient


def normalized(row: int, scores: list[float], *, std: bool) -> float:
    members = [scores[other] for other in range(6) if GROUP[other] == GROUP[row]]
    return (scores[row] - statistics.mean(members)) / (statistics.stdev(members) if std else 1.0)


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def whitened(advantages: list[list[float]]) -> list[list[float]]:
    tokens = [each for row in advantages for each in row]
    mean, std = statistics.mean(tokens), statistics.pstdev(tokens)
    return [[(each - mean) / std for each in row] for row in advantages]


def rloo(lp: Tensor) -> Tensor:
    rewards = [float(SCORES[i]) - 0.03 * sum(float(OLD[i, t] - REF[i, t]) for t in range(LENGTHS[i])) for i in range(6)]
    total = torch.zeros(())
    for i in range(6):
        others = [rewards[j] for j in range(6) if GROUP[j] == GROUP[i] and j != i]
        for t in range(LENGTHS[i]):
            total = total + (lp[i, t] - OLD[i, t]).exp() * (rewards[i] - statistics.mean(others)) / WIDTH
    return total / 6


def grpo(lp: Tensor) -> Tensor:
    total = torch.zeros(())
    for i in range(6):
        advantage = normalized(i, SCORES.tolist(), std=True)
        for t in range(LENGTHS[i]):
            away = REF[i, t] - lp[i, t]
            kl = away.exp() - away - 1
            step = clipped((lp[i, t] - OLD[i, t]).exp(), advantage, 0.2, 0.2) - 0.04 * kl
            total = total + step / LENGTHS[i]
    return total / 6


def gigpo(lp: Tensor) -> Tensor:
    """Episodes of one turn, compared as episodes and as turns that begin in the same state; verl-agent's loss."""
    total = torch.zeros(())
    for i in range(6):
        advantage = 2 * normalized(i, SCORES.tolist(), std=True)
        for t in range(LENGTHS[i]):
            away = REF[i, t] - lp[i, t]
            kl = away.exp() - away - 1
            total = total + clipped((lp[i, t] - OLD[i, t]).exp(), advantage, 0.2, 0.2) - 0.01 * kl
    return total / sum(LENGTHS)


def dr_grpo(lp: Tensor) -> Tensor:
    total = torch.zeros(())
    for i in range(6):
        advantage = normalized(i, SCORES.tolist(), std=False)
        for t in range(LENGTHS[i]):
            total = total + clipped((lp[i, t] - OLD[i, t]).exp(), advantage, 0.2, 0.2) / WIDTH
    return total / 6


def reinforce_plus_plus(lp: Tensor) -> Tensor:
    to_go = [
        [float(SCORES[i]) - 0.05 * float((OLD - REF)[i, t : LENGTHS[i]].sum()) for t in range(LENGTHS[i])]
        for i in range(6)
    ]
    return token_mean(lp, whitened(to_go), lambda ratio, advantage: clipped(ratio, advantage, 0.2, 0.2))


def critic(lp: Tensor) -> Tensor:
    """REINFORCE++ less w·(V_t − the mean V_0); each half of the rows has the w of the other half."""
    to_go = [
        [float(SCORES[i]) - 0.05 * float((OLD - REF)[i, t : LENGTHS[i]].sum()) for t in range(LENGTHS[i])]
        for i in range(6)
    ]
    start = statistics.mean(VALUES[:, 0].tolist())
    learned = [[float(VALUES[i, t]) - start for t in range(LENGTHS[i])] for i in range(6)]

    def tokens(*quarters: int) -> tuple[list[float], list[float]]:
        rows = [i for i in range(6) if i % 4 in quarters]
        return [x for i in rows for x in learned[i]], [x for i in rows for x in to_go[i]]

    def fitted(*quarters: int) -> float:
        changes, plain = tokens(*quarters)
        return min(1.0, max(0.0, statistics.linear_regression(changes, plain).slope)) if len(plain) > 1 else 0.0

    def saved(weight: float, quarter: int) -> float:
        changes, plain = tokens(quarter)
        left = [x - weight * change for x, change in zip(plain, changes, strict=True)]
        return len(left) * (statistics.pvariance(plain) - statistics.pvariance(left))

    weights = {
        one: fitted(*others) if sum(saved(fitted(a), b) for a, b in (others, others[::-1])) > 0 else 0.0
        for one, others in ((0, (2, 3)), (1, (0, 1)))
    }
    assert max(weights.values()) > 0.1, "a critic that gets no weight tests nothing"
    rows = [
        [x - weights[i % 4 // 2] * change for x, change in zip(to_go[i], learned[i], strict=True)] for i in range(6)
    ]
    return token_mean(lp, whitened(rows), lambda ratio, advantage: clipped(ratio, advantage, 0.2, 0.2))


def token_mean(lp: Tensor, advantages: list[list[float]], term: Callable[[Tensor, float], Tensor]) -> Tensor:
    total = torch.zeros(())
    for i in range(6):
        for t in range(LENGTHS[i]):
            total = total + term((lp[i, t] - OLD[i, t]).exp(), advantages[i][t])
    return total / sum(LENGTHS)


def group_normalized() -> list[list[float]]:
    return [[normalized(i, SCORES.tolist(), std=True)] * LENGTHS[i] for i in range(6)]


def dapo(lp: Tensor) -> Tensor:
    return token_mean(lp, group_normalized(), lambda ratio, advantage: clipped(ratio, advantage, 0.2, 0.28))


def gspo(lp: Tensor) -> Tensor:
    total = torch.zeros(())
    for i in range(6):
        ratio = torch.ones(())
        for t in range(LENGTHS[i]):
            ratio = ratio * (lp[i, t] - OLD[i, t]).exp() ** (1 / LENGTHS[i])
        total = total + clipped(ratio, normalized(i, SCORES.tolist(), std=True), 3e-4, 4e-4)
    return total / 6


def cispo(lp: Tensor) -> Tensor:
    total = torch.zeros(())
    for i in range(6):
        for t in range(LENGTHS[i]):
            weight = min(float((NOW[i, t] - OLD[i, t]).exp()), 5.0)  # not differentiated
            total = total + weight * normalized(i, SCORES.tolist(), std=True) * lp[i, t]
    return total / sum(LENGTHS)


def length_adaptive(alpha: float) -> list[list[float]]:
    """GAE with λ = 1 − 1/(α·l), as a sum over residuals."""
    rows: list[list[float]] = []
    for i, length in enumerate(LENGTHS):
        lam = max(0.0, 1 - 1 / (alpha * length))
        values = [*VALUES[i, :length].tolist(), 0.0]
        delta = [(float(SCORES[i]) if t == length - 1 else 0.0) + values[t + 1] - values[t] for t in range(length)]
        rows.append([sum(lam**k * delta[t + k] for k in range(length - t)) for t in range(length)])
    return whitened(rows)


def spo(lp: Tensor) -> Tensor:
    rows = [[float(SCORES[i] - BASELINE[i])] * LENGTHS[i] for i in range(6)]
    return token_mean(lp, whitened(rows), lambda ratio, advantage: clipped(ratio, advantage, 0.2, 0.28))


def vapo(lp: Tensor) -> Tensor:
    correct = [lp[i, t] for i in range(6) for t in range(LENGTHS[i]) if SCORES[i] >= 1]
    surrogate = token_mean(lp, length_adaptive(0.05), lambda ratio, advantage: clipped(ratio, advantage, 0.2, 0.28))
    return surrogate + 0.1 * torch.stack(correct).mean()


def sao(lp: Tensor) -> Tensor:
    kept = lambda ratio, advantage: ratio * advantage if 0.7 < float(ratio.detach()) < 6.0 else 0 * ratio  # noqa: E731
    return token_mean(lp, length_adaptive(1.5), kept)


def distill(lp: Tensor) -> Tensor:
    """Minus each token's own log ratio to the teacher, REF; and the score, if there is a reward, at the last token."""
    rows = [
        [float(SCORES[i]) * (t == LENGTHS[i] - 1) - float(OLD[i, t] - REF[i, t]) for t in range(LENGTHS[i])]
        for i in range(6)
    ]
    return token_mean(lp, rows, lambda ratio, advantage: ratio * advantage)


PAPERS = {
    "rloo": rloo,
    "grpo": grpo,
    "dr-grpo": dr_grpo,
    "reinforce++": reinforce_plus_plus,
    "spo": spo,
    "critic": critic,
    "dapo": dapo,
    "gspo": gspo,
    "gigpo": gigpo,
    "cispo": cispo,
    "vapo": vapo,
    "sao": sao,
    "distill": distill,
}


@pytest.mark.parametrize("preset", PAPERS)
def test_the_gradient_is_that_of_the_papers_objective(preset):
    logprobs = NOW.clone().requires_grad_()
    (expected,) = torch.autograd.grad(-PAPERS[preset](logprobs), logprobs)
    assert expected.abs().sum() > 0.01
    torch.testing.assert_close(found(preset), expected, atol=1e-7, rtol=1e-5)  # whitening adds 1e-8 to the variance


def test_every_preset_of_the_family_is_compared():
    assert list(PAPERS) == [preset.name for preset in FAMILY]


def test_vapo_without_its_parts_is_ppo():
    """Field by field, so its update is PPO's to the bit."""
    [vapo_preset] = [preset for preset in FAMILY if preset.name == "vapo"]
    plain = Config().model_dump()
    back = {name: plain[name.split(".")[0]][name.split(".")[1]] for name in vapo_preset.values}
    without = config_from_settings("ppo", {"preset": "vapo", **back})
    assert without.ppo == Config().ppo
    assert without.rollout == Config().rollout

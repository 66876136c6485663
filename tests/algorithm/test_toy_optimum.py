"""PPO with KL in the reward on a task whose optimum is known in closed form: π* ∝ π_ref·exp(r/β) (spec §12.8).

Three tokens, of which the third one stops, and at most three steps: 15 responses, each with its own score. The policy
is a table of logits per prefix, the critic a table of values, so nothing but the algorithm stands between PPO and π*.
"""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from kedge.algorithm import (
    GeneralizedAdvantage,
    clipped_policy_loss,
    clipped_value_loss,
    masked_whiten,
    shape_rewards,
    token_logprobs,
)

pytestmark = pytest.mark.usefixtures("unchecked")

STOP, STEPS, BETA = 2, 3, 0.5
PREFIXES = [prefix for length in range(STEPS) for prefix in product((0, 1), repeat=length)]


def is_response(tokens: tuple[int, ...]) -> bool:
    return STOP not in tokens[:-1] and (len(tokens) == STEPS or tokens[-1] == STOP)


RESPONSES = [
    tokens for length in range(1, STEPS + 1) for tokens in product(range(3), repeat=length) if is_response(tokens)
]


@dataclass(frozen=True)
class Task:
    """All responses as padded tensors: one row each, with the prefix (state) before each token, and its score."""

    tokens: Tensor
    states: Tensor
    mask: Tensor
    scores: Tensor
    reference: Tensor

    def logprobs(self, logits: Tensor, rows: Tensor) -> Tensor:
        return token_logprobs(logits[self.states[rows]], self.tokens[rows])

    def response_logprobs(self, logits: Tensor) -> Tensor:
        """Log probability of every response."""
        rows = torch.arange(len(RESPONSES))
        return torch.where(self.mask, self.logprobs(logits, rows), 0.0).sum(-1)

    def optimum(self, beta: float) -> Tensor:
        """Log π* of every response."""
        return torch.log_softmax(self.response_logprobs(self.reference) + self.scores / beta, -1)


@pytest.fixture(scope="module")
def task() -> Task:
    draw = torch.Generator().manual_seed(5)
    tokens = torch.full((len(RESPONSES), STEPS), STOP)
    states = torch.zeros(len(RESPONSES), STEPS, dtype=torch.long)
    mask = torch.zeros(len(RESPONSES), STEPS, dtype=torch.bool)
    for row, response in enumerate(RESPONSES):
        for step, token in enumerate(response):
            tokens[row, step] = token
            states[row, step] = PREFIXES.index(response[:step])
            mask[row, step] = True
    scores = torch.randn(len(RESPONSES), generator=draw)
    return Task(tokens, states, mask, scores, torch.randn(len(PREFIXES), 3, generator=draw))


def advantages_of(kind: str, rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    estimates = {
        "advantage": GeneralizedAdvantage(gamma=1.0, gae_lambda=0.95),
        "monte_carlo": GeneralizedAdvantage(gamma=1.0, gae_lambda=1.0),
        "td": GeneralizedAdvantage(gamma=1.0, gae_lambda=0.0),
    }
    advantages, returns = estimates[kind](rewards, mask, values=values)
    return advantages, returns


def train(task: Task, *, kl_coef: float, kind: str = "advantage", updates: int = 20, **shaping: str) -> Tensor:
    """PPO as the pipeline does it: rollout, rewards, advantages, four epochs of two minibatches."""
    draw = torch.Generator().manual_seed(0)
    logits = task.reference.clone().requires_grad_()
    critic = torch.zeros(len(PREFIXES), requires_grad=True)
    optimizer = torch.optim.Adam([logits, critic], lr=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=updates)
    for _ in range(updates):
        with torch.no_grad():
            rows = torch.multinomial(task.response_logprobs(logits).exp(), 512, replacement=True, generator=draw)
            mask, old_logprobs = task.mask[rows], task.logprobs(logits, rows)
            old_values = critic[task.states[rows]]
        ref_logprobs = task.logprobs(task.reference, rows)
        rewards, mask = shape_rewards(task.scores[rows], old_logprobs, ref_logprobs, mask, kl_coef=kl_coef, **shaping)
        advantages, returns = advantages_of(kind, rewards, old_values, mask)
        advantages = masked_whiten(advantages, mask)
        for _ in range(4):
            for part in torch.randperm(512, generator=draw).chunk(2):
                policy = clipped_policy_loss(
                    task.logprobs(logits, rows[part]), old_logprobs[part], advantages[part], mask[part], clip_range=0.2
                )
                value = clipped_value_loss(
                    critic[task.states[rows[part]]], old_values[part], returns[part], mask[part], clip_range=None
                )
                optimizer.zero_grad()
                (policy.loss + value.loss).backward()
                optimizer.step()
        schedule.step()
    return logits.detach()


def distance(task: Task, logits: Tensor, beta: float) -> float:
    """KL(π‖π*), nats, over all responses exactly."""
    logprobs = task.response_logprobs(logits)
    return (logprobs.exp() * (logprobs - task.optimum(beta))).sum().item()


def test_the_responses_are_all_there(task):
    assert len(RESPONSES) == 1 + 2 + 4 + 8
    assert task.response_logprobs(task.reference).exp().sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kind": "monte_carlo", "kl_scope": "sequence"},
        {"kind": "td"},
    ],
    ids=["token KL, GAE", "one adjusted reward per response", "TD residuals"],
)
def test_ppo_reaches_the_optimum_in_closed_form(task, settings):
    before = distance(task, task.reference, BETA)
    after = distance(task, train(task, kl_coef=BETA, **settings), BETA)
    assert before > 0.4
    # Sampling noise alone remains: 512 responses per update.
    assert after < 0.002


def test_another_coefficient_reaches_another_optimum(task):
    logits = train(task, kl_coef=2 * BETA)
    assert distance(task, logits, 2 * BETA) < 0.002
    assert distance(task, logits, BETA) > 0.05


def test_with_the_kls_sign_flipped_it_does_not(task):
    assert distance(task, train(task, kl_coef=-BETA), BETA) > 0.1

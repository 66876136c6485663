"""The update with several learners: responses with read-only tokens, no critic, and a control policy."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from kedge.algorithm.advantages import RewardToGo
from kedge.algorithm.experience import Experience, PolicyOutputs, Rollout
from kedge.algorithm.policy_losses import kl_penalty_policy_loss, unclipped_policy_loss
from kedge.logs.experience_metrics import repetition
from kedge.models import ActorCritic, LanguageModel
from kedge.ranks import ALONE
from kedge.training.learner import T
from kedge.training.objective import Metric
from kedge.training.optimizer import build_optimizer
from kedge.training.update import MetricTotals, PpoUpdate, reduce_steps
from kedge_base.errors import ConfigError
from tests.experience import collected
from tests.tiny import tiny_causal_lm, tiny_tokenizer
from tests.training.test_update import GAE, gradients, make_learner, make_models, make_objective, run_update

LAYOUT = ["CrrCCC", "CCrrC.", "CxCCrr"]
"""C: chosen by the policy; r: read and not chosen; x: in neither mask, inside of a row; . padding."""


def conversation() -> Rollout:
    draw = torch.Generator().manual_seed(1)
    action_mask = torch.tensor([[mark == "C" for mark in row] for row in LAYOUT])
    return Rollout(
        prompt_ids=torch.tensor([[0, 40, 41], [50, 51, 52], [0, 0, 60]]),
        prompt_mask=torch.tensor([[False, True, True], [True, True, True], [False, False, True]]),
        response_ids=torch.randint(3, 250, (3, 6), generator=draw),
        token_mask=torch.tensor([[mark in "Cr" for mark in row] for row in LAYOUT]),
        action_mask=action_mask,
        logprobs=torch.where(action_mask, -1.0, 0.0),
        stopped=torch.tensor([True, False, True]),
        group=torch.tensor([0, 0, 1]),
        policy_version=torch.zeros(3, dtype=torch.long),
    )


def collect(models: ActorCritic, rollout: Rollout, **settings: object) -> Experience:
    reference = LanguageModel(tiny_causal_lm(seed=3), tiny_tokenizer())
    scores = torch.tensor([1.0, -1.0, 0.5])
    options = {"advantage": GAE, "kl_coef": 0.1, "whiten_advantages": False, **settings}
    return collected(rollout, scores, models, reference, temperature=1.0, **options)


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_tokens_that_are_only_read_have_no_kl_reward_value_advantage_or_entropy(critic: str) -> None:
    models = make_models(critic)
    if models.policy.value_head is not None:
        nn.init.normal_(models.policy.value_head.weight, generator=torch.Generator().manual_seed(0))
    experience = collect(models, conversation())
    others = ~experience.action_mask
    for name in ("kl", "rewards", "values", "advantages", "returns", "old_logprobs", "ref_logprobs"):
        figures = getattr(experience, name)
        assert (figures[others] == 0).all(), name
        assert (figures[experience.action_mask] != 0).any(), name
    assert torch.equal(experience.reward_mask, experience.action_mask)
    result = run_update(make_models(critic), experience, num_epochs=1, num_minibatches=1, learning_rate=0.0)
    assert (result.passes[0].entropies[others] == 0).all()


def test_gae_passes_over_them_so_that_their_neighbors_see_each_other() -> None:
    experience = collect(make_models(), conversation())
    assert experience.values is not None
    for row in range(3):
        mask = experience.action_mask[row]
        rewards, values = (figures[row][mask].tolist() for figures in (experience.rewards, experience.values))
        expected, carried = [], 0.0
        for step in reversed(range(len(rewards))):
            following = values[step + 1] if step + 1 < len(values) else 0.0
            carried = rewards[step] + following - values[step] + 0.95 * carried
            expected.insert(0, carried)
        assert experience.advantages[row][mask].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_they_get_no_gradient_as_targets(critic: str) -> None:
    """The whole update's gradient is that of a loop over actions, each from one plain pass over what was read."""
    models, rollout = make_models(critic), conversation()
    experience = collect(models, rollout)
    actual = gradients(models, experience, make_objective(value_coef=0.0), 12)
    twin, total = copy.deepcopy(models), torch.zeros(())
    for row in range(3):
        read = rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist()
        for time, token in enumerate(rollout.response_ids[row].tolist()):
            if rollout.action_mask[row, time]:
                logits = twin.policy.causal(input_ids=torch.tensor([read])).logits[0, -1]
                logprob = logits.masked_fill(twin.policy.forbidden, -torch.inf).log_softmax(-1)[token]
                total = total - experience.advantages[row, time] * logprob
            if rollout.token_mask[row, time]:
                read.append(token)
    (total / int(rollout.action_mask.sum())).backward()
    for parameter, gradient in zip(twin.parameters(), actual, strict=True):
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4)


def test_a_process_reward_is_paid_at_its_own_action_and_never_at_a_token_that_was_only_read() -> None:
    models, rollout = make_models(), conversation()
    per_token = torch.arange(18.0).reshape(3, 6) + 1
    plain, paid = collect(models, rollout), collect(models, rollout, token_scores=per_token)
    difference = paid.rewards - plain.rewards
    torch.testing.assert_close(difference, torch.where(rollout.action_mask, per_token, 0.0))


def test_importance_weights_scale_the_gradient_of_tokens_that_the_sampler_saw_differently() -> None:
    models, rollout = make_models(), conversation()
    with torch.no_grad():
        exact = models(rollout, temperature=1.0).logprobs
    apart = torch.zeros_like(exact)
    apart[0, 0], apart[1, 4] = 0.5, -3.0  # weights e^−½, and e³ that is capped at 2
    sampled = replace(rollout, logprobs=exact + apart)
    weighted = collect(models, sampled, importance_cap=2.0)
    expected = torch.ones_like(exact)
    expected[0, 0], expected[1, 4] = math.exp(-0.5), 2.0
    torch.testing.assert_close(weighted.importance_weights, expected * rollout.action_mask, atol=1e-5, rtol=1e-5)
    by_hand = replace(weighted, advantages=weighted.advantages * expected, importance_weights=None)
    objective = make_objective(surrogate=unclipped_policy_loss, value_coef=0.0)
    pairs = zip(gradients(models, weighted, objective, None), gradients(models, by_hand, objective, 12), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_masked_tokens_have_no_policy_gradient_and_the_others_keep_their_weight(cap: float | None) -> None:
    models, rollout = make_models(), conversation()
    with torch.no_grad():
        exact = models(rollout, temperature=1.0).logprobs
    apart = torch.zeros_like(exact)
    slot = int(rollout.action_mask[2].int().argmax())
    apart[0, 0], apart[1, 4], apart[2, slot] = 0.5, -3.0, 1.0  # ratios e^−½, e³ and e^−1; the band is 0.5 to 2
    assert rollout.action_mask[[0, 1], [0, 4]].all()
    sampled = replace(rollout, logprobs=exact + apart)
    masked = collect(models, sampled, importance_cap=cap, importance_band=("token", 0.5, 2.0))
    expected = torch.ones_like(exact)
    expected[0, 0] = 1.0 if cap is None else math.exp(-0.5)
    expected[1, 4] = expected[2, slot] = 0.0
    torch.testing.assert_close(masked.importance_weights, expected * rollout.action_mask, atol=1e-5, rtol=1e-5)
    by_hand = replace(masked, advantages=masked.advantages * expected, importance_weights=None)
    objective = make_objective(surrogate=unclipped_policy_loss, value_coef=0.0)
    pairs = zip(gradients(models, masked, objective, None), gradients(models, by_hand, objective, 12), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_a_first_pass_is_used_for_its_own_rows_alone() -> None:
    models, rollout = make_models(), conversation()
    experience = collect(models, rollout)
    learner = make_learner(models, one_minibatch=True)
    pending = learner.first_pass(rollout)
    others = experience.select(torch.tensor([2, 0, 1]))
    assert learner.evaluate(others) is not pending
    torch.testing.assert_close(learner.evaluate(others).logprobs, models(others.rollout, temperature=1.0).logprobs)
    assert learner.evaluate(experience) is pending
    assert learner.evaluate(experience) is not pending  # it is used once


def test_repetition_does_not_span_tokens_that_were_only_read() -> None:
    ids = torch.tensor([[1, 2, 9, 9, 3, 4, 1, 2, 3, 4, 9, 9], [9, 9, 1, 2, 3, 4, 1, 2, 3, 4, 9, 5]])
    chosen = ids != 9
    # Row 0 chose 1 2, and then 3 4 1 2 3 4: three 4-grams, all different; 1 2 3 4 with the first turn is not one.
    # Row 1 chose 1 2 3 4 1 2 3 4, and then 5: five 4-grams, of which the last repeats the first.
    assert repetition(ids, chosen).tolist() == pytest.approx([0.0, 1 / 5])


def test_a_policy_without_a_critic_is_updated_by_reinforce() -> None:
    models = ActorCritic(LanguageModel(tiny_causal_lm(), tiny_tokenizer()))
    rollout = conversation()
    experience = collect(models, rollout, advantage=RewardToGo(gamma=1.0))
    assert experience.values is None
    learner = make_learner(models)
    assert not learner.needs_values
    with pytest.raises(ConfigError, match="GeneralizedAdvantage needs a critic's values"):
        collect(models, rollout)
    with pytest.raises(ConfigError, match="there is no critic to warm up"):
        run_update(models, experience, make_objective(train_policy=False))
    result = run_update(copy.deepcopy(models), experience, num_epochs=2, num_minibatches=3)
    assert result.num_steps == 6
    assert not [name for name in result.metrics() if name.startswith("value/")]
    # At ratio 1 the gradient is −Σ G·∇log π over all actions: here by autograd through the model's own logits.
    actual = gradients(models, experience, make_objective(), None)
    logprobs = models(rollout, temperature=1.0).logprobs
    (-(logprobs * experience.returns).sum() / int(rollout.action_mask.sum())).backward()
    for parameter, gradient in zip(models.parameters(), actual, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-6, rtol=1e-4)


@dataclass(frozen=True)
class Transitions:
    """A control policy's batch: one row per decision."""

    states: Tensor
    actions: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor
    ref_logprobs: None = None
    importance_weights: None = None
    positive: None = None

    @property
    def action_mask(self) -> Tensor:
        return torch.ones_like(self.old_logprobs, dtype=torch.bool)

    reward_mask = action_mask

    def select(self, rows: Tensor | slice) -> Transitions:
        names = ("states", "actions", "old_logprobs", "advantages", "returns", "values")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def with_advantages(self, advantages: Tensor) -> Transitions:
        return replace(self, advantages=advantages)


class ControlLearner(nn.Module):
    """A softmax policy and a critic on two features: the learner of another world."""

    needs_values = True
    ranks = ALONE

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.critic = nn.Linear(2, 3), nn.Linear(2, 1)

    def repeated(self, batch: Transitions, attempt: Callable[[], T]) -> T:
        return attempt()

    def micro_batches(self, batch: Transitions) -> Iterator[tuple[Tensor, Transitions]]:
        for rows in torch.arange(len(batch.states)).split(50):
            yield rows, batch.select(rows)

    def evaluate(self, batch: Transitions) -> PolicyOutputs:
        choices = torch.distributions.Categorical(logits=self.policy(batch.states))
        return PolicyOutputs(
            logprobs=choices.log_prob(batch.actions.squeeze(1))[:, None],
            entropy=choices.entropy()[:, None],
            values=self.critic(batch.states),
        )


def test_the_same_update_teaches_a_control_policy() -> None:
    """A contextual bandit: action 0 is right where the first feature is positive, action 2 where it is negative."""
    draw = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        learner = ControlLearner()
    optimizer = build_optimizer(learner.parameters(), learning_rate=3e-2)
    shares = []
    for _ in range(15):
        states = torch.randn(200, 2, generator=draw)
        with torch.no_grad():
            actions = torch.multinomial(learner.policy(states).softmax(-1), 1, generator=draw)
            rewards = (actions == torch.where(states[:, :1] > 0, 0, 2)).float()
            values, blank = learner.critic(states), torch.zeros(200, 1)
            batch = Transitions(states, actions, blank, rewards - values, rewards, values)
            batch = replace(batch, old_logprobs=learner.evaluate(batch).logprobs)
        settings = {"num_epochs": 4, "num_minibatches": 2, "max_grad_norm": 0.5, "generator": draw}
        result = PpoUpdate(learner, optimizer, batch, make_objective(), **settings).run()
        assert result.steps[0]["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
        shares.append(float(rewards.mean()))
    assert shares[0] < 0.6
    assert sum(shares[-3:]) / 3 > 0.85


def test_a_minibatch_is_whitened_where_that_is_asked_for() -> None:
    zeros = torch.zeros(4, 1)
    batch = Transitions(zeros, zeros, zeros, torch.tensor([[1.0], [3.0], [5.0], [7.0]]), zeros, zeros)
    found = make_objective(whitens_minibatches=True).prepared(batch).advantages
    # mean 4, variance (9 + 1 + 1 + 9) / 4 = 5
    torch.testing.assert_close(found, torch.tensor([[-3.0], [-1.0], [1.0], [3.0]]) / 5**0.5)
    assert make_objective().prepared(batch) is batch
    single = batch.select(slice(0, 1))
    assert make_objective(whitens_minibatches=True).prepared(single) is single


def test_a_kl_of_whole_distributions_replaces_the_estimate() -> None:
    """Two actions with probabilities ½, ½ → ¼, ¾: KL(π_old‖π) = ½·log 2 + ½·log ⅔, whatever action was taken."""
    new = torch.tensor([0.25, 0.75]).log().requires_grad_()
    exact = 0.5 * (torch.tensor(0.5).log() - new).sum()
    zeros = torch.zeros(2, 1)
    batch = Transitions(zeros, zeros, torch.full((2, 1), 0.5).log(), zeros, zeros, zeros)
    outputs = PolicyOutputs(new[:, None], zeros, None, kl=exact.expand(2, 1))
    objective = make_objective(surrogate=partial(kl_penalty_policy_loss, kl_coef=3.0), value_coef=0.0)
    terms = objective(outputs, batch, objective.divisors(batch))
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert float(terms.loss.detach()) == pytest.approx(3 * expected)
    assert float(terms.metrics["policy/approx_kl"].value) == pytest.approx(expected)
    terms.loss.backward()
    torch.testing.assert_close(new.grad, torch.tensor([-1.5, -1.5]))


def test_each_metric_is_reduced_as_it_says() -> None:
    totals = MetricTotals()
    for share, low, high in ((0.25, 0.9, 1.1), (0.5, 0.7, 1.3)):
        totals.add({"a": Metric(torch.tensor(share)), "least": Metric(torch.tensor(low), "min")})
        totals.add({"most": Metric(torch.tensor(high), "max")})
    first = totals.values()
    assert first == pytest.approx({"a": 0.75, "least": 0.7, "most": 1.3})
    steps = [first, {"a": 0.25, "least": 0.8, "most": 2.0, "unknown": 1.0}]
    assert reduce_steps(steps, totals.reductions) == pytest.approx({"a": 0.5, "least": 0.7, "most": 2.0})
    assert reduce_steps([], {}) == {}

"""The PPO update on tiny models: properties before, during and after the epochs, for every split."""

import copy
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice, repeat
from types import SimpleNamespace

import pytest
import torch

from kedge.algorithm.advantages import GeneralizedAdvantage, TotalReward
from kedge.algorithm.experience import Rollout
from kedge.algorithm.policy_losses import (
    clipped_policy_loss,
    kl_penalty_policy_loss,
    own_policy_loss,
    unclipped_policy_loss,
)
from kedge.data import EncodedExample
from kedge.models import ActorCritic, LanguageModel, ScalarModel
from kedge.models.packing.trunk import Trunk
from kedge.ranks import AdaptiveTokens
from kedge.rollout import Sampler
from kedge.training.learner import LanguageLearner
from kedge.training.objective import Objective
from kedge.training.optimizer import CRITIC, build_optimizer
from kedge.training.pretraining_mix import PretrainingMix
from kedge.training.supervised.losses import CompletionLoss
from kedge.training.update import PpoUpdate, distance_moved
from kedge_base.errors import NumericsError
from tests.experience import collected
from tests.tiny import tiny_causal_lm, tiny_reward_model, tiny_tokenizer

PROMPTS = [[5, 6, 7], [20], [30, 31], [40, 41, 42, 43], [50], [60, 61], [70], [80, 81]]
STOP = 9  # an ordinary token, likely enough to end some responses early
GAE = GeneralizedAdvantage(gamma=1.0, gae_lambda=0.95)
CLIPPED = partial(clipped_policy_loss, clip_range=0.2)


def make_objective(**changes):
    return Objective(**{"surrogate": CLIPPED, "value_clip_range": 0.2, "value_coef": 0.5, **changes})


def make_models(critic="shared", family="llama"):
    tokenizer = tiny_tokenizer()
    policy = LanguageModel(tiny_causal_lm(family), tokenizer, value_head=critic == "shared")
    return ActorCritic(policy, ScalarModel(tiny_reward_model(family), tokenizer) if critic == "separate" else None)


def make_experience(models, *, scores=None, temperature=1.0, reference_seed=1, prompts=PROMPTS, **settings):
    sampler = Sampler(models.policy, pad_id=0, stop_tokens=[STOP], max_new_tokens=10, temperature=temperature)
    rollout = sampler.generate(prompts, seeds=range(len(PROMPTS)))
    first = [prompts.index(prompt) for prompt in prompts]
    # Shorten some rows by hand, so that every batch has responses of different lengths.
    lengths = torch.tensor([10, 1, 4, 7, 10, 2, 9, 5]).clamp(max=rollout.response_lengths)
    mask = torch.arange(10) < lengths[:, None]
    rollout = replace(
        rollout,
        group=torch.tensor(first),
        token_mask=mask,
        action_mask=mask,
        response_ids=rollout.response_ids.masked_fill(~mask, 0),
        logprobs=rollout.logprobs.masked_fill(~mask, 0.0),
        values=None if rollout.values is None else rollout.values.masked_fill(~mask, 0.0),
    )
    reference = LanguageModel(tiny_causal_lm("llama", seed=reference_seed), tiny_tokenizer())
    scores = torch.linspace(-1, 2, len(PROMPTS)) if scores is None else scores
    settings = {"kl_coef": 0.05, "advantage": GAE, **settings}
    return collected(rollout, scores, models, reference, temperature=temperature, **settings)


def make_learner(models, *, temperature=1.0, objective=None, **settings):
    entropy_gradient = objective is not None and objective.entropy_coef != 0
    return LanguageLearner(models, temperature, entropy_gradient=entropy_gradient, **settings)


def run_update(models, experience, objective=None, *, learner=None, learning_rate=1e-2, **settings):
    objective = objective or make_objective()
    learning = ("temperature", "micro_batch_tokens", "precision", "value_after_last")
    chosen = {name: settings.pop(name) for name in learning if name in settings}
    learner = learner or make_learner(models, objective=objective, **chosen)
    optimizer = build_optimizer(models.parameters(), learning_rate=learning_rate)
    settings = {"num_epochs": 2, "num_minibatches": 2, "max_grad_norm": 1.0, **settings}
    generator = torch.Generator().manual_seed(0)
    with nullcontext() if objective.train_policy else learner.frozen_policy():
        return PpoUpdate(learner, optimizer, experience, objective, generator=generator, **settings).run()


def gradients(models, experience, objective, micro_batch_tokens, *, value_after_last=False):
    """One step's gradient: with learning rate 0 it is still there after the step."""
    models = copy.deepcopy(models)
    run_update(
        models, experience, objective, learning_rate=0.0, num_epochs=1, num_minibatches=1, max_grad_norm=None,
        micro_batch_tokens=micro_batch_tokens, value_after_last=value_after_last,
    )  # fmt: skip
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in models.parameters()]


@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_at_learning_rate_zero_the_ratio_stays_one_over_all_epochs(critic, temperature):
    models = make_models(critic)
    experience = make_experience(models, temperature=temperature)
    result = run_update(
        models,
        experience,
        learning_rate=0.0,
        num_minibatches=4,
        micro_batch_tokens=1,
        temperature=temperature,
    )
    assert len(result.steps) == 8
    for figures in result.steps:
        assert figures["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert figures["policy/approx_kl"] == pytest.approx(0.0, abs=1e-8)
        assert figures["policy/clip_fraction"] == 0.0
        assert figures["value/clip_fraction"] == 0.0


def test_a_trainer_that_forgets_the_temperature_is_caught_by_the_first_ratio():
    models = make_models()
    experience = make_experience(models, temperature=0.6)
    result = run_update(models, experience, learning_rate=0.0, temperature=1.0)
    assert abs(result.steps[0]["policy/ratio_max"] - 1) > 0.1
    assert result.metrics()["policy/first_ratio_max"] > 1.1


@pytest.mark.parametrize("budget", [None, 1, 25])
def test_the_passes_tell_what_the_policy_said_epoch_by_epoch(budget):
    models = make_models()
    experience = make_experience(models)
    mask = experience.action_mask
    before = models(experience.rollout, temperature=1.0)
    result = run_update(
        models, experience, learning_rate=1e-2, num_epochs=3, num_minibatches=2, micro_batch_tokens=budget
    )
    assert len(result.passes) == 3
    assert not any(torch.isnan(each.logprobs).any() or torch.isnan(each.entropies).any() for each in result.passes)
    said = [each.logprobs[mask] - experience.old_logprobs[mask] for each in result.passes]
    half = (said[0].abs() < 1e-5).float().mean()  # the first minibatch was read under the weights that sampled
    assert 0.2 < half < 0.8
    assert said[0].abs().mean() < said[1].abs().mean() < said[2].abs().mean()
    assert result.metrics()["policy/ratio_max"] == pytest.approx(float(torch.cat(said).max().exp()), rel=1e-4)
    assert result.metrics()["policy/ratio_min"] == pytest.approx(float(torch.cat(said).min().exp()), rel=1e-4)
    at_once = run_update(models, experience, learning_rate=0.0, num_epochs=1, num_minibatches=1, precision="fp32")
    after = models(experience.rollout, temperature=1.0)
    torch.testing.assert_close(at_once.passes[0].entropies, after.entropy.detach(), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(after.entropy, before.entropy)


def test_what_no_epoch_came_by_is_nan():
    models = make_models()
    experience = make_experience(models)
    refused = run_update(models, experience, num_minibatches=2, check_step=lambda step, *_: step < 1)
    (visited,) = refused.passes
    rows = visited.logprobs.isnan().all(dim=1)
    assert refused.num_steps == 1
    assert refused.metrics()["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert not rows.any()  # the refused step had read its rows, too
    stopped = run_update(models, experience, num_minibatches=4, check_step=lambda step, *_: step < 1)
    assert stopped.passes[0].logprobs.isnan().all(dim=1).sum() == len(PROMPTS) // 2


@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize(
    ("objective", "after_last"),
    [
        (make_objective(), False),
        (make_objective(aggregation="sequence", entropy_coef=0.1), False),
        (make_objective(aggregation="constant", constant_length=10, kl_coef=0.2), False),
        (make_objective(surrogate=partial(kl_penalty_policy_loss, kl_coef=1.0), value_clip_range=None), False),
        (make_objective(), True),
    ],
    ids=["token", "sequence+entropy", "constant+kl", "kl_penalty", "after_last"],
)
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(critic, objective, after_last):
    models = make_models(critic)
    experience = make_experience(models, score_at="after_last" if after_last else "last")
    whole = gradients(models, experience, objective, None, value_after_last=after_last)
    assert sum(float(gradient.abs().sum()) for gradient in whole) > 0
    for budget in (1, 25):  # every row alone, and two or three together
        parts = gradients(models, experience, objective, budget, value_after_last=after_last)
        for expected, actual in zip(whole, parts, strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize(
    ("objective", "after_last"),
    [(make_objective(), False), (make_objective(entropy_coef=0.1), False), (make_objective(), True)],
    ids=["plain", "entropy", "after_last"],
)
def test_the_first_epochs_pass_can_run_before_the_experience_is_collected(critic, objective, after_last):
    models = make_models(critic)
    rollout, scores = make_experience(models).rollout, torch.linspace(-1, 2, len(PROMPTS))
    collecting = {"temperature": 1.0, "kl_coef": 0.0, "advantage": GAE}
    collecting["score_at"] = "after_last" if after_last else "last"
    updating = {"learning_rate": 0.0, "num_minibatches": 1, "max_grad_norm": None}

    def updated(ahead):
        trained = copy.deepcopy(models)
        learner = make_learner(trained, objective=objective, value_after_last=after_last, one_minibatch=True)
        first_pass = learner.first_pass(rollout) if ahead else None
        experience = collected(rollout, scores, trained, None, first_pass=first_pass, **collecting)
        result = run_update(trained, experience, objective, learner=learner, num_epochs=1, **updating)
        return result.metrics(), [p.grad for p in trained.parameters() if p.grad is not None]

    (figures, gradient), (expected_figures, expected) = updated(ahead=True), updated(ahead=False)
    assert figures == pytest.approx(expected_figures, abs=1e-5)
    assert figures["policy/ratio_max"] == 1.0  # not nearly: the pass is compared with itself
    for actual, wanted in zip(gradient, expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-6, rtol=1e-4)


def test_there_is_no_first_pass_where_one_pass_does_not_hold_all_rows():
    models = make_models()
    rollout = make_experience(models).rollout
    tokens = sum(rollout.row_lengths)
    assert make_learner(models, micro_batch_tokens=tokens, one_minibatch=True).first_pass(rollout) is not None
    assert make_learner(models, micro_batch_tokens=tokens - 1, one_minibatch=True).first_pass(rollout) is None
    assert make_learner(models, micro_batch_tokens=tokens).first_pass(rollout) is None


@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize("tokens", [None, 40])
def test_epochs_on_responses_that_share_prompts_are_those_on_each_row_by_itself(critic, tokens, monkeypatch):
    models = make_models(critic)
    experience = make_experience(models, prompts=[PROMPTS[number] for number in (3, 3, 0, 3, 2, 2, 3, 1)])
    assert len({pieces[-1] for pieces in experience.rollout.prompts}) == 4
    found = []
    for shares in (True, False):
        trained = copy.deepcopy(models)
        if not shares:
            monkeypatch.setattr(Trunk, "shares_up_to", 0)
        # Plain steps: Adam's would turn rounding into a sign.
        optimizer = torch.optim.SGD([{"params": [*trained.parameters()], CRITIC: False}], lr=0.1)
        result = PpoUpdate(
            make_learner(trained, micro_batch_tokens=tokens),
            optimizer,
            experience,
            make_objective(),
            generator=torch.Generator().manual_seed(0),
            num_epochs=2,
            num_minibatches=2,
            max_grad_norm=1.0,
        ).run()
        found.append((result.metrics(), torch.cat([each.detach().flatten() for each in trained.parameters()])))
    (figures, weights), (expected_figures, expected) = found
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-6)
    assert figures == pytest.approx(expected_figures, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("budget", [None, 25])
@pytest.mark.parametrize("weights", ["advantages", "importance"])
def test_rows_without_a_gradient_take_no_backward_pass(budget, weights, monkeypatch):
    models = make_models(None)
    experience = make_experience(models, kl_coef=0.0, advantage=TotalReward(gamma=1.0))
    # Plain steps, as above.
    plain = partial(torch.optim.SGD, lr=0.1)
    monkeypatch.setattr(f"{__name__}.build_optimizer", lambda of, **_: plain([{"params": [*of], CRITIC: False}]))
    idle = torch.tensor([True, False, True, False, False, True, True, False])
    zeroed = torch.where(idle[:, None], 0.0, torch.ones_like(experience.advantages))
    if weights == "advantages":
        experience = experience.with_advantages(torch.randn_like(experience.advantages) * zeroed)
    else:
        experience = replace(experience, importance_weights=zeroed)
    read: dict[bool, list[int]] = {True: [], False: []}
    evaluate = LanguageLearner.evaluate

    def recorded(learner, batch):
        read[torch.is_grad_enabled()] += batch.rollout.group.tolist()
        return evaluate(learner, batch)

    monkeypatch.setattr(LanguageLearner, "evaluate", recorded)
    found = []
    for splits in (True, False):
        if not splits:
            monkeypatch.setattr(Objective, "rows_with_gradient", lambda *_, **__: None)
        trained = copy.deepcopy(models)
        result = run_update(trained, experience, num_epochs=2, num_minibatches=2, micro_batch_tokens=budget)
        found.append((result, torch.cat([each.detach().flatten() for each in trained.parameters()])))
        if splits:
            assert sorted(read[False]) == sorted(idle.nonzero().flatten().tolist() * 2)
            assert sorted(read[True]) == sorted((~idle).nonzero().flatten().tolist() * 2)
    (result, parameters), (expected, expected_parameters) = found
    torch.testing.assert_close(parameters, expected_parameters, atol=1e-6, rtol=1e-5)
    assert result.metrics() == pytest.approx(expected.metrics(), abs=1e-5, rel=1e-5)
    for own, other in zip(result.passes, expected.passes, strict=True):
        torch.testing.assert_close(own.logprobs, other.logprobs, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(own.entropies, other.entropies, atol=1e-4, rtol=1e-4)


def test_all_rows_take_a_backward_pass_where_another_term_or_none_has_a_gradient():
    models = make_models("shared")
    experience = make_experience(models, kl_coef=0.0)
    half = torch.arange(len(PROMPTS)) % 2 == 0
    zeroed = experience.with_advantages(torch.where(half[:, None], 0.0, experience.advantages))

    def moving(batch=zeroed, *, critic=False, **terms):
        return make_objective(**terms).rows_with_gradient(batch, trains_critic=critic).tolist()

    assert moving() == (~half).tolist()
    everything = [True] * len(PROMPTS)
    assert moving(critic=True) == everything
    assert moving(entropy_coef=0.1) == moving(kl_coef=0.1) == moving(positive_nll_coef=0.1) == everything
    assert moving(surrogate=partial(kl_penalty_policy_loss, kl_coef=1.0)) == everything
    assert moving(surrogate=partial(own_policy_loss, function=lambda ratios, advantages: ratios)) == everything
    assert moving(surrogate=unclipped_policy_loss) == (~half).tolist()
    # Adam's moments move the weights, also where all gradients are 0.
    assert moving(experience.with_advantages(torch.zeros_like(experience.advantages))) == everything


def test_a_first_pass_over_all_rows_is_used_where_some_have_no_gradient():
    models = make_models(None)
    experience = make_experience(models, kl_coef=0.0, advantage=TotalReward(gamma=1.0))
    half = torch.arange(len(PROMPTS)) % 2 == 0
    zeroed = experience.with_advantages(torch.where(half[:, None], 0.0, experience.advantages))
    learner = make_learner(models, one_minibatch=True)
    assert learner.first_pass(experience.rollout) is not None
    run_update(models, zeroed, learner=learner, num_epochs=1, num_minibatches=1)
    assert learner.reused_first_pass


@pytest.mark.parametrize("runs_out", [False, True])
def test_a_first_pass_that_is_repeated_was_not_reused(runs_out):
    models = make_models()
    experience = make_experience(models)
    learner = make_learner(models, one_minibatch=True, micro_batch_tokens=AdaptiveTokens(1000))
    failures = [MemoryError()] * runs_out

    def failing(*tokens):
        if failures:
            raise failures.pop()
        return CLIPPED(*tokens)

    assert learner.first_pass(experience.rollout) is not None
    assert not learner.reused_first_pass
    run_update(models, experience, make_objective(surrogate=failing), learner=learner, num_minibatches=1)
    assert learner.reused_first_pass == (not runs_out)


def test_figures_do_not_depend_on_the_split_either():
    models = make_models()
    experience = make_experience(models)
    first, *others = (
        run_update(
            copy.deepcopy(models), experience, num_epochs=1, num_minibatches=2, micro_batch_tokens=budget
        ).metrics()
        for budget in (None, 1, 25)
    )
    for other in others:
        assert other == pytest.approx(first, abs=1e-5)


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_the_first_steps_policy_gradient_is_reinforce(critic):
    models = make_models(critic)
    experience = make_experience(models, whiten_advantages=False)
    objective = make_objective(value_coef=0.0)
    actual = gradients(models, experience, objective, None)
    # REINFORCE by hand: every response alone, unpadded, −Σ A·log π over all tokens of the batch.
    twin = copy.deepcopy(models)
    rollout, total = experience.rollout, 0.0
    for row in range(len(PROMPTS)):
        response = rollout.response_ids[row][rollout.action_mask[row]]
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]
        logits = twin.policy.causal(input_ids=torch.cat([prompt, response])[None]).logits[0]
        logits = logits.masked_fill(twin.policy.forbidden, -torch.inf)
        for time, token in enumerate(response.tolist()):
            logprob = logits[len(prompt) - 1 + time].log_softmax(-1)[token]
            total = total - experience.advantages[row, time] * logprob
    (total / rollout.num_actions).backward()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters()]
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_policy_equal_to_reference_has_no_kl_and_its_reward_is_the_score():
    models = make_models()
    experience = make_experience(models, reference_seed=0)
    assert experience.kl.abs().max() < 1e-6
    torch.testing.assert_close(experience.rewards.sum(-1), experience.scores, atol=1e-5, rtol=1e-5)


def test_experience_is_the_same_in_micro_batches_and_after_a_round_of_garbage_in_padding():
    models = make_models("separate")
    whole, split = make_experience(models), make_experience(models, micro_batch_tokens=25)
    for name in ("old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns"):
        torch.testing.assert_close(getattr(split, name), getattr(whole, name), atol=1e-5, rtol=1e-4)


def test_returns_keep_the_rewards_scale_while_advantages_are_whitened():
    models = make_models()
    plain, whitened = make_experience(models, whiten_advantages=False), make_experience(models)
    torch.testing.assert_close(plain.returns, whitened.returns)
    mask = plain.action_mask
    torch.testing.assert_close(plain.returns[mask], (plain.advantages + plain.values)[mask])
    assert float(whitened.advantages[mask].mean()) == pytest.approx(0, abs=1e-5)
    assert float(whitened.advantages[mask].std(correction=0)) == pytest.approx(1, abs=1e-4)


def test_early_stop_leaves_the_weights_of_the_step_that_went_too_far():
    models = make_models()
    experience = make_experience(models)
    free = run_update(copy.deepcopy(models), experience, num_epochs=4, learning_rate=5e-2)
    limit = max(step["policy/approx_kl"] for step in free.steps) / 3
    stopped = run_update(models, experience, num_epochs=4, learning_rate=5e-2, early_stop_kl=limit / 1.5)
    assert stopped.stopped_early
    assert 0 < stopped.num_steps < len(free.steps)
    *taken, left_out = (step["policy/approx_kl"] for step in stopped.steps)
    assert len(taken) == stopped.num_steps
    assert max(taken) <= limit < left_out  # that of the step that was not taken shows how far the policy went


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_value_warm_up_moves_the_critic_and_leaves_the_policy_bit_equal(critic):
    models = make_models(critic)
    experience = make_experience(models)
    before = {name: p.detach().clone() for name, p in models.named_parameters()}
    run_update(models, experience, make_objective(train_policy=False))
    for name, parameter in models.named_parameters():
        if name.startswith("policy.causal"):
            assert torch.equal(parameter, before[name]), name
            assert parameter.requires_grad
    head = "policy.value_head.weight" if critic == "shared" else "critic.classifier.score.weight"
    assert not torch.equal(dict(models.named_parameters())[head], before[head])


def test_a_pretraining_mix_of_weight_zero_is_ppo_bit_for_bit():
    models = make_models()
    experience = make_experience(models)
    plain, mixed = copy.deepcopy(models), copy.deepcopy(models)
    run_update(plain, experience)
    run_update(mixed, experience, extra_loss=repeat(lambda: [0.0 * next(mixed.policy.causal.parameters()).sum()]))
    for one, other in zip(plain.parameters(), mixed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_repeated_pass_reads_the_same_pretraining_texts():
    loss = SimpleNamespace(weight=float, length=int, sums=lambda batch: {"loss": torch.tensor(float(max(batch)))})
    mix = PretrainingMix(loss, range(1, 100), coef=1.0, batch_size=4, micro_batch_tokens=None, seed=0)
    first, second = islice(mix.draw(1), 2)
    assert list(first()) == list(first()) != list(second())


def test_pretraining_texts_of_which_nothing_is_learned_add_nothing():
    """As the string of EOS alone, where the tokenizer puts no token before a text."""
    models = make_models()
    texts = [EncodedExample([], [STOP])]
    mix = PretrainingMix(CompletionLoss(models.policy), texts, coef=1.0, batch_size=2, micro_batch_tokens=None, seed=0)
    result = run_update(models, make_experience(models), extra_loss=mix.draw(1), num_epochs=1)
    assert [step["loss/ptx"] for step in result.steps] == [0.0, 0.0]


def test_every_epoch_is_a_fresh_shuffle_that_visits_each_response_once(monkeypatch):
    models = make_models()
    experience = make_experience(models)
    seen = []
    forward = ActorCritic.forward

    def spy(self, rollout: Rollout, **settings):
        seen.append([row[mask].tolist() for row, mask in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)])
        return forward(self, rollout, **settings)

    monkeypatch.setattr(ActorCritic, "forward", spy)
    run_update(models, experience, num_epochs=2, num_minibatches=4)
    epochs = [[prompt for minibatch in part for prompt in minibatch] for part in (seen[:4], seen[4:])]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(PROMPTS)
    assert epochs[0] != epochs[1]


def test_repeated_updates_raise_the_probability_of_what_is_rewarded():
    models = make_models()
    sampler = Sampler(models.policy, pad_id=0, stop_tokens=[STOP], max_new_tokens=6)
    optimizer = build_optimizer(models.parameters(), learning_rate=1e-2)
    generator, shares = torch.Generator().manual_seed(0), []
    for update in range(12):
        rollout = sampler.generate(PROMPTS * 4, seeds=range(1000 * update, 1000 * update + 32))
        wanted = (rollout.response_ids % 2 == 0) & rollout.action_mask
        scores = wanted.sum(-1) / rollout.response_lengths
        shares.append(float(scores.mean()))
        experience = collected(rollout, scores, models, None, temperature=1.0, advantage=GAE, kl_coef=0.0)
        settings = {"num_epochs": 4, "num_minibatches": 2, "max_grad_norm": 1.0, "generator": generator}
        PpoUpdate(make_learner(models), optimizer, experience, make_objective(), **settings).run()
    assert sum(shares[-3:]) / 3 > shares[0] + 0.2
    assert not math.isnan(shares[-1])


def test_a_gradient_that_is_not_finite_is_refused_and_the_weights_stay():
    models = make_models()
    experience = make_experience(models)
    broken = replace(experience, advantages=torch.full_like(experience.advantages, torch.nan))
    before = [p.detach().clone() for p in models.parameters()]
    with pytest.raises(NumericsError, match=r"is nan; .*the step was not taken"):
        run_update(models, broken)
    assert all(torch.equal(old, new) for old, new in zip(before, models.parameters(), strict=True))


def test_the_distance_moved_is_zero_before_and_positive_after_the_epochs():
    models = make_models()
    experience = make_experience(models)
    assert distance_moved(make_learner(models), experience) == pytest.approx(0.0, abs=1e-8)
    run_update(models, experience, num_minibatches=1, num_epochs=1)
    whole = distance_moved(make_learner(models), experience)
    assert whole > 1e-6
    split = make_learner(models, micro_batch_tokens=25)
    assert distance_moved(split, experience) == pytest.approx(whole, rel=1e-4)


def test_the_distance_moved_stays_finite_if_a_token_becomes_certain():
    models = make_models()
    experience = make_experience(models)
    old_logprobs = experience.old_logprobs.clone()
    old_logprobs[0, 0] = -120.0  # exp(120) is beyond fp32; the loss holds log ratios at 20
    moved = distance_moved(make_learner(models), replace(experience, old_logprobs=old_logprobs))
    others = 48 - 1  # the tokens of `make_experience`, at distance 0
    assert moved == pytest.approx((math.exp(20) - 1 - 20) / (others + 1), rel=1e-5)

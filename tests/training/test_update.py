"""The PPO update on real (tiny) models: what must hold before, during and after the epochs, whatever the split."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from kedge.algorithm.experience import Rollout
from kedge.errors import NumericsError
from kedge.models import ActorCritic, LanguageModel, ScalarModel
from kedge.rollout import Sampler, collect_experience
from kedge.training.objective import Objective
from kedge.training.optimizer import build_optimizer
from kedge.training.update import distance_moved, first_pass, ppo_update
from tests.tiny import tiny_causal_lm, tiny_reward_model, tiny_tokenizer

PROMPTS = [[5, 6, 7], [20], [30, 31], [40, 41, 42, 43], [50], [60, 61], [70], [80, 81]]
STOP = 9  # an ordinary token, likely enough to end some responses early


def make_models(critic="shared", family="llama"):
    tokenizer = tiny_tokenizer()
    policy = LanguageModel(tiny_causal_lm(family), tokenizer, value_head=critic == "shared")
    return ActorCritic(policy, ScalarModel(tiny_reward_model(family), tokenizer) if critic == "separate" else None)


def make_experience(models, *, temperature=1.0, reference_seed=1, **settings):
    sampler = Sampler(models.policy, pad_id=0, stop_token=STOP, max_new_tokens=10, temperature=temperature)
    rollout = sampler.generate(PROMPTS, seeds=range(len(PROMPTS)))
    # Shorten some rows by hand, so that every batch has responses of different lengths.
    lengths = torch.tensor([10, 1, 4, 7, 10, 2, 9, 5]).clamp(max=rollout.response_lengths)
    mask = torch.arange(10) < lengths[:, None]
    rollout = replace(
        rollout,
        response_mask=mask,
        response_ids=rollout.response_ids.masked_fill(~mask, 0),
        logprobs=rollout.logprobs.masked_fill(~mask, 0.0),
        values=None if rollout.values is None else rollout.values.masked_fill(~mask, 0.0),
    )
    reference = LanguageModel(tiny_causal_lm("llama", seed=reference_seed), tiny_tokenizer())
    scores = torch.linspace(-1, 2, len(PROMPTS))
    return collect_experience(
        rollout, scores, models, reference, temperature=temperature, kl_coef=settings.pop("kl_coef", 0.05), **settings
    )


def run_update(models, experience, objective=None, *, learning_rate=1e-2, **settings):
    optimizer = build_optimizer(models.parameters(), learning_rate=learning_rate)
    settings = {"num_epochs": 2, "num_minibatches": 2, "temperature": 1.0, **settings}
    generator = torch.Generator().manual_seed(0)
    return ppo_update(models, optimizer, experience, objective or Objective(), generator=generator, **settings)


def gradients(models, experience, objective, micro_batch_tokens):
    """One step's gradient: with learning rate 0 it is still there after the step."""
    models = copy.deepcopy(models)
    run_update(
        models, experience, objective, learning_rate=0.0, num_epochs=1, num_minibatches=1, max_grad_norm=None,
        micro_batch_tokens=micro_batch_tokens,
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
        num_epochs=3,
        num_minibatches=4,
        micro_batch_tokens=1,
        temperature=temperature,
    )
    assert len(result.steps) == 12
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
    assert result.figures()["policy/first_ratio_max"] > 1.1


@pytest.mark.parametrize("budget", [None, 1, 25])
def test_the_passes_tell_what_the_policy_said_epoch_by_epoch(budget):
    models = make_models()
    experience = make_experience(models)
    mask = experience.rollout.response_mask
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
    assert result.figures()["policy/ratio_max"] == pytest.approx(float(torch.cat(said).max().exp()), rel=1e-4)
    assert result.figures()["policy/ratio_min"] == pytest.approx(float(torch.cat(said).min().exp()), rel=1e-4)
    at_once = run_update(models, experience, learning_rate=0.0, num_epochs=1, num_minibatches=1, precision="fp32")
    after = models(experience.rollout, temperature=1.0)
    torch.testing.assert_close(at_once.passes[0].entropies, after.entropy.detach(), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(after.entropy, before.entropy)


def test_what_no_epoch_came_by_is_nan():
    models = make_models()
    experience = make_experience(models)
    refused = run_update(models, experience, num_minibatches=2, judge=lambda step, *_: step < 1)
    (visited,) = refused.passes
    rows = visited.logprobs.isnan().all(dim=1)
    assert refused.num_steps == 1
    assert refused.figures()["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert not rows.any()  # the refused step had read its rows, too
    stopped = run_update(models, experience, num_minibatches=4, judge=lambda step, *_: step < 1)
    assert stopped.passes[0].logprobs.isnan().all(dim=1).sum() == len(PROMPTS) // 2


@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize(
    "objective",
    [
        Objective(),
        Objective(aggregation="sequence", entropy_coef=0.1),
        Objective(aggregation="constant", constant_length=10, kl_coef=0.2),
        Objective(policy_loss="kl_penalty", value_clip_range=None),
        Objective(value_after_last=True),
    ],
    ids=["token", "sequence+entropy", "constant+kl", "kl_penalty", "after_last"],
)
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(critic, objective):
    models = make_models(critic)
    experience = make_experience(models, score_at="after_last" if objective.value_after_last else "last")
    whole = gradients(models, experience, objective, None)
    assert sum(float(gradient.abs().sum()) for gradient in whole) > 0
    for budget in (1, 25):  # every row alone, and two or three together
        for expected, actual in zip(whole, gradients(models, experience, objective, budget), strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize(
    "objective",
    [Objective(), Objective(entropy_coef=0.1), Objective(value_after_last=True)],
    ids=["plain", "entropy", "after_last"],
)
def test_the_first_epochs_pass_can_be_made_before_the_experience_is_collected(critic, objective):
    models = make_models(critic)
    rollout, scores = make_experience(models).rollout, torch.linspace(-1, 2, len(PROMPTS))
    collecting = {"temperature": 1.0, "kl_coef": 0.0}
    collecting["score_at"] = "after_last" if objective.value_after_last else "last"
    updating = {"learning_rate": 0.0, "num_minibatches": 1, "max_grad_norm": None}

    def updated(ahead):
        trained = copy.deepcopy(models)
        begun = ahead and first_pass(
            trained,
            rollout,
            num_minibatches=1,
            micro_batch_tokens=None,
            temperature=1.0,
            entropy_gradient=objective.needs_entropy_gradient,
            value_after_last=objective.value_after_last,
        )
        experience = collect_experience(rollout, scores, trained, None, first_pass=begun or None, **collecting)
        result = run_update(trained, experience, objective, first_pass=begun or None, num_epochs=1, **updating)
        return result.figures(), [p.grad for p in trained.parameters() if p.grad is not None]

    (figures, gradient), (expected_figures, expected) = updated(ahead=True), updated(ahead=False)
    assert figures == pytest.approx(expected_figures, abs=1e-5)
    assert figures["policy/ratio_max"] == 1.0  # not nearly: the pass is compared with itself
    for actual, wanted in zip(gradient, expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-6, rtol=1e-4)


def test_there_is_no_first_pass_where_an_epoch_has_several_or_the_policy_is_frozen():
    models = make_models()
    rollout = make_experience(models).rollout
    fits = {"num_minibatches": 1, "micro_batch_tokens": sum(rollout.row_lengths), "temperature": 1.0}
    assert first_pass(models, rollout, **fits) is not None
    for other in (
        {"num_minibatches": 2},
        {"micro_batch_tokens": sum(rollout.row_lengths) - 1},
        {"train_policy": False},
    ):
        assert first_pass(models, rollout, **{**fits, **other}) is None


def test_figures_do_not_depend_on_the_split_either():
    models = make_models()
    experience = make_experience(models)
    first, *others = (
        run_update(
            copy.deepcopy(models), experience, num_epochs=1, num_minibatches=2, micro_batch_tokens=budget
        ).figures()
        for budget in (None, 1, 25)
    )
    for other in others:
        assert other == pytest.approx(first, abs=1e-5)


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_the_first_steps_policy_gradient_is_reinforce(critic):
    models = make_models(critic)
    experience = make_experience(models, whiten_advantages=False)
    objective = Objective(value_coef=0.0)
    actual = gradients(models, experience, objective, None)
    # REINFORCE by hand: every response alone, unpadded, −Σ A·log π over all tokens of the batch.
    twin = copy.deepcopy(models)
    rollout, total = experience.rollout, 0.0
    for row in range(len(PROMPTS)):
        response = rollout.response_ids[row][rollout.response_mask[row]]
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]
        logits = twin.policy.causal(input_ids=torch.cat([prompt, response])[None]).logits[0]
        logits = logits.masked_fill(twin.policy.forbidden, -torch.inf)
        for time, token in enumerate(response.tolist()):
            logprob = logits[len(prompt) - 1 + time].log_softmax(-1)[token]
            total = total - experience.advantages[row, time] * logprob
    (total / rollout.num_tokens).backward()
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
    mask = plain.rollout.response_mask
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
    assert 0 < len(stopped.steps) < len(free.steps)
    assert all(step["policy/approx_kl"] <= limit for step in stopped.steps)


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_value_warm_up_moves_the_critic_and_leaves_the_policy_bit_equal(critic):
    models = make_models(critic)
    experience = make_experience(models)
    before = {name: p.detach().clone() for name, p in models.named_parameters()}
    run_update(models, experience, train_policy=False)
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
    run_update(mixed, experience, extra_loss=lambda: [0.0 * next(mixed.policy.causal.parameters()).sum()])
    for one, other in zip(plain.parameters(), mixed.parameters(), strict=True):
        assert torch.equal(one, other)


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
    sampler = Sampler(models.policy, pad_id=0, stop_token=STOP, max_new_tokens=6)
    optimizer = build_optimizer(models.parameters(), learning_rate=1e-2)
    generator, shares = torch.Generator().manual_seed(0), []
    for update in range(12):
        rollout = sampler.generate(PROMPTS * 4, seeds=range(1000 * update, 1000 * update + 32))
        wanted = (rollout.response_ids % 2 == 0) & rollout.response_mask
        scores = wanted.sum(-1) / rollout.response_lengths
        shares.append(float(scores.mean()))
        experience = collect_experience(rollout, scores, models, None, temperature=1.0, kl_coef=0.0)
        settings = {"num_epochs": 4, "num_minibatches": 2, "temperature": 1.0, "generator": generator}
        ppo_update(models, optimizer, experience, Objective(), **settings)
    assert sum(shares[-3:]) / 3 > shares[0] + 0.2
    assert not math.isnan(shares[-1])


def test_a_gradient_that_is_not_finite_is_refused_and_the_weights_stay():
    models = make_models()
    experience = make_experience(models)
    broken = replace(experience, advantages=torch.full_like(experience.advantages, torch.nan))
    before = [p.detach().clone() for p in models.parameters()]
    with pytest.raises(NumericsError, match=r"is nan: the step was not taken"):
        run_update(models, broken)
    assert all(torch.equal(old, new) for old, new in zip(before, models.parameters(), strict=True))


def test_the_distance_moved_is_zero_before_and_positive_after_the_epochs():
    models = make_models()
    experience = make_experience(models)
    assert distance_moved(models, experience, temperature=1.0) == pytest.approx(0.0, abs=1e-8)
    run_update(models, experience, num_minibatches=1, num_epochs=1)
    whole = distance_moved(models, experience, temperature=1.0)
    assert whole > 1e-6
    assert distance_moved(models, experience, temperature=1.0, micro_batch_tokens=25) == pytest.approx(whole, rel=1e-4)

"""Experience collection: properties that hold at any temperature and with every option."""

import pytest
import torch

from kedge.algorithm import GeneralizedAdvantage, LengthAdaptiveLambda, RewardToGo
from kedge.logs.experience_metrics import describe_experience
from kedge.models import response_logprobs
from tests.algorithm.test_advantages import advantages_by_definition
from tests.training.test_update import make_experience, make_models


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_a_policy_that_is_the_reference_has_no_kl_at_any_temperature(temperature):
    experience = make_experience(make_models(), reference_seed=0, temperature=temperature, kl_coef=0.5)
    assert experience.kl.abs().max() < 1e-5
    torch.testing.assert_close(experience.rewards.sum(-1), experience.scores, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("score_at", ["last", "after_last"])
def test_whitened_rewards_keep_their_mean_and_their_padding(score_at):
    models = make_models()
    plain = make_experience(models, score_at=score_at)
    whitened = make_experience(models, score_at=score_at, whiten_rewards=True)
    counted, mask = plain.rewards[plain.reward_mask].double(), plain.reward_mask
    expected = (counted - counted.mean()) / counted.var(correction=0).sqrt() + counted.mean()
    torch.testing.assert_close(whitened.rewards[mask].double(), expected, atol=1e-5, rtol=1e-5)
    assert not whitened.rewards[~mask].any()


def test_whitened_rewards_are_no_rounding_of_the_scores_that_they_come_from():
    """Scores in the millions, whose whitened rewards and advantages are about 1."""
    scores = torch.tensor([1e7, -1e7] * 4)
    experience = make_experience(make_models(), scores=scores, kl_coef=0.0, whiten_rewards=True)
    assert float(experience.rewards.abs().max()) < 10.0
    assert float(experience.advantages[experience.action_mask].std(correction=0)) == pytest.approx(1.0, abs=1e-5)


def test_small_rewards_are_no_rounding_of_the_values():
    """Values in the unit of whitened rewards are not terms of the rewards."""
    scores, models = torch.tensor([1e-8, -1e-8] * 4), make_models("shared")
    torch.nn.init.constant_(models.policy.value_head.bias, 1.0)
    experience = make_experience(models, scores=scores, kl_coef=0.0, whiten_rewards=True)
    assert float(experience.rewards[experience.reward_mask].std(correction=0)) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.05, 0.2, 1.0])
def test_equal_scores_of_a_policy_that_is_the_reference_move_nothing(temperature):
    """Its KL is the rounding of two passes, which whitening would stretch to the size of a real advantage."""
    settings = {"advantage": RewardToGo(1.0), "whiten_advantages": True, "temperature": temperature}
    settings |= {"reuse_sampled": True, "reference_seed": 0}  # log probabilities of the sampler's own passes
    for kl_coef in (0.05, 0.5, 3.0):
        given = {**settings, "kl_coef": kl_coef}
        same = make_experience(make_models(), scores=torch.full((8,), 0.1), **given)
        assert same.kl.any()
        assert not same.advantages.any()
        close = make_experience(make_models(), scores=torch.linspace(0.1, 0.11, 8), **given)
        assert float(close.advantages[close.action_mask].std(correction=0)) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("score_at", ["last", "after_last"])
def test_whitening_changes_neither_the_mean_reward_nor_the_cost_of_the_kl(score_at):
    experience = make_experience(make_models(), score_at=score_at, kl_coef=0.5, whiten_rewards=True)
    kl = sum(experience.kl[experience.action_mask].tolist()) / len(experience.scores)
    score = sum(experience.scores.tolist()) / len(experience.scores)
    metrics = describe_experience(experience)
    assert metrics["reward/kl"] == pytest.approx(0.5 * kl, abs=1e-5)
    assert metrics["reward/total"] == pytest.approx(score - 0.5 * kl, abs=1e-5)
    assert abs(kl) > 0.1


@pytest.mark.parametrize("score_at", ["last", "after_last"])
@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_what_the_sampler_noted_is_what_the_trainer_computes(critic, score_at):
    models = make_models(critic)
    if models.policy.value_head is not None:
        torch.nn.init.normal_(models.policy.value_head.weight, generator=torch.Generator().manual_seed(0))
    settings = {"score_at": score_at, "temperature": 0.7, "micro_batch_tokens": 20}
    again = make_experience(models, **settings)
    noted = make_experience(models, reuse_sampled=True, **settings)
    for name in ("old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns"):
        torch.testing.assert_close(getattr(noted, name), getattr(again, name), atol=1e-5, rtol=1e-5)
    assert again.values is not None
    assert again.values.abs().max() > 0.1


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_the_policy_does_not_read_again_what_it_has_just_said(critic, monkeypatch):
    models = make_models(critic)
    monkeypatch.setattr(models.policy.trunk, "hidden", None)
    experience = make_experience(models, reuse_sampled=True)
    assert torch.equal(experience.old_logprobs, experience.rollout.logprobs)


def test_the_slot_of_the_score_does_not_make_a_response_longer():
    """Each row by the definition of GAE, with λ from the number of its tokens."""
    adaptive = GeneralizedAdvantage(1.0, LengthAdaptiveLambda(0.7))
    experience = make_experience(make_models(), score_at="after_last", advantage=adaptive, whiten_advantages=False)
    assert experience.values is not None
    assert int((experience.reward_mask.sum(-1) > experience.action_mask.sum(-1)).sum()) >= 4  # one slot more
    for row, slots in enumerate(experience.reward_mask):
        rewards, values = (each[row][slots].tolist() for each in (experience.rewards, experience.values))
        gae_lambda = max(0.0, 1 - 1 / (0.7 * int(experience.action_mask[row].sum())))
        expected = advantages_by_definition(rewards, values, 1.0, gae_lambda)
        tokens = experience.action_mask[row][slots].tolist()
        expected = [each for each, counts in zip(expected, tokens, strict=True) if counts]
        assert experience.advantages[row][experience.action_mask[row]].tolist() == pytest.approx(expected, abs=1e-5)


def test_the_results_of_micro_batches_are_in_the_rollouts_order():
    models = make_models()
    for budget in (None, 1, 30):
        experience = make_experience(models, micro_batch_tokens=budget)
        with torch.no_grad():
            expected = response_logprobs(models.policy, experience.rollout, temperature=1.0)
        torch.testing.assert_close(experience.old_logprobs, expected, atol=1e-5, rtol=1e-5)


def test_positive_examples_score_enough_token_scores_included():
    models = make_models()
    plain = make_experience(models)
    assert plain.positive is None
    limit = float(torch.linspace(-1, 2, len(plain.scores))[5])
    scored = make_experience(models, positive_min_score=limit).positive
    assert scored is not None
    assert scored.tolist() == [False] * 5 + [True] * 3
    token_scores = torch.zeros_like(plain.rewards)
    token_scores[0, 0], token_scores[7, 0] = 10.0, -10.0
    experience = make_experience(models, positive_min_score=limit, token_scores=token_scores)
    assert experience.positive is not None
    assert experience.positive.tolist() == [True, *[False] * 4, True, True, False]
    assert describe_experience(experience)["reward/positive_share"] == 3 / 8


@pytest.mark.parametrize("is_exact", [False, True])
def test_the_old_logprobs_are_the_samplers_where_that_is_asked_for(is_exact):
    """To the bit: two forward passes differ in rounding."""
    models = make_models()
    trainers, samplers = (
        make_experience(models, old_from=each, reuse_sampled=is_exact) for each in ("trainer", "sampler")
    )
    mask, noted = samplers.action_mask, samplers.rollout.logprobs
    assert torch.equal(samplers.old_logprobs, noted)
    assert torch.equal(samplers.trainer_logprobs, trainers.old_logprobs)
    kl = 0.05 * (noted - samplers.ref_logprobs)[mask].sum()
    assert float((samplers.scores.sum() - samplers.rewards.sum()) - kl) == pytest.approx(0.0, abs=1e-4)

"""From a rollout to experience: what must hold at any temperature and under every option."""

import pytest
import torch

from tests.training.test_ppo_update import make_experience, make_models


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

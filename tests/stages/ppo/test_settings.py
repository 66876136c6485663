"""Coefficients and objective as configured, and their controllers against the published rules computed by hand."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from kedge.algorithm.advantages import GeneralizedAdvantage, LengthAdaptiveLambda, NStepAdvantage
from kedge.algorithm.critic import Bins
from kedge.config import config_from_settings
from kedge.config.schema.field import forms
from kedge.config.schema.ppo import PpoConfig
from kedge.stages.ppo.settings import PpoSettings, advantage_of, coefficients_of
from kedge_inspect.record import RunRecord
from kedge_inspect.resolved import critic_of, value_warmup_of, weighs_scores
from tests.training.test_update import make_experience, make_models, run_update


def configured(**settings):
    return config_from_settings("ppo", {"num_prompts": 64, "num_updates": 100, **settings})


def start(**settings):
    return coefficients_of(configured(**settings))


def adapt(coefficients, kl, **figures):
    metrics = {"objective/kl": kl, "policy/entropy": 1.0, "policy/approx_kl": 0.01, **figures}
    adapted = deepcopy(coefficients)
    adapted.adapt(metrics, num_responses=64)
    return adapted


def objective(experience, **settings):
    return PpoSettings.of(configured(**settings), exact=True).objective(experience, start(**settings))


def test_a_fixed_coefficient_never_moves():
    coefficients = start()
    for _ in range(30):
        coefficients = adapt(coefficients, 100.0)
    assert coefficients.kl_coef == 0.05


def test_zieglers_controller_by_hand():
    coefficients = start(kl_controller={"ziegler": {"horizon": 128, "target": 8, "wait": 0}})
    # n/horizon = ½. The error is clipped at ±0.2, and a KL below 0 counts as 0.
    coefficients = adapt(coefficients, 24.0)
    assert coefficients.kl_coef == pytest.approx(0.05 * 1.1)
    coefficients = adapt(coefficients, -1.0)
    assert coefficients.kl_coef == pytest.approx(0.05 * 1.1 * 0.9)
    coefficients = adapt(coefficients, 8.8)
    assert coefficients.kl_coef == pytest.approx(0.05 * 1.1 * 0.9 * 1.05)


def test_the_automatic_horizon_is_a_thirtieth_of_the_run_and_never_over_zieglers():
    assert start(kl_controller="ziegler").controllers.kl_horizon == 100 * 64 // 30
    assert start(kl_controller="ziegler", num_updates=10**6).controllers.kl_horizon == 10_000
    assert start(kl_controller={"ziegler": 77}).controllers.kl_horizon == 77


def test_the_controller_sleeps_through_the_first_part_of_the_run():
    coefficients = start(kl_controller={"schulman": {"wait": 0.2}}, num_updates=10)
    seen = []
    for _ in range(4):
        coefficients = adapt(coefficients, 0.0)
        seen.append(coefficients.kl_coef)
    assert seen == [0.05, 0.05, 0.025, 0.0125]


def test_wait_and_horizon_are_shares_of_the_updates_that_train_the_policy():
    settings = {"kl_controller": {"ziegler": {"wait": 0.1}}, "num_updates": 100}
    after_warmup = start(value_warmup_updates=40, **settings).controllers
    assert (after_warmup.kl_wait_updates, after_warmup.kl_horizon) == (pytest.approx(6.0), 60 * 64 // 30)
    assert start(**settings).controllers.kl_wait_updates == pytest.approx(10.0)


def test_the_surrogates_own_penalty_follows_the_ppo_papers_rule():
    coefficients = start(policy_loss="kl_penalty_adaptive")
    assert adapt(coefficients, 0.0, **{"policy/distance_moved": 0.02}).surrogate_kl_coef == 2.0
    assert adapt(coefficients, 0.0, **{"policy/distance_moved": 0.005}).surrogate_kl_coef == 0.5
    assert adapt(coefficients, 0.0, **{"policy/distance_moved": 0.012}).surrogate_kl_coef == 1.0
    assert coefficients.metrics()["policy/surrogate_kl_coef"] == coefficients.surrogate_kl_coef
    assert "policy/surrogate_kl_coef" not in start(policy_loss="kl_penalty_fixed").metrics()


def test_the_kl_coefficient_is_paid_in_one_place_only():
    experience = make_experience(make_models())
    for where, expected in (("reward", (0.05, 0.0)), ("loss", (0.0, 0.05))):
        in_reward = PpoSettings.of(configured(kl_in=where), exact=True).reward_kl_coef(start())
        assert (in_reward, objective(experience, kl_in=where).kl_coef) == expected


def test_the_unit_of_the_value_loss_is_the_spread_of_the_counted_returns():
    experience = make_experience(make_models())
    counted = experience.returns[experience.reward_mask].tolist()
    mean = sum(counted) / len(counted)
    spread = (sum((x - mean) ** 2 for x in counted) / len(counted)) ** 0.5
    mean_everywhere = replace(experience, values=torch.full_like(experience.returns, mean))
    shifted = replace(experience, values=torch.full_like(experience.returns, mean + 3 * spread))
    assert objective(mean_everywhere).value_unit == pytest.approx(spread, rel=1e-5)
    assert objective(shifted).value_unit == pytest.approx(10**0.5 * spread, rel=1e-5)  # the RMS error is larger
    assert objective(shifted, value_unit="score").value_unit == 1.0


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_returns_that_hardly_differ_do_not_multiply_the_value_loss(critic):
    models = make_models(critic)
    experience = make_experience(models)
    mask = experience.reward_mask
    noise = 1e-6 * torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    constant = replace(experience, returns=torch.where(mask, 3.0 + noise, 0.0))
    assert experience.values is not None
    errors = [3.0 - value for value in experience.values[mask].tolist()]
    rms = (sum(error**2 for error in errors) / len(errors)) ** 0.5
    chosen = objective(constant)
    assert chosen.value_unit == pytest.approx(rms, rel=1e-4)  # the noise changes the seventh digit
    # The first step sees the critic as it was: ½ (rms / unit)². With no such floor it was 5 million.
    result = run_update(models, constant, chosen, num_epochs=1, num_minibatches=1)
    assert result.metrics()["value/loss"] == pytest.approx(0.5, rel=1e-3)  # the update computes in float32


def test_mse_is_twice_half_mse():
    experience = make_experience(make_models())
    assert objective(experience, value_loss="mse", value_coef=0.5).value_coef == 1.0


def test_bins_belong_to_the_histogram():
    experience = make_experience(make_models())
    assert objective(experience).value_bins is None
    histogram = objective(experience, value_loss={"hl_gauss": [-1, 3, 8]})
    assert (histogram.value_bins, histogram.value_coef) == (Bins(-1.0, 3.0, 8), 0.1)


@pytest.mark.parametrize("advantage", get_args(forms(get_args(PpoConfig.model_fields["advantage"].annotation)[0])[0]))
def test_what_auto_stands_for_is_the_same_wherever_it_is_resolved(advantage):
    config = configured(advantage=advantage, num_responses=2, kl_in="loss")  # GRPO takes no KL in the reward
    estimator = advantage_of(config)
    assert config.ppo.needs_values == (estimator.needs == "values")
    assert config.ppo.resolved_critic == ("shared" if estimator.needs == "values" else "none")
    record = RunRecord(Path("runs/ppo"), config=config.model_dump(mode="json"))
    assert critic_of(record) == config.ppo.resolved_critic
    assert weighs_scores(record) == (not config.ppo.whitens_advantages and advantage not in ("grpo", "gigpo"))


def test_a_record_tells_the_last_update_of_a_warm_up_that_ended_by_its_result():
    def record(rows, **settings):
        config = configured(num_updates=9, value_warmup_updates=5, **settings).model_dump(mode="json")
        return RunRecord(Path("runs/ppo"), config=config, metrics=rows)

    rows = [{"update": update, "value/warmup": float(update <= 2)} for update in (1, 2, 4)]
    assert value_warmup_of(record(rows, **{"ppo.value_warmup_updates.until": 0.3})) == 2
    assert value_warmup_of(record(rows)) == 5
    assert value_warmup_of(record([], **{"ppo.value_warmup_updates.until": 0.3})) == 0


def test_the_lambdas_of_advantages_and_targets():
    vapo = {"gae_lambda": {"length_adaptive": 0.2}, "value_gae_lambda": 1.0}
    assert advantage_of(configured(**vapo)) == GeneralizedAdvantage(1.0, LengthAdaptiveLambda(0.2), 1.0)
    assert advantage_of(configured()) == GeneralizedAdvantage(1.0, 1.0)
    by_name = {name: advantage_of(configured(advantage=name, value_gae_lambda=0.5)) for name in ("td", "n_step")}
    assert by_name == {"td": GeneralizedAdvantage(1.0, 0.0, 0.5), "n_step": NStepAdvantage(1.0, 5, 0.5)}

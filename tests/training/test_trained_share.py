"""Steps on a random share of the responses: the mean over all choices is the whole step, in float64."""

import copy
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
import torch

from kedge.algorithm.advantages import TotalReward
from kedge.algorithm.policy_losses import clipped_policy_loss
from kedge.training import update as training_update
from kedge.training.update import random_rows
from tests.float64 import in_float64
from tests.training.test_update import GAE, collected, make_experience, make_learner, make_models, make_objective
from tests.training.test_update import run_update as run_update_of

ROWS, CHOSEN = 5, 2
OBJECTIVES = {
    "token": ("shared", make_objective(entropy_coef=0.1)),
    "separate": ("separate", make_objective(aggregation="sequence", kl_coef=0.2)),
    "GSPO": (
        None,
        make_objective(
            surrogate=partial(clipped_policy_loss, clip_range=3e-3), ratio="sequence", aggregation="sequence"
        ),
    ),
    "constant": (None, make_objective(aggregation="constant", constant_length=10, positive_nll_coef=0.3)),
    "whitened": ("shared", make_objective(whitens_minibatches=True)),
    "critic": ("shared", make_objective(train_policy=False)),
}


def seeded():
    return torch.Generator().manual_seed(0)


def run_update(models, experience, objective, **settings):
    """Take one step, and return the result and the gradient, which has not been clipped."""
    models = copy.deepcopy(models)
    given = {"learning_rate": 0.0, "num_minibatches": 1, "max_grad_norm": None, **settings}
    result = run_update_of(models, experience, objective, **given)
    found = [torch.zeros_like(each) if each.grad is None else each.grad for each in models.parameters()]
    return result, torch.cat([each.flatten() for each in found])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_mean_over_all_choices_is_the_whole_step(name, monkeypatch):
    critic, objective = OBJECTIVES[name]
    models = make_models(critic)
    advantage = GAE if critic else TotalReward(gamma=1.0)
    found = make_experience(models, advantage=advantage).select(slice(0, ROWS))
    tables = {name: getattr(found, name) for name in ("ref_logprobs", "advantages", "returns", "values")}
    # The policy has moved, so that ratios differ from 1 and some are clipped.
    old_logprobs = found.old_logprobs.double() + 0.2 * torch.randn(found.old_logprobs.shape, generator=seeded())
    experience = replace(
        found,
        **{name: table if table is None else table.double() for name, table in tables.items()},
        old_logprobs=old_logprobs,
        positive=torch.tensor([True, False, True, True, False]),
    )
    in_float64(models, monkeypatch)
    whole, gradient = run_update(models, experience, objective, num_epochs=1)
    assert gradient.abs().sum() > 0
    assert "policy/trained_share" not in whole.metrics()
    results, gradients = [], []
    for rows in combinations(range(ROWS), CHOSEN):
        monkeypatch.setattr(training_update, "random_rows", lambda *_, rows=rows, **__: torch.tensor(rows))
        result, found = run_update(models, experience, objective, num_epochs=CHOSEN / ROWS)
        results.append(result)
        gradients.append(found)
        assert result.passes[0].logprobs.isnan().all(-1).tolist() == [row not in rows for row in range(ROWS)]
        assert result.metrics()["policy/trained_share"] == CHOSEN / ROWS
    stacked = torch.stack(gradients)
    torch.testing.assert_close(stacked.mean(0), gradient, rtol=0, atol=1e-12)
    for metric, reduce in whole.reductions.items():
        values = [result.steps[0][metric] for result in results]
        mean = sum(values) / len(values)
        expected = whole.steps[0][metric]
        if reduce == "mean":
            assert mean == pytest.approx(expected, abs=1e-12), metric
        else:
            assert {"max": max, "min": min}[reduce](values) == pytest.approx(expected, abs=1e-12), metric
    # Sampling without replacement: (1 − f)/n·S², of n of N terms N·g.
    rows = []
    for row in range(ROWS):
        monkeypatch.setattr(training_update, "random_rows", lambda *_, row=row, **__: torch.tensor([row]))
        rows.append(run_update(models, experience, objective, num_epochs=1 / ROWS)[1])
    terms = torch.stack(rows)
    spread = (terms - terms.mean(0)).square().sum() / (ROWS - 1)
    variance = (stacked - gradient).square().sum(-1).mean()
    assert variance == pytest.approx(float((1 - CHOSEN / ROWS) / CHOSEN * spread), rel=1e-9)


def test_every_choice_is_as_likely():
    generator = torch.Generator().manual_seed(0)
    drawn = [tuple(random_rows(4, share=0.5, generator=generator).tolist()) for _ in range(6000)]
    counts = Counter(drawn)
    assert set(counts) == set(combinations(range(4), 2))
    assert all(abs(count - 1000) < 120 for count in counts.values())  # 4 standard deviations
    assert random_rows(4, share=0.01, generator=generator).numel() == 1


def test_each_minibatch_is_trained_on_in_part():
    models = make_models()
    experience = make_experience(models)
    result = run_update_of(models, experience, num_epochs=0.5, num_minibatches=2, num_critic_epochs=2)
    assert (result.num_steps, len(result.critic_steps), len(result.passes)) == (2, 2, 1)
    assert int(result.passes[0].visited.sum()) == 4
    assert result.passes[0].logprobs.isnan().all(-1).sum() == 4


def test_the_trained_share_is_that_of_all_minibatches():
    models = make_models()
    experience = make_experience(models).select(slice(0, ROWS))
    # Of minibatches of 3 and 2 responses, 2 and 1 are trained on.
    result = run_update_of(models, experience, num_epochs=0.5, num_minibatches=2)
    assert int(result.passes[0].visited.sum()) == 3
    assert result.metrics()["policy/trained_share"] == 3 / 5


@pytest.mark.parametrize("critic", ["shared", "separate", None])
def test_the_first_pass_over_the_chosen_rows_is_reused(critic):
    models = make_models(critic)
    advantage = GAE if critic else TotalReward(gamma=1.0)
    rollout, scores = make_experience(models, advantage=advantage).rollout, torch.linspace(-1, 2, 8)
    found = []
    for ahead in (True, False):
        trained = copy.deepcopy(models)
        choose = partial(random_rows, share=0.4, generator=torch.Generator().manual_seed(0))
        learner = make_learner(trained, one_minibatch=True, choose=choose)
        first_pass = learner.first_pass(rollout) if ahead else None
        collecting = {"temperature": 1.0, "kl_coef": 0.0, "advantage": advantage}
        experience = collected(rollout, scores, trained, None, first_pass=first_pass, **collecting)
        result = run_update_of(
            trained, experience, learner=learner, num_epochs=0.4, num_minibatches=1, max_grad_norm=None
        )
        assert learner.reused_first_pass == ahead
        assert int(result.passes[0].visited.sum()) == 3
        gradient = torch.cat([each.grad.flatten() for each in trained.parameters() if each.grad is not None])
        found.append((experience, result.metrics(), gradient))
    (experience, figures, gradient), (expected_experience, expected_figures, expected) = found
    assert figures == pytest.approx(expected_figures, abs=1e-5)
    for name in ("old_logprobs", "values", "advantages"):
        torch.testing.assert_close(getattr(experience, name), getattr(expected_experience, name), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)

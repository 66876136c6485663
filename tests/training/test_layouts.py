"""A PPO step has the same metrics and gradients for every layout and split as row by row without padding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import pad

from kedge.algorithm.experience import Experience, PolicyOutputs
from kedge.models import ActorCritic, language
from kedge.models.packing.trunk import Trunk
from kedge.training.objective import Objective
from kedge.training.update import MetricTotals
from tests.tiny import FAMILIES
from tests.training.test_update import gradients, make_experience, make_models, make_objective, run_update

OBJECTIVES = {
    "shared": make_objective(entropy_coef=0.1),
    "separate": make_objective(aggregation="sequence", kl_coef=0.2),
}


def say(models: ActorCritic, experience: Experience, row: int) -> list[torch.Tensor]:
    """Log probabilities, entropies and values of one response, from transformers' own pass over the row alone."""
    rollout = experience.rollout
    prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]
    response = rollout.response_ids[row][rollout.action_mask[row]]
    passed = models.policy.causal(input_ids=torch.cat([prompt, response])[None], output_hidden_states=True)
    slots = slice(len(prompt) - 1, len(prompt) - 1 + int(experience.reward_mask[row].sum()))
    logits = passed.logits[0, slots][: len(response)].masked_fill(models.policy.forbidden, -torch.inf)
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs.isneginf(), 0.0)).sum(-1)
    if models.critic is None:
        values = models.policy.value_head(passed.hidden_states[-1][0, slots]).squeeze(-1)
    else:
        classifier = models.critic.classifier
        states = classifier.base_model(input_ids=torch.cat([prompt, response])[None]).last_hidden_state
        values = classifier.score(states[0, slots]).squeeze(-1)
    return [logprobs.gather(-1, response[:, None]).squeeze(-1), entropy, values]


def row_by_row(models: ActorCritic, experience: Experience, objective: Objective):
    """The oracle: the loss of the minibatch from rows that never met."""
    models = copy.deepcopy(models)
    divisors, totals = objective.divisors(experience), MetricTotals()
    for row in range(experience.rollout.num_responses):
        width = experience.rollout.response_ids.shape[1]
        outputs = [pad(figures, (0, width - len(figures)))[None] for figures in say(models, experience, row)]
        terms = objective(PolicyOutputs(*outputs), experience.select(slice(row, row + 1)), divisors)
        terms.loss.backward()
        totals.add(terms.metrics)
    return totals.values(), [torch.zeros_like(p) if p.grad is None else p.grad for p in models.parameters()]


def moved_models(family: str, critic: str) -> tuple[ActorCritic, Experience, Objective]:
    """Models that have left the weights that sampled, so that no ratio is 1 and the clips bite."""
    models = make_models(critic, family)
    experience = make_experience(models, score_at="after_last" if critic == "separate" else "last")
    run_update(models, experience, num_epochs=1, learning_rate=5e-3, value_after_last=critic == "separate")
    return models, experience, OBJECTIVES[critic]


@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
def test_every_layout_gives_the_figures_and_gradients_of_the_rows_alone(family, critic, padded, monkeypatch):
    if padded:
        monkeypatch.setattr(Trunk, "packs", lambda self, longest: False)
    models, experience, objective = moved_models(family, critic)
    expected_figures, expected_gradients = row_by_row(models, experience, objective)
    assert 0 < expected_figures["policy/clip_fraction"] < 1
    for budget, max_logits in ((None, 2**24), (30, 2**24), (1, 2**24), (None, 900)):
        monkeypatch.setattr(language, "MAX_LOGITS", max_logits)
        settings = {"num_epochs": 1, "num_minibatches": 1, "learning_rate": 0.0, "micro_batch_tokens": budget}
        settings["value_after_last"] = critic == "separate"
        trained = copy.deepcopy(models)
        (figures,) = run_update(trained, experience, objective, max_grad_norm=None, **settings).steps
        figures.pop("policy/grad_norm")
        assert figures == pytest.approx(expected_figures, abs=1e-5, rel=1e-5)
        for weight, expected in zip(trained.parameters(), expected_gradients, strict=True):
            actual = torch.zeros_like(weight) if weight.grad is None else weight.grad
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_activations_that_are_computed_again_change_no_gradient(critic):
    models, experience, objective = moved_models("llama", critic)
    after_last = critic == "separate"
    plain = gradients(models, experience, objective, 40, value_after_last=after_last)
    models.checkpoint_activations()
    again = gradients(models, experience, objective, 40, value_after_last=after_last)
    for actual, expected in zip(again, plain, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)

"""Finds the cause of non-finite values: the first one in order of computation, its row and token, or the weight."""

from dataclasses import replace

import pytest
import torch

from kedge.models import ActorCritic
from kedge.training.guard import (
    BadValue,
    find_bad_weight,
    find_in_experience,
    find_in_rollout,
)
from kedge.training.optimizer import build_optimizer, set_learning_rate
from kedge.training.update import PpoUpdate, search_minibatch
from tests.training.test_update import make_experience, make_learner, make_models, make_objective


def broken(tensor, row, token, value=torch.nan):
    tensor = tensor.clone()
    tensor[row, token] = value
    return tensor


def test_figures_that_are_finite_have_no_offender():
    experience = make_experience(make_models())
    assert find_in_rollout(experience.rollout) is None
    assert find_in_experience(experience) is None


def test_what_is_padded_does_not_matter():
    experience = make_experience(make_models())
    row, token = [place[0].item() for place in (~experience.action_mask).nonzero(as_tuple=True)]
    hidden = replace(experience, values=broken(experience.values, row, token))
    assert find_in_experience(hidden) is None
    rollout = replace(experience.rollout, logprobs=broken(experience.rollout.logprobs, row, token, torch.inf))
    assert find_in_rollout(rollout) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("old_logprobs", "the policy's log probability"),
        ("ref_logprobs", "the reference's log probability"),
        ("values", "the critic's value"),
        ("rewards", "the reward"),
        ("advantages", "the advantage"),
        ("returns", "the return"),
    ],
)
def test_the_figure_its_token_and_its_response_are_named(name, words):
    experience = make_experience(make_models())
    found = find_in_experience(replace(experience, **{name: broken(getattr(experience, name), 3, 1, -torch.inf)}))
    assert found == BadValue(words, -torch.inf, row=3, token=1)
    assert str(found) == f"{words} at token 1 of response 3 is -inf"


def test_of_several_figures_the_cause_is_named():
    experience = make_experience(make_models())
    spread = torch.full_like(experience.returns, torch.nan)
    found = find_in_experience(
        replace(experience, values=broken(experience.values, 2, 0), returns=spread, advantages=spread, rewards=spread)
    )
    assert str(found) == "the critic's value at token 0 of response 2 is nan"
    scores = experience.scores.clone()
    scores[4] = torch.inf
    assert str(find_in_experience(replace(experience, scores=scores))) == "the score of response 4 is inf"


def test_the_sampler_is_to_blame_for_its_own_figures():
    rollout = make_experience(make_models()).rollout
    found = find_in_rollout(replace(rollout, logprobs=broken(rollout.logprobs, 0, 2)))
    assert str(found) == "the sampler's log probability at token 2 of response 0 is nan"
    assert "the sampler's value" in str(find_in_rollout(replace(rollout, values=broken(rollout.values, 0, 2))))


def test_a_dead_weight_is_named_with_its_owner():
    models = make_models("separate")
    assert find_bad_weight({"policy and critic": models}) is None
    with torch.no_grad():
        next(models.critic.parameters())[5, 3] = torch.inf
    words = find_bad_weight({"the reference": make_models(), "policy and critic": models})
    assert words.startswith("policy and critic: critic.")
    assert words.endswith(" contains inf")


def search(models, experience):
    numbers = range(len(experience.scores))
    learner, weights = make_learner(models), list(models.parameters())
    return search_minibatch(learner, make_objective(), experience, numbers, weights, lambda: None)


def test_a_log_probability_that_is_nan_is_found_again(monkeypatch):
    models = make_models()
    experience = make_experience(models)
    guilty, forward = experience.rollout.response_ids[6], ActorCritic.forward

    def spoilt(self, rollout, **settings):
        outputs = forward(self, rollout, **settings)
        rows = (rollout.response_ids == guilty).all(-1).nonzero().flatten().tolist()
        logprobs = outputs.logprobs.clone()
        logprobs[rows, 4] = torch.nan
        return replace(outputs, logprobs=logprobs)

    monkeypatch.setattr(ActorCritic, "forward", spoilt)
    assert str(search(models, experience)) == "the policy's log probability at token 4 of response 6 is nan"


def test_the_response_with_a_gradient_that_is_not_finite_is_found_among_the_others():
    models = make_models()
    experience = make_experience(models)
    huge = broken(experience.advantages, 5, 0, 3e38)  # a finite loss, whose gradient's norm is too large for float32
    found = search(models, replace(experience, advantages=huge))
    assert (found.what, found.row) == ("the gradient norm", 5)
    assert found.value == torch.inf


def test_else_it_is_the_one_whose_gradient_is_the_largest():
    models = make_models()
    experience = make_experience(models)
    found = search(models, replace(experience, advantages=broken(experience.advantages, 2, 1, 1e4)))
    assert (found.what, found.row) == ("the gradient norm", 2)
    assert 10 < found.value < 1e5


def test_the_value_heads_gradient_counts_in_its_unit():
    models = make_models()
    optimizer = build_optimizer(models.parameters(), learning_rate=1.0, head_parameters=models.value_head.parameters())
    experience = make_experience(models)
    far = broken(experience.returns, 3, 0, 50.0)
    pushed = broken(experience.advantages, 2, 1, 400.0)
    asked: list[BadValue] = []
    for unit in (1.0, 1e3):
        set_learning_rate(optimizer, 1.0, value_unit=unit)
        PpoUpdate(
            make_learner(models),
            optimizer,
            replace(experience, returns=far, advantages=pushed),
            make_objective(),
            num_epochs=1,
            num_minibatches=1,
            max_grad_norm=None,
            generator=torch.Generator().manual_seed(0),
            check_step=lambda step, figures, search: bool(asked.append(search())),  # refuses the step
        ).run()
    assert [bad.row for bad in asked] == [2, 3]


def test_where_all_are_broken_none_is_blamed():
    models = make_models()
    experience = make_experience(models)
    everywhere = torch.full_like(experience.advantages, 3e38)
    found = search(models, replace(experience, advantages=everywhere))
    assert str(found) in ("the loss of each response is inf", "the loss of each response is -inf")

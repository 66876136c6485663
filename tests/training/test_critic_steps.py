"""How the critic is trained beside the policy: its own learning rate and gradient norm."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from kedge.models import ActorCritic
from kedge.training.optimizer import build_optimizer, parameters_of, set_learning_rate
from kedge.training.update import PpoUpdate, UpdateResult
from tests.training.test_update import make_experience, make_learner, make_models, make_objective


def optimizer_of(models: ActorCritic, learning_rate: float = 1e-2) -> torch.optim.Optimizer:
    critic = () if models.critic is None else models.critic.parameters()
    return build_optimizer(models.parameters(), learning_rate=learning_rate, critic_parameters=critic)


def trained(models: ActorCritic, objective: Any = None, **settings: Any) -> tuple[ActorCritic, UpdateResult]:
    """A copy after one update on the same experience, and the update's result."""
    experience, models = make_experience(models), copy.deepcopy(models)
    rates = settings.pop("rates", {"learning_rate": 1e-2})
    optimizer = optimizer_of(models)
    set_learning_rate(optimizer, **rates)
    sizes = {"num_epochs": 2, "num_minibatches": 2, "max_grad_norm": 1.0, **settings}
    objective, generator = objective or make_objective(), torch.Generator().manual_seed(0)
    result = PpoUpdate(make_learner(models), optimizer, experience, objective, generator=generator, **sizes).run()
    return models, result


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_separate_critics_gradient_does_not_shrink_the_policys_step():
    models = make_models("separate")
    calm, _ = trained(models, make_objective(value_coef=1e-6))
    wild, result = trained(models, make_objective(value_coef=1e6))
    assert result.steps[0]["value/grad_norm"] > 1e3 > result.steps[0]["policy/grad_norm"]
    assert same(calm.policy, wild.policy)
    assert calm.critic is not None
    assert wild.critic is not None
    assert not same(calm.critic, wild.critic)


@pytest.mark.parametrize(("critic", "names"), [("shared", {"policy"}), ("separate", {"policy", "value"})])
def test_there_is_a_norm_for_each_model_that_is_trained(critic: str, names: set[str]):
    _, result = trained(make_models(critic))
    assert {name.split("/")[0] for name in result.metrics() if name.endswith("grad_norm")} == names


def test_a_separate_critic_can_have_a_learning_rate_of_its_own():
    models = make_models("separate")
    kept, _ = trained(models, rates={"learning_rate": 1e-2, "critic": 0.0})
    other, _ = trained(models, rates={"learning_rate": 1e-2, "critic": 1e-2})
    both, _ = trained(models)
    assert kept.critic is not None
    assert models.critic is not None
    assert same(kept.critic, models.critic)
    assert same(kept.policy, other.policy)
    assert same(other, both)


def test_the_groups_of_a_critic_with_a_new_head_are_all_its_own():
    policy, trunk, head = nn.Linear(2, 3), nn.Linear(4, 5), nn.Linear(5, 1, bias=False)
    critic = [*trunk.parameters(), *head.parameters()]
    optimizer = build_optimizer(
        [*policy.parameters(), *critic],
        learning_rate=1.0,
        critic_parameters=iter(critic),
        head_parameters=head.parameters(),
        head_rate=10.0,
    )
    set_learning_rate(optimizer, 0.5, critic=0.01)
    rates = {id(each): group["lr"] for group in optimizer.param_groups for each in group["params"]}
    assert [rates[id(each)] for each in policy.parameters()] == [0.5, 0.5]
    assert [rates[id(each)] for each in critic] == pytest.approx([0.01, 0.01, 0.1])
    assert {id(each) for each in parameters_of(optimizer, critic=True)} == {id(each) for each in critic}
    assert len(parameters_of(optimizer, critic=False)) == 2


def only(outputs: nn.Module, name: str) -> dict[str, torch.Tensor]:
    return {key: each.detach() for key, each in outputs.named_parameters() if key.startswith(name)}


@pytest.mark.parametrize(("critic", "own"), [("shared", "policy.value_head"), ("separate", "critic")])
def test_extra_passes_train_the_critics_own_parameters_alone(critic: str, own: str):
    models = make_models(critic)
    epochs = 1 if critic == "shared" else 2  # a separate critic never changes the policy, a shared one with its trunk
    settings: dict[str, Any] = {"num_epochs": epochs, "critic_generator": torch.Generator().manual_seed(1)}
    once, _ = trained(models, **settings)
    thrice, result = trained(models, num_critic_epochs=3, **settings)
    assert len(result.critic_steps) == 2 * 2 * epochs
    assert same(once.policy.causal, thrice.policy.causal)
    moved = [not torch.equal(each, only(once, own)[name]) for name, each in only(thrice, own).items()]
    assert moved
    assert all(moved)
    assert result.metrics()["value/extra_steps"] == 4 * epochs
    assert result.num_steps == 2 * epochs


def test_passes_of_the_critic_are_those_of_its_warm_up():
    models, objective = make_models("separate"), make_objective(train_policy=False)
    warm, alone = (copy.deepcopy(models) for _ in range(2))
    kinds: list[dict[str, Any]] = [{"num_epochs": 3}, {"num_epochs": 1, "num_critic_epochs": 3}]
    for copied, settings in zip((warm, alone), kinds, strict=True):
        learner, experience = make_learner(copied), make_experience(models)
        with learner.frozen_policy():
            PpoUpdate(
                learner, optimizer_of(copied), experience, objective, num_minibatches=1, max_grad_norm=1.0,
                generator=torch.Generator(), **settings,
            ).run()  # fmt: skip
    assert same(warm, alone)
    assert not same(warm, models)


def test_a_shared_trunk_is_read_without_a_graph():
    models = make_models()
    experience = make_experience(models)
    learner = make_learner(models, value_after_last=True)
    values = learner.evaluate_critic(experience).values
    together = learner.evaluate(experience).values
    assert together is not None
    assert torch.equal(values, together)
    values.sum().backward()
    reached = {name.rpartition(".")[0] for name, each in models.named_parameters() if each.grad is not None}
    assert reached == {"policy.value_head"}


@pytest.mark.parametrize("where", ["trunk", "head"])
def test_a_value_gradient_that_ends_at_the_head_does_not_change_the_policy(where: Any):
    models = make_models()
    models.value_gradient = where
    assert len(list(models.separable_parameters())) == (0 if where == "trunk" else 2)
    weights = []
    for coef in (1e-3, 1e3):
        copied = copy.deepcopy(models)
        optimizer = build_optimizer(
            copied.parameters(), learning_rate=1e-2, critic_parameters=copied.separable_parameters()
        )
        settings: dict[str, Any] = {"num_epochs": 1, "num_minibatches": 2, "max_grad_norm": 1.0}
        objective, generator = make_objective(value_coef=coef), torch.Generator().manual_seed(0)
        PpoUpdate(
            make_learner(copied), optimizer, make_experience(models), objective, generator=generator, **settings
        ).run()
        weights.append(copied.policy.causal)
    assert same(*weights) == (where == "head")


def test_a_stop_of_the_policy_is_none_of_a_separate_critic():
    models = make_models("separate")
    passes: dict[str, Any] = {"num_critic_epochs": 2}
    settings = [{"critic_generator": torch.Generator().manual_seed(1), **passes} for _ in range(2)]
    free, whole = trained(models, **settings[0])
    stopped, result = trained(models, early_stop_kl=1e-9, **settings[1])
    assert (result.stopped_early, result.refused) == (True, False)
    assert (whole.num_steps, len(whole.critic_steps)) == (4, 4)
    assert (result.num_steps, len(result.critic_steps)) == (1, 7)  # in all as many steps of the critic
    # The first gradient that is not used is computed all the same.
    assert (whole.num_gradients, whole.num_critic_gradients) == (4, 4)
    assert (result.num_gradients, result.num_critic_gradients) == (2, 7)
    assert free.critic is not None
    assert stopped.critic is not None
    assert same(free.critic, stopped.critic)
    assert not same(free.policy, stopped.policy)


def test_the_numbers_of_refused_steps_count_the_steps_taken():
    # Steps 2 and 3 train the critic alone; after a stop at the second step, so do all that follow.
    cases: list[dict[str, Any]] = [{"num_critic_epochs": 2}, {"early_stop_kl": 1e-9}]
    for settings in cases:
        seen: list[int] = []
        noted: list[Any] = []
        settings |= {"check_step": lambda step, *_, seen=seen: seen.append(step) or True, "on_step": noted.append}
        _, result = trained(make_models(), **settings)
        taken = result.num_steps + len(result.critic_steps)
        assert sorted({*seen}) == list(range(taken))
        assert len(seen) == taken + result.stopped_early  # the step that exceeds the limit is not taken
        assert len(noted) == taken


def test_after_a_stop_of_the_policy_a_shared_head_is_trained_without_the_trunk():
    models = make_models("shared")
    stopped, result = trained(models, early_stop_kl=1e-9)
    once, _ = trained(models, num_epochs=1, check_step=lambda step, *_: step < 1)
    assert (result.num_steps, len(result.critic_steps)) == (1, 3)
    assert same(stopped.policy.causal, once.policy.causal)
    assert not same(stopped.policy, once.policy)


def test_a_step_of_the_critic_can_be_refused():
    models = make_models("separate")
    seen: list[int] = []

    def refuse(step: int, figures: Any, search: Any) -> bool:
        seen.append(step)
        assert ("policy/loss" in figures) == (step < 2)
        return step < 3

    _, result = trained(models, num_critic_epochs=4, check_step=refuse)
    assert seen == [0, 1, 2, 3]
    assert (result.refused, result.num_steps, len(result.critic_steps)) == (True, 2, 1)
    assert (result.num_gradients, result.num_critic_gradients) == (2, 2)

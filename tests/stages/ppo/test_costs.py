"""The cost of an update, against torch's own FLOP counter and sizes counted by hand."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kedge.algorithm.experience import Rollout
from kedge.models import ActorCritic, AdapterSettings, load_language_model, load_scalar_model, load_tokenizer
from kedge.stages.ppo import run_ppo
from kedge.stages.ppo.log import Costs, ForwardCost
from tests.stages.ppo.test_ppo import PROMPTS, configure, vowels
from tests.tiny import save_tiny_policy


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def policy(request, tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy", request.param)


def make_rollout(*, num_rows=4, num_prompt=6, num_response=5):
    ids = torch.arange(20, 20 + num_rows * (num_prompt + num_response)).reshape(num_rows, -1)
    return Rollout(
        prompt_ids=ids[:, :num_prompt],
        prompt_mask=torch.ones(num_rows, num_prompt, dtype=torch.bool),
        response_ids=ids[:, num_prompt:],
        token_mask=torch.ones(num_rows, num_response, dtype=torch.bool),
        action_mask=torch.ones(num_rows, num_response, dtype=torch.bool),
        logprobs=torch.zeros(num_rows, num_response),
        stopped=torch.ones(num_rows, dtype=torch.bool),
        group=torch.arange(num_rows),
        policy_version=torch.zeros(num_rows, dtype=torch.long),
    )


@pytest.mark.parametrize("adapter", [None, AdapterSettings(rank=4)], ids=["all weights", "adapter"])
@pytest.mark.parametrize("separate", [False, True])
def test_a_pass_and_its_gradient_are_what_torch_counts(policy, separate, adapter):
    tokenizer = load_tokenizer(policy)
    model = load_language_model(policy, tokenizer=tokenizer, value_head=not separate, adapter=adapter)
    critic = load_scalar_model(policy, tokenizer=tokenizer, init="fresh", adapter=adapter) if separate else None
    models, rollout = ActorCritic(model, critic), make_rollout(num_prompt=12, num_response=20)
    with FlopCounterMode(display=False) as counter:
        outputs = models(rollout, temperature=1.0)
        forward = counter.get_total_flops()
        (outputs.logprobs.sum() + outputs.values.sum()).backward()
    costs = Costs(ForwardCost.of(model), ForwardCost.of(critic), ForwardCost(), ())
    metrics = costs.metrics(rollout, models_read="all", num_passes=1, train_policy=True)
    # The last token of a row is not read, biases are not multiplied, and attention's own products are left out.
    assert metrics["flops/experience"] == pytest.approx(forward, rel=0.15)
    assert metrics["flops/train"] == pytest.approx(counter.get_total_flops(), rel=0.15)


@pytest.mark.parametrize("separate", [False, True])
def test_a_prompt_that_responses_share_costs_once(policy, separate):
    tokenizer = load_tokenizer(policy)
    model = load_language_model(policy, tokenizer=tokenizer, value_head=not separate)
    critic = load_scalar_model(policy, tokenizer=tokenizer, init="fresh") if separate else None
    models, rollout = ActorCritic(model, critic), make_rollout(num_prompt=40, num_response=20)
    rollout = replace(rollout, group=torch.zeros_like(rollout.group), prompt_ids=rollout.prompt_ids[:1].expand(4, -1))
    with FlopCounterMode(display=False) as counter:
        models(rollout, temperature=1.0)
    # Rows have 60 tokens: one reward model can share them, the other cannot.
    rewards = [ForwardCost(per_token=1, shares_up_to=60), ForwardCost(per_token=10, shares_up_to=59)]
    costs = Costs(ForwardCost.of(model), ForwardCost.of(critic), ForwardCost(), rewards)
    found = costs.metrics(rollout, models_read="all", num_passes=0, train_policy=True)
    assert found["flops/experience"] == pytest.approx(counter.get_total_flops(), rel=0.15)
    assert found["flops/reward"] == 2 * (40 + 4 * 20) + 2 * 10 * 4 * (40 + 20)


@pytest.mark.parametrize("separate", [False, True])
def test_a_pass_of_the_critic_alone_is_what_torch_counts(policy, separate):
    tokenizer = load_tokenizer(policy)
    model = load_language_model(policy, tokenizer=tokenizer, value_head=not separate)
    critic = load_scalar_model(policy, tokenizer=tokenizer, init="fresh") if separate else None
    models, rollout = ActorCritic(model, critic), make_rollout(num_prompt=12, num_response=20)
    with FlopCounterMode(display=False) as counter:
        models.critic_outputs(rollout).values.sum().backward()
    costs = Costs(ForwardCost.of(model), ForwardCost.of(critic), ForwardCost(), ())
    found = costs.metrics(rollout, models_read="nothing", num_passes=0, train_policy=True, num_critic_passes=1)
    # As above; a few per cent each.
    assert found["flops/train"] == pytest.approx(counter.get_total_flops(), rel=0.15)


def test_an_update_in_steps_of_fine_tuning():
    policy, rollout = ForwardCost(per_token=100, per_action=10), make_rollout()
    forward = 2 * (100 * 44 + 10 * 20)
    costs = Costs(policy, ForwardCost(), policy, [ForwardCost(per_token=50)])
    metrics = costs.metrics(rollout, models_read="nothing", num_passes=4, train_policy=True)
    assert metrics == {
        "flops/rollout": forward,
        "flops/reward": 2 * 50 * 44,
        "flops/experience": forward,
        "flops/train": 12 * forward,
        "cost/sft_steps": pytest.approx((14 * forward + 4400) / (3 * forward)),
    }
    # Two passes of the critic alone: forward through the trunk, or forward and backward through a model of its own.
    settings = {"models_read": "nothing", "num_passes": 4, "train_policy": True, "num_critic_passes": 2}
    assert costs.metrics(rollout, **settings)["flops/train"] == 12 * forward + 2 * 2 * 100 * 44
    separate = Costs(policy, ForwardCost(per_token=70), policy, ())
    assert separate.metrics(rollout, **settings)["flops/train"] == 12 * forward + (12 + 6) * 2 * 70 * 44
    # Its values alone, where sampling noted the log probabilities; a reading after the epochs is of both models.
    again = separate.metrics(rollout, **{**settings, "models_read": "critic", "num_readings": 1})
    assert again["flops/experience"] == forward + 2 * 70 * 44
    assert again["flops/train"] == 13 * forward + (12 + 6 + 1) * 2 * 70 * 44
    warm_up = costs.metrics(rollout, models_read="all", num_passes=2, train_policy=False)
    assert (warm_up["flops/experience"], warm_up["flops/train"]) == (2 * forward, 2 * forward)
    again = Costs(policy, ForwardCost(), policy, (), recomputes=True)
    assert again.metrics(rollout, models_read="nothing", num_passes=1, train_policy=True)["flops/train"] == 4 * forward


def test_the_roles_of_a_run_are_written_down(tmp_path, policy):
    run_ppo(configure(policy, tmp_path / "run", critic="separate", num_updates=1), prompts=PROMPTS, reward=vowels)
    roles = json.loads((tmp_path / "run/roles.json").read_text())
    tokenizer = load_tokenizer(policy)
    parameters = sum(p.numel() for p in load_language_model(policy, tokenizer=tokenizer).parameters())
    assert roles["policy"] == {
        "parameters": parameters, "weights_bytes": 4 * parameters, "optimizer_bytes": 8 * parameters, "trained": True
    }  # fmt: skip
    assert roles["reference"] == {**roles["policy"], "optimizer_bytes": 0, "trained": False}
    assert set(roles) == {"policy", "critic", "reference"}


def test_a_base_that_roles_share_is_written_down_once(tmp_path, policy):
    config = configure(policy, tmp_path / "run", critic="separate", num_updates=1, adapter={"kind": "lora", "rank": 4})
    run_ppo(config, prompts=PROMPTS, reward=vowels)
    roles = json.loads((tmp_path / "run/roles.json").read_text())
    parameters = sum(p.numel() for p in load_language_model(policy, tokenizer=load_tokenizer(policy)).parameters())
    assert roles["base"] == {
        "parameters": parameters, "weights_bytes": 4 * parameters, "optimizer_bytes": 0, "trained": False
    }  # fmt: skip
    assert roles["reference"]["weights_bytes"] == 0
    for name in ("policy", "critic"):
        assert 0 < roles[name]["parameters"] < parameters
        assert roles[name]["optimizer_bytes"] == 2 * roles[name]["weights_bytes"]


@pytest.mark.parametrize("settings", [{}, {"preset": "grpo", "num_responses": 2}], ids=["ppo", "grpo"])
def test_an_update_runs_no_code_of_the_configuration(tmp_path, settings):
    """Settings are resolved once, before the first update."""
    called = set()

    def note(frame, event, _):
        if event == "call" and "/kedge/config/" in frame.f_code.co_filename:
            called.add(f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}")

    def watch(update):
        sys.setprofile(note if update.number == 2 else None)

    policy = save_tiny_policy(tmp_path / "policy")
    config = configure(policy, tmp_path / "run", num_updates=4, **settings)
    try:
        run_ppo(config, prompts=PROMPTS, reward=vowels, callback=watch)
    finally:
        sys.setprofile(None)
    assert not called

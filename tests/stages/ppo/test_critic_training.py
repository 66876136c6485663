"""The settings of the critic's training in a PPO run."""

import pytest

from kedge.stages.ppo import run_ppo
from kedge_base.run_folder.record_format import MEASURED
from tests.stages.ppo.test_ppo import PROMPTS, configure, vowels
from tests.tiny import save_tiny_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


def rows_of(policy, tmp_path, reward=vowels, **settings):
    return run_ppo(configure(policy, tmp_path / "run", **settings), prompts=PROMPTS, reward=reward).metrics


def of_the_prompt(prompts, completions):
    """What a critic learns at once."""
    return [len(prompt) / 10 for prompt in prompts]


def measured_apart(row):
    return {name: value for name, value in row.items() if not name.startswith(MEASURED)}


def test_a_separate_critics_rate_has_the_schedule_of_the_policys(tmp_path, policy):
    settings = {"critic": "separate", "critic_learning_rate": 4e-3, "learning_rate": 1e-3, "value_warmup_updates": 1}
    rows = rows_of(policy, tmp_path, num_updates=3, **settings)
    assert [row["policy/learning_rate"] for row in rows] == pytest.approx([1e-3, 1e-3, 5e-4])
    assert [row["value/learning_rate"] for row in rows] == pytest.approx([4e-3, 4e-3, 2e-3])
    # While it warms up only the critic has a gradient.
    assert ["policy/grad_norm" in row for row in rows] == [False, True, True]
    assert all(row["value/grad_norm"] > 0 for row in rows)


def test_more_passes_of_the_critic_leave_the_policys_training_as_it_is(tmp_path, policy):
    settings = {"critic": "separate", "num_updates": 1}
    [once] = rows_of(policy, tmp_path / "once", **settings)
    [twice] = rows_of(policy, tmp_path / "twice", num_critic_epochs=2, **settings)
    same = [name for name in once if name.startswith(("policy/", "objective/", "reward/"))]
    assert {name: once[name] for name in same} == {name: twice[name] for name in same}
    assert twice["value/extra_steps"] == twice["policy/optimizer_steps"] == 4
    assert twice["guard/skipped_steps"] == 0
    assert twice["cost/sft_steps"] > once["cost/sft_steps"]


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_frozen_attention_gets_no_updates_and_no_optimizer_state(tmp_path, policy, adapter):
    settings = {"critic": "frozen_attention", "adapter.kind": adapter, "learning_rate": 1e-2}
    seen = []

    def see(update, roles):
        named = dict(roles.actor_critic.critic.named_parameters())
        state = {name for name, each in named.items() if each in roles.optimizer.state}
        seen.append(({name: each.detach().clone() for name, each in named.items()}, state))

    config = configure(policy, tmp_path / "run", num_updates=2, **settings)
    run_ppo(config, prompts=PROMPTS, reward=vowels, on_update=see)
    (first, state), (second, _) = seen
    changed = {name for name in first if not first[name].equal(second[name])}
    assert changed == state
    assert any(".mlp." in name for name in changed)
    assert not any(".self_attn." in name for name in changed)


def test_a_warm_up_that_ends_by_its_result_is_one_of_that_length(tmp_path, policy, capsys):
    settings = {"num_updates": 5, "kl_controller": {"ziegler": {"target": 1.0, "wait": 0.5}}}
    settings |= {"on_spike": {"skip": 9.0}, "num_epochs": 4, "value_gae_lambda": 1.0}
    settings |= {"num_prompts": 16, "reward": of_the_prompt}
    known = rows_of(policy, tmp_path / "known", value_warmup_updates=2, **settings)
    first, second = (row["value/explained_variance"] for row in known[:2])
    assert 0 <= first < second  # else this test shows nothing
    settings |= {"value_warmup_updates": 4, "ppo.value_warmup_updates.until": (first + second) / 2}
    found = rows_of(policy, tmp_path / "found", **settings)
    assert [row["value/warmup"] for row in found] == [1, 1, 0, 0, 0]
    assert [measured_apart(row) for row in found] == [measured_apart(row) for row in known]
    said = capsys.readouterr()
    assert (said.out + said.err).count("The critic's warm-up ends after update 2: its values explain") == 2

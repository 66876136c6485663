"""`kedge ppo --preset NAME` with every algorithm of the family, on a tiny model."""

import pytest

from kedge.config.presets.family import FAMILY
from kedge.pipelines.ppo import run_ppo
from tests.pipelines.ppo.test_ppo import PROMPTS, configure, vowels
from tests.tiny import save_tiny_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.mark.parametrize("preset", FAMILY, ids=lambda preset: preset.name)
def test_a_preset_trains(tmp_path, policy, preset):
    warms_up = "ppo.value_warmup_updates" in preset.values
    small = {"num_prompts": 2, "num_minibatches": 2, "max_new_tokens": 4, "num_updates": 1 + warms_up}
    small |= {"num_epochs": 1, "constant_groups": "keep"} | ({"value_warmup_updates": 1} if warms_up else {})
    if "rollout.num_responses" in preset.values:
        small["num_responses"] = 2
    run = run_ppo(configure(policy, tmp_path / "run", preset=preset.name, **small), prompts=PROMPTS, reward=vowels)
    last = run.metrics[-1]
    assert last["policy/optimizer_steps"] == 2
    assert ("value/loss" in last) == ("ppo.critic" in preset.values)

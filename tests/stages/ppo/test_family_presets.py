"""`kedge ppo --preset NAME` with every algorithm of the family, on a tiny model."""

import pytest
import torch
from safetensors.torch import load_file

from kedge.config.presets import FAMILY
from kedge.stages.ppo import run_ppo
from tests.stages.ppo.test_ppo import PROMPTS, configure, vowels
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
    if preset.name == "distill":
        small["reference"] = str(save_tiny_policy(tmp_path / "teacher", seed=1))
    run = run_ppo(configure(policy, tmp_path / "run", preset=preset.name, **small), prompts=PROMPTS, reward=vowels)
    last = run.metrics[-1]
    assert last["policy/optimizer_steps"] == 2
    assert ("value/loss" in last) == (preset.name in ("vapo", "sao"))
    assert ("value/explained_variance" in last) == (preset.name in ("critic", "vapo", "sao"))


@pytest.mark.parametrize("settings", [{}, {"kl_in": "score"}])
def test_scores_that_are_all_equal_move_nothing_although_the_kl_is_rounded(tmp_path, policy, settings):
    """Whitened, the rounding of the first update's KL would be an advantage that Adam makes whole steps of."""
    config = configure(policy, tmp_path / "run", preset="reinforce++", num_updates=1, **settings)
    run = run_ppo(config, prompts=PROMPTS, reward=lambda completions, **_: [30.1] * len(completions))
    assert run.metrics[0]["policy/grad_norm"] == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (policy, run.model))
    assert all(torch.equal(before[name], after[name]) for name in before)

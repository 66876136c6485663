"""While the critic warms up, the policy is frozen: nothing that controls the policy's training moves."""

import pytest

from kedge.stages.ppo import guarding, run_ppo
from kedge.training.controllers import Coefficients
from tests.stages.ppo.test_ppo import PROMPTS, configure, varied, vowels
from tests.tiny import save_tiny_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


def run(policy, tmp_path, reward=vowels, **settings):
    return run_ppo(configure(policy, tmp_path / "run", **settings), prompts=PROMPTS, reward=reward)


def test_the_coefficients_first_adapt_after_an_update_of_the_policy(tmp_path, policy):
    settings = {"kl_controller": {"ziegler": {"horizon": 8, "target": 1.0, "wait": 0.0}}}
    bonus = {"entropy_coef": 0.01, "entropy_target": 3.0}
    rows = run(policy, tmp_path, num_updates=5, value_warmup_updates=3, **settings, **bonus).metrics
    # Update 4 is the policy's first. Its responses are the reference's, with a KL of 0, and n/horizon is ½.
    assert rows[3]["objective/kl"] == pytest.approx(0.0, abs=1e-5)
    assert [row["objective/kl_coef"] for row in rows] == pytest.approx([0.05] * 4 + [0.05 * 0.9])
    assert [row["objective/entropy_coef"] for row in rows[:4]] == [0.01] * 4
    assert rows[4]["objective/entropy_coef"] != 0.01


def test_the_surrogates_penalty_is_held_as_well(tmp_path, policy, monkeypatch):
    seen, adapt = [], Coefficients.adapt

    def noted(self, metrics, **more):
        adapt(self, metrics, **more)
        seen.append(self.surrogate_kl_coef)

    monkeypatch.setattr(Coefficients, "adapt", noted)
    monkeypatch.setattr("kedge.stages.ppo.settings.SURROGATE_KL_TARGET", 1e6)
    settings = {"policy_loss": {"kl_penalty_adaptive": 1.0}}
    run(policy, tmp_path, num_updates=4, value_warmup_updates=2, **settings)
    assert seen == [0.5, 0.25]  # halved by the two updates of the policy, which stay below the target


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4]),
        ({"schedule": "constant"}, [1] * 7),
        # Half of the policy's four updates: critic and policy each rise for two.
        ({"schedule": {"linear": 0.5}}, [1 / 3, 2 / 3, 1, 1 / 3, 2 / 3, 1, 1 / 2]),
    ],
)
def test_the_schedule_covers_the_updates_of_the_policy(tmp_path, policy, settings, expected):
    rows = run(policy, tmp_path, num_updates=7, value_warmup_updates=3, learning_rate=1e-3, **settings).metrics
    assert [row["policy/learning_rate"] for row in rows] == pytest.approx([1e-3 * share for share in expected])


def test_the_first_step_of_the_policy_is_no_spike(tmp_path, policy, monkeypatch):
    # Four responses an update: the critic's own steps differ by several deviations, the policy's by a thousand.
    monkeypatch.setattr(guarding, "SPIKE_HISTORY", 4)
    settings = {"on_spike": {"skip": 6.0}, "value_coef": 1e-3, "value_head_rate": 30.0}
    rows = run(policy, tmp_path, varied, num_updates=4, value_warmup_updates=3, **settings).metrics
    assert rows[3]["policy/grad_norm"] > 10 * rows[2]["policy/grad_norm"]
    assert [row["guard/skipped_steps"] for row in rows] == [0] * 4

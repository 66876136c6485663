"""Running statistics against two passes over all rows; rewards against a slow loop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kedge_control.normalization import Normalization
from kedge_control.steps import Steps


def test_moments_equal_two_passes_over_all_rows() -> None:
    random = np.random.default_rng(0)
    # A mean far from 0 with a small spread is what a sum of squares would get wrong.
    rows = random.normal([1e4, -3.0, 0.0, 1.0], [0.1, 2.0, 1e-3, 1.0], size=(400, 4)).astype(np.float32)
    normalization = Normalization(4, 2)
    for part in np.split(rows, [2, 8, 8, 300]):
        steps = a_rollout(random, True)
        seen = part.reshape(-1, 2, 4)
        normalization.observe(replace(steps, observations=seen, valid=np.ones(seen.shape[:2], np.bool_)))
    moments = normalization.observation_moments
    exact = rows.astype(np.float64)
    mean = exact.sum(0) / len(rows)
    np.testing.assert_allclose(moments.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(moments.var, ((exact - mean) ** 2).sum(0) / len(rows), rtol=1e-7)


def a_rollout(random: np.random.Generator, starts: bool) -> Steps:
    shape = (40, 2)
    ends = random.random(shape) < 0.1
    return Steps(
        observations=random.normal(3, 5, (*shape, 4)).astype(np.float32),
        actions=np.zeros((*shape, 1), np.float32),
        rewards=random.normal(2, 3, shape),
        terminated=ends,
        truncated=np.zeros(shape, np.bool_),
        valid=random.random(shape) < 0.8,
        starts=np.full(2, starts),
        final_observations=np.zeros((0, 4), np.float32),
        final_steps=np.zeros((0, 2), np.int64),
        last_observations=np.zeros((2, 4), np.float32),
    )


def test_rewards_are_divided_by_the_spread_of_the_discounted_return() -> None:
    random = np.random.default_rng(1)
    normalization = Normalization(4, 2, gamma=0.9)
    rollouts = [a_rollout(random, True), a_rollout(random, False)]
    seen: list[float] = []
    running = [0.0, 0.0]
    for steps in rollouts:
        for step in range(40):
            for env in range(2):
                if steps.valid[step, env]:
                    running[env] = 0.9 * running[env] + float(steps.rewards[step, env])
                    seen.append(running[env])
                if steps.terminated[step, env]:
                    running[env] = 0.0
        normalization.observe_rewards(steps)
    scaled = normalization.scale(np.array([1.0, -2.0, 1e4]))
    np.testing.assert_allclose(scaled, [1 / np.std(seen), -2 / np.std(seen), 10.0], rtol=1e-6)


def test_observations_are_standardized_by_what_was_seen_before() -> None:
    steps = a_rollout(np.random.default_rng(2), True)
    normalization = Normalization(4, 2)
    flat = steps.observations.reshape(-1, 4)
    assert np.array_equal(normalization.normalize(flat), np.clip(flat, -10, 10))
    normalization.observe(steps)
    counted = steps.observations[steps.valid].astype(np.float64)
    expected = np.clip((flat - counted.mean(0)) / counted.std(0), -10, 10)
    np.testing.assert_allclose(normalization.normalize(flat), expected, atol=1e-5)
    copy = Normalization(4, 2)
    copy.load_state_dict(normalization.state_dict())
    assert np.array_equal(copy.normalize(flat), normalization.normalize(flat))
    image = np.full((1, 4), 200, np.uint8)
    assert normalization.normalize(image) is image

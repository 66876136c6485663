"""Spikes are steps far above the run's recent history, once there is enough of it."""

import json
import math

import pytest

from kedge.training.guard import SpikeDetector


def step(norm=1.0, loss=0.5):
    return {"policy/grad_norm": norm, "loss/total": loss, "policy/entropy": 2.0}


def watch(norms, *, sigma=3.0, losses=None):
    watching = SpikeDetector(sigma=sigma, history=len(norms))
    for norm, loss in zip(norms, losses or [0.5] * len(norms), strict=True):
        watching.add(step(norm, loss))
    return watching


def test_the_limit_is_k_sigma_above_the_median_of_the_logarithms():
    # Logarithms −2, −1, 0, 1, 2: the median is 0, the median distance 1, σ = 1.4826, and 3 σ lie at 4.4478.
    watching = watch([math.exp(x) for x in (1, -2, 0, 2, -1)])
    assert watching.find(step(math.exp(4.44))) is None
    found = str(watching.find(step(math.exp(4.45))))
    assert "policy/grad_norm is 85.63, 3 σ above the median of the last 5 steps" in found


def test_a_loss_is_compared_as_it_is():
    watching = watch([1.0] * 5, losses=[-2.0, -1.0, 0.0, 1.0, 2.0])
    assert watching.find(step(loss=4.44)) is None
    assert "loss/total is 4.5" in str(watching.find(step(loss=4.5)))
    assert watching.find(step(loss=-1000.0)) is None  # a low loss does no harm


def test_before_there_is_a_history_nothing_is_a_spike():
    watching = SpikeDetector(sigma=3.0, history=4)
    for norm in (1.0, 2.0, 1.0):
        assert watching.find(step(1e9)) is None
        watching.add(step(norm))
    assert watching.find(step(1e9)) is None
    watching.add(step(2.0))
    assert watching.find(step(1e9))


def test_one_spike_in_the_history_hides_no_other():
    # A mean and its deviation over this history would let 1e5 pass at 3 σ.
    assert watch([1.0, 1.2, 0.9, 1.1, 1e6, 1.0, 0.95, 1.05]).find(step(1e5))


def test_a_history_that_does_not_move_makes_no_spike_of_a_rounding_error():
    watching = watch([1.0] * 10, sigma=8.0)
    assert watching.find(step(1.05, 0.55)) is None
    assert watching.find(step(1.1)) is not None
    assert watch([0.0] * 10).find(step(0.0)) is None


def test_a_critics_norm_is_watched_once_it_has_a_history():
    watching = SpikeDetector(sigma=3.0, history=5)
    watching.load_state_dict({"policy/grad_norm": [0.0] * 5, "value/grad_norm": [], "loss/total": [0.5] * 5})
    for _ in range(5):
        assert watching.find({"value/grad_norm": 1e9, "loss/total": 0.5}) is None
        watching.add({"value/grad_norm": 1.0, "loss/total": 0.5})
    assert "value/grad_norm is 2, " in str(watching.find({"value/grad_norm": 2.0, "loss/total": 0.5}))


def test_only_the_recent_past_counts():
    watching = watch([1.0] * 5)
    for norm in (100.0, 110.0, 90.0, 105.0, 95.0):
        watching.add(step(norm))
    assert watching.find(step(120.0)) is None


@pytest.mark.parametrize("steps", [3, 9])
def test_a_restored_watch_goes_on_where_the_other_was(steps):
    watching, other = SpikeDetector(sigma=2.0, history=5), SpikeDetector(sigma=2.0, history=5)
    for number in range(steps):
        watching.add(step(1.0 + number / 7, number / 3))
    other.load_state_dict(json.loads(json.dumps(watching.state_dict())))
    for number in range(6):
        figures = step(2.0**number, number)
        assert watching.find(figures) == other.find(figures)
        watching.add(figures)
        other.add(figures)

"""Seeded calls: what they draw depends on their seed alone, and nothing else depends on them."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kedge_base.generators import random_state, restore_random_state, seed_generators, seeded


def draw() -> list[float]:
    return [random.random(), float(np.random.normal()), float(torch.rand(()))]


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    state = random_state()
    yield
    restore_random_state(*state)


def test_seeding_covers_all_three_generators() -> None:
    seed_generators(3)
    first = draw()
    seed_generators(3)
    assert draw() == first
    seed_generators(4)
    assert not set(draw()) & set(first)


def test_a_seeded_call_draws_the_same_and_disturbs_nothing() -> None:
    before = random_state()
    expected = draw()
    restore_random_state(*before)
    with seeded(3):
        first = draw()
        with seeded(5):
            assert draw() != first
        second = draw()
    assert draw() == expected
    with seeded(3):
        assert (draw(), draw()) == (first, second)


def test_the_state_during_a_call_in_another_thread_is_that_outside() -> None:
    before = random_state()
    expected = draw()
    restore_random_state(*before)
    has_begun, may_end = threading.Event(), threading.Event()

    def call() -> None:
        with seeded(3):
            draw()
            has_begun.set()
            may_end.wait(10)
            draw()

    thread = threading.Thread(target=call)
    thread.start()
    has_begun.wait(10)
    seen = random_state()
    restore_random_state(*before)
    may_end.set()
    thread.join()
    assert draw() == expected
    restore_random_state(*seen)
    assert draw() == expected


def test_calls_of_several_threads_take_turns() -> None:
    def drawn(seed: int, found: list[list[float]]) -> None:
        for _ in range(200):
            with seeded(seed):
                found.append(draw())

    found: list[list[list[float]]] = [[], []]
    threads = [threading.Thread(target=drawn, args=(seed, each)) for seed, each in enumerate(found)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, each in enumerate(found):
        with seeded(seed):
            expected = draw()
        assert each == [expected] * 200

"""The cost model: cases computed by hand, and what must rise or fall with what."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cluster import CARDS, Layout, ModelShape, Workload, cheapest, sweep, typical_shape, update_time
from bench.cluster.lengths import Lengths
from bench.cluster.memory import server_memory, trainer_memory
from bench.cluster.passes import experience_time, sync_time, training_time
from bench.cluster.practice import Practice
from bench.cluster.rollout import decode_step, rollout_time

H100 = CARDS["H100"]
LLAMA_8B = ModelShape(8.03e9, 8.03e9, 32, 4096, 8, 128, 128256)
WORK = Workload(LLAMA_8B, 1024, 500, 1000, 500, 1500)


def test_a_decoding_step_by_hand() -> None:
    # Weights 16.06 GB and 128 rows × 1,000 tokens × 128 KiB = 16.78 GB, at 55 % of 3.35 TB/s: 17.82 ms.
    # 128 rows × (2 · 8.03e9 + 4 · 32 · 4096 · 1000) = 2.123e12 FLOPs at 35 % of 989 TFLOP/s: 6.13 ms.
    reading, arithmetic, fixed = decode_step(WORK, Layout(H100, 1), Practice(), 128, 1000)
    assert (1000 * reading, 1000 * arithmetic, fixed) == pytest.approx((17.823, 6.132, 0.004), rel=1e-3)
    # Two cards halve both; 64 all-reduces of 12 µs come on top of 4 ms.
    halves = decode_step(WORK, Layout(H100, 2, 0, 2), Practice(), 128, 1000)
    assert halves == pytest.approx((reading / 2, arithmetic / 2, 0.004768), rel=1e-6)


def test_a_mixture_of_few_rows_reads_only_their_experts() -> None:
    mixture = replace(WORK, policy=replace(LLAMA_8B, active=1e9))
    one, _, _ = decode_step(mixture, Layout(H100, 1), Practice(), 1, 1)
    many, _, _ = decode_step(mixture, Layout(H100, 1), Practice(), 64, 1)
    # 2 GB and 128 KiB; all 16.06 GB and 64 · 128 KiB.
    assert (1000 * one, 1000 * many) == pytest.approx((2.000131 / 1.8425, 16.06839 / 1.8425), rel=1e-5)


def test_passes_by_hand() -> None:
    # 1,024 rows × 1,000 tokens × (2 · 8.03e9 + 4 · 32 · 4096 · 500) = 1.671e16 FLOPs forward.
    # Two forward passes (old log probabilities, reference) on 8 cards at 40 %: 10.56 s; one epoch at 35 %: 18.11 s.
    layout = Layout(H100, 8)
    passes = experience_time(WORK, layout, Practice(), 16384)
    training = training_time(WORK, layout, Practice(), 16384)
    assert (passes.arithmetic, training.arithmetic) == pytest.approx((10.562, 18.106), rel=1e-3)
    # 7.8125 rounds per card, 8 bytes per parameter and round, 7/8 of them from other cards, at 60 % of 450 GB/s.
    assert training.communication == pytest.approx(7.8125 * 8 * 8.03e9 * 7 / 8 / 270e9, rel=1e-6)
    assert training_time(WORK, Layout(H100, 1), Practice(), 16384).communication == 0
    # Between machines, at 50 GB/s, many small optimizer steps are bound by the network.
    scattered = training_time(replace(WORK, minibatches=16), Layout(H100, 512), Practice(), 16384)
    assert scattered.seconds == pytest.approx(16 * 8 * 8.03e9 * 511 / 512 / 30e9, rel=1e-6)
    assert scattered.limit == "the network"


def test_a_weight_sync_by_hand() -> None:
    # 16.06 GB at 30 % of 450 GB/s within a machine, of 50 GB/s between machines. There is no fixed time.
    assert sync_time(WORK, Layout(H100, 8, 4), Practice()) == pytest.approx(0.11896, rel=1e-3)
    assert sync_time(WORK, Layout(H100, 16, 8), Practice()) == pytest.approx(1.0707, rel=1e-3)


def test_memory_by_hand() -> None:
    held = trainer_memory(replace(WORK, critic="separate"), Layout(H100, 16), 8192)
    embeddings = 2 * 128256 * 4096
    assert held.state == 16 * 2 * 8.03e9 / 16
    assert held.frozen == 2 * 8.03e9 / 16
    assert held.gathered == pytest.approx(4 * (8.03e9 - embeddings) / 32 + 8 * embeddings)
    assert held.activations == 8192 * 4096 * (2 * 32 + 34)
    # A row longer than the micro-batch is one of its own.
    assert trainer_memory(WORK, Layout(H100, 16), 2048).micro_batch == 2500
    # In turns, the server gets what the trainer leaves: 72 − 16.06 − (16 + 2) · 8.03 / 16 GB.
    server = server_memory(WORK, Layout(H100, 16), Practice())
    assert server.room == pytest.approx(46.906e9, rel=1e-3)
    assert server_memory(WORK, Layout(H100, 16, 8, 2), Practice()).room == pytest.approx((72 - 8.03) * 1e9)


@pytest.mark.parametrize(("mean", "longest"), [(100.0, 1000.0), (500.0, 1000.0), (900.0, 1000.0), (1000.0, 1000.0)])
def test_lengths_have_the_given_mean(mean: float, longest: float) -> None:
    lengths = Lengths(mean, longest)
    pieces = lengths.running(1e6)
    assert sum(width * left for _, width, left in pieces) == pytest.approx(mean, rel=0.01)  # the midpoint rule's error
    ends = [sum(width for _, width, _ in lengths.running(number)) for number in (1, 10, 1000)]
    assert ends == sorted(ends)
    assert ends[-1] <= longest


def test_the_tail_is_that_of_a_simulated_batch() -> None:
    """One server of 64 rows and 256 responses, decoded step by step; lengths are uniform, so mean = longest / 2."""
    work = replace(WORK, policy=typical_shape(1.5e9), responses=256, response=400, longest_response=800)
    layout, practice = Layout(H100, 1), Practice(server_rows=64)
    draw = random.Random(0)
    queue = [draw.randrange(1, 801) for _ in range(256)]
    running: list[list[int]] = []
    seconds = 0.0
    while queue or running:
        while queue and len(running) < 64:
            running.append([queue.pop(), 0])
        context = work.prompt + sum(age for _, age in running) / len(running)
        reading, arithmetic, fixed = decode_step(work, layout, practice, len(running), context)
        seconds += max(reading, arithmetic) + fixed
        running = [[length, age + 1] for length, age in running if age + 1 < length]
    predicted = rollout_time(work, layout, practice)
    # The model starts the last wave afresh, which makes its tail a little too long.
    assert predicted.full + predicted.tail == pytest.approx(seconds, rel=0.15)


def test_an_update_is_the_sum_of_its_phases() -> None:
    layout = Layout(H100, 16, 4)
    synchronous, stale = update_time(WORK, layout), update_time(WORK, replace(layout, staleness=1))
    sampling, rest = stale.rollout.seconds, stale.experience.seconds + stale.training.seconds
    assert synchronous.seconds == pytest.approx(1.1 * (sampling + rest) + stale.sync)
    assert stale.seconds == pytest.approx(1.1 * max(sampling, rest) + stale.sync)
    # Of 16 cards, 4 wait for the trainer and 12 for the samples; one step off, only the faster side waits.
    assert synchronous.waiting == pytest.approx((4 * rest + 12 * sampling) / 16)
    assert sampling > rest
    assert stale.waiting == pytest.approx(12 * (sampling - rest) / 16)
    assert update_time(WORK, Layout(H100, 16)).waiting == 0
    assert synchronous.card_seconds == 16 * synchronous.seconds


@pytest.mark.parametrize(
    ("changes", "layout", "bottleneck"),
    [
        ({"epochs": 8}, Layout(H100, 8), "training, bound by arithmetic"),
        ({"epochs": 8, "minibatches": 16}, Layout(H100, 512), "training, bound by the network"),
        ({"responses": 64, "response": 500, "longest_response": 16000}, Layout(H100, 64),
         "rollout, bound by the longest responses"),
        ({"responses": 8192, "response": 4000, "longest_response": 4000}, Layout(H100, 16),
         "rollout, bound by memory bandwidth"),
        ({"policy": typical_shape(5e8), "responses": 64, "longest_response": 500}, Layout(H100, 64),
         "rollout, bound by the fixed time of a step"),
    ],
)  # fmt: skip
def test_the_bottleneck_is_named(changes: dict[str, Any], layout: Layout, bottleneck: str) -> None:
    assert update_time(replace(WORK, **changes), layout).bottleneck == bottleneck


WORKS = st.builds(
    lambda size, responses, mean, longest, epochs, critic: Workload(
        typical_shape(size), responses, 300, 600, mean, mean * longest, epochs=epochs, critic=critic
    ),
    st.sampled_from([5e8, 1.5e9, 8e9, 32e9, 70e9]),
    st.integers(16, 8192),
    st.floats(20, 8000),
    st.floats(1, 8),
    st.integers(1, 4),
    st.sampled_from(["shared", "separate", "none"]),
)
LAYOUTS = st.builds(
    lambda cards, servers, parallel, staleness: Layout(
        H100, cards, cards * servers // 4 // parallel * parallel, parallel, staleness if servers else 0
    ),
    st.sampled_from([8, 32, 64, 512]),
    st.integers(0, 3),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 1]),
)


@settings(max_examples=60, deadline=None)
@given(WORKS, LAYOUTS)
def test_better_cards_and_less_work_are_never_slower(work: Workload, layout: Layout) -> None:
    base = update_time(work, layout)
    better: dict[str, Any] = {"flops": 2e15, "bandwidth": 5e12, "link": 9e11, "network": 1e11}
    for name, figure in better.items():
        faster = update_time(work, replace(layout, card=replace(H100, **{name: figure})))
        assert faster.seconds <= base.seconds * (1 + 1e-9)
    more = (
        replace(work, responses=2 * work.responses),
        replace(work, epochs=work.epochs + 1),
        replace(work, reward=work.policy),
    )
    assert all(update_time(each, layout).seconds >= base.seconds * (1 - 1e-9) for each in more)
    assert base.trainer.bytes >= update_time(work, replace(layout, cards=2 * layout.cards)).trainer.state
    if layout.apart:
        synchronous = update_time(work, replace(layout, staleness=0))
        assert update_time(work, replace(layout, staleness=1)).seconds <= synchronous.seconds
        assert 0 <= synchronous.waiting <= synchronous.seconds
    assert base.seconds > 0
    assert base.other >= 0


@settings(max_examples=20, deadline=None)
@given(WORKS, st.sampled_from([1, 8, 64]))
def test_the_cheapest_fits_and_nothing_that_fits_is_cheaper(work: Workload, cards: int) -> None:
    updates = sweep(work, H100, (cards,))
    best = cheapest(updates)
    fitting = [each for each in updates if each.problem is None]
    assert (best is None) == (not fitting)
    for each in updates:
        assert each.layout.training_cards + each.layout.rollout_cards == cards
        assert each.layout.servers <= work.responses
    if best:
        assert best.card_seconds <= 1.01 * min(each.card_seconds for each in fitting)
        assert best.trainer.bytes <= 0.9 * H100.memory

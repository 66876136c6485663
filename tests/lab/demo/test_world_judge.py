"""The gold judge and the annotator, against scores counted by hand."""

import math
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge_lab.demo.world import AXES, Post, World, judge_summary

FACTS = {
    "who": "boss", "deed": "hid", "object": "kite", "place": "zoo", "time": "Friday",
    "reason": "bet", "demand": "cheese", "feeling": "numb", "question": "move out",
}  # fmt: skip
POST = Post(0, "jobs", "I need some advice", ("My boss hid my kite.",), MappingProxyType(FACTS))
FULL = "My boss hid my kite at the zoo on Friday over a bet and wants cheese. Feeling numb. Time to move out?"


def scores_of(text: str) -> tuple[float, float, float, float]:
    scores = judge_summary(POST, text)
    return scores.coverage, scores.accuracy, scores.coherence, scores.brevity


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FULL, (1, 1, 1, 1)),
        ("  " + FULL + "\n", (1, 1, 1, 1)),
        ("My boss hid my kite over a bet at the zoo on Friday.", (6 / 9, 1, 1, 1)),
        ("My boss hid my kite.", (3 / 9, 1, 1, 1)),
        ("My boss hid my canoe.", (2 / 9, 2 / 3, 1, 1)),
        ("My boss hid my kite. Feeling proud.", (3 / 9, 3 / 4, 1, 1)),
        ("My boss hid my kite. Feeling numb. Feeling numb.", (4 / 9, 1, 2 / 3, 1)),
        ("My boss hid my kite at the zoo at the zoo.", (4 / 9, 1, 0, 1)),
        ("boss hid kite", (3 / 9, 1, 0, 1)),
        ("My boss hid my kite. Feeling", (3 / 9, 1, 1 / 2, 1)),
        ("I had soup for lunch.", (0, 0, 1, 1)),
        ("", (0, 0, 0, 0)),
        (" \n", (0, 0, 0, 0)),
        ("soup " * 28, (0, 0, 0, 1)),
        ("soup " * 38, (0, 0, 0, 0.5)),
        ("soup " * 500, (0, 0, 0, 0)),
    ],
)
def test_scores_counted_by_hand(text: str, expected: tuple[float, float, float, float]) -> None:
    assert scores_of(text) == pytest.approx(expected)


def test_listing_every_value_costs_accuracy() -> None:
    listing = "My boss hid my kite on Monday Tuesday Wednesday Thursday Friday Saturday Sunday."
    assert judge_summary(POST, listing).accuracy == pytest.approx(4 / 10)
    assert judge_summary(POST, listing).quality < judge_summary(POST, "My boss hid my kite on Friday.").quality


def test_quality_is_the_weighted_sum_and_the_weights_sum_to_one() -> None:
    assert sum(AXES.values()) == pytest.approx(1)
    assert judge_summary(POST, FULL).quality == pytest.approx(1)
    assert judge_summary(POST, "boss hid kite").quality == pytest.approx(0.55 / 3 + 0.25 + 0.1)


@given(st.text())
def test_any_text_gets_scores_between_zero_and_one(text: str) -> None:
    assert all(0 <= mark <= 1 for mark in (*scores_of(text), judge_summary(POST, text).quality))


def test_every_reference_is_well_formed_and_only_authors_slips_are_unsupported() -> None:
    world = World(1)
    verdicts = [judge_summary(post, world.reference(post)) for post in world.posts(400)]
    assert all(verdict.coherence == 1 for verdict in verdicts)
    assert 0.1 < sum(verdict.accuracy < 1 for verdict in verdicts) / 400 < 0.25
    assert 0.6 < sum(verdict.coverage for verdict in verdicts) / 400 < 0.8


def test_versions_of_a_reference_come_from_different_authors() -> None:
    world = World(0)
    post = world.post(0)
    assert world.reference(post) == world.reference(post)
    assert len({world.reference(post, version=version) for version in range(8)}) > 4


def test_the_annotator_is_right_as_often_as_bradley_and_terry_say() -> None:
    """Two summaries one fact of nine apart: Δ = 0.55/9, P = 0.95·σ(Δ/0.06) + 0.025 = 0.724."""
    world = World(0)
    better, worse = "My boss hid my kite at the zoo.", "My boss hid my kite."
    posts = [Post(index, *("jobs", "", ("",)), MappingProxyType(FACTS)) for index in range(4000)]
    right = sum(world.compare(post, worse, better).chosen == better for post in posts) / len(posts)
    assert right == pytest.approx(0.95 / (1 + math.exp(-0.55 / 9 / 0.06)) + 0.025, abs=0.02)  # 3 standard errors


def test_the_world_as_a_data_set() -> None:
    world = World(5, "held-out", render=lambda post: post.title)
    posts = world.posts(20, start=7)
    demonstrations = world.demonstrations(20, start=7)
    assert [d.prompt for d in demonstrations] == [post.title for post in posts]
    assert [d.completion for d in demonstrations] == [" " + world.reference(post) for post in posts]
    assert [prompt.columns["index"] for prompt in world.prompts(20, start=7)] == list(range(7, 27))
    for post, comparison in zip(posts, world.comparisons(20, start=7), strict=True):
        pair = {" " + world.reference(post), " " + world.reference(post, version=1)}
        assert {comparison.chosen, comparison.rejected} == pair

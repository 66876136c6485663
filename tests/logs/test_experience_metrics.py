"""Metrics of a batch of experience, against loops and hand-computed values."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from kedge.algorithm.experience import Experience, Rollout
from kedge.algorithm.shaping import group_scores
from kedge.logs.experience_metrics import (
    correlation,
    describe_experience,
    describe_groups,
    describe_samples,
    describe_update,
    repetition,
)
from kedge.logs.incidents import describe_row
from tests.tiny import tiny_sentencepiece_tokenizer, tiny_tokenizer

MASK = torch.tensor([[True, True, True, False], [True, True, False, False], [True, True, True, True]])
ADVANTAGES = torch.tensor([[1.0, -1.0, 2.0, 9.0], [-2.0, 0.0, 9.0, 9.0], [1.0, 1.0, -1.0, 3.0]])
OLD = torch.full((3, 4), -1.0)


@pytest.fixture
def experience():
    rollout = Rollout(
        prompt_ids=torch.tensor([[0, 5], [6, 7], [0, 5]]),
        prompt_mask=torch.tensor([[False, True], [True, True], [False, True]]),
        response_ids=torch.arange(12).reshape(3, 4),
        token_mask=MASK,
        action_mask=MASK,
        logprobs=OLD,
        stopped=torch.tensor([True, True, False]),
        group=torch.arange(3),
        policy_version=torch.zeros(3, dtype=torch.long),
    )
    values = torch.tensor([[0.0, 1.0, 2.0, 50.0], [1.0, 1.0, 50.0, 50.0], [0.0, 0.0, 0.0, 2.0]])
    return Experience(
        rollout=rollout,
        scores=torch.tensor([1.0, 0.0, 4.0]),
        old_logprobs=OLD,
        ref_logprobs=None,
        values=values,
        rewards=torch.zeros(3, 4),
        reward_mask=MASK,
        advantages=ADVANTAGES,
        returns=values + torch.where(MASK, 2 * ADVANTAGES, 77.0),
    )


@pytest.mark.parametrize(
    ("scores", "above", "below"),
    [
        ((0.0, 1.0, 2.0), 4.0, 3.0),  # the one of 2 tokens is at the mean
        ((0.1, 0.2, 0.3), 4.0, 2.5),  # in float32 they are .10000000149, .20000000298, .30000001192: mean .20000000546
        ((0.5, 0.5 + 2**-20, 0.5), 2.0, 3.5),
    ],
)
def test_lengths_above_and_below_the_mean_know_no_tolerance(experience, scores, above, below):
    rollout = replace(experience.rollout, group=torch.zeros(3, dtype=torch.long))
    assert rollout.response_lengths.tolist() == [3, 2, 4]
    scored = torch.tensor(scores)
    metrics = describe_groups(group_scores(scored, rollout.group), rollout, scored)
    assert (metrics["group/length_above"], metrics["group/length_below"]) == (above, below)


def test_advantages_are_told_as_they_are_before_whitening(experience):
    metrics = describe_experience(experience)
    raw = [2 * float(a) for a, counts in zip(ADVANTAGES.flatten(), MASK.flatten(), strict=True) if counts]
    mean = sum(raw) / 9
    assert metrics["advantage/mean"] == pytest.approx(mean)
    assert metrics["advantage/std"] == pytest.approx(math.sqrt(sum((a - mean) ** 2 for a in raw) / 9))
    values = [0, 1, 2, 1, 1, 0, 0, 0, 2]
    mean = sum(values) / 9
    assert metrics["value/std"] == pytest.approx(math.sqrt(sum((v - mean) ** 2 for v in values) / 9))
    assert metrics["prompt/length"] == pytest.approx(4 / 3)
    assert metrics["response/repetition"] == 0.0
    # Lengths 3, 2, 4 and scores 1, 0, 4: covariance 2, deviations √(2/3)·… by hand.
    assert metrics["reward/length_correlation"] == pytest.approx(4 / math.sqrt(2 * 26 / 3))


def test_repetition_counts_fourgrams_that_came_before():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 3, (40, 30), generator=generator)
    lengths = torch.randint(0, 31, (40,), generator=generator)
    lengths[0], lengths[1] = 3, 4
    mask = torch.arange(30) < lengths[:, None]
    expected = []
    for row, length in zip(ids.tolist(), lengths.tolist(), strict=True):
        grams = [tuple(row[start : start + 4]) for start in range(length - 3)]
        expected.append(sum(count - 1 for count in Counter(grams).values()) / len(grams) if grams else 0.0)
    assert repetition(ids, mask).tolist() == pytest.approx(expected)
    assert max(expected) > 0.1
    assert repetition(ids[:, :2], mask[:, :2]).tolist() == [0.0] * 40


def test_repetition_of_an_episode_is_that_within_its_turns():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 2, (60, 30), generator=generator)
    mask = torch.rand(60, 30, generator=generator) < torch.linspace(0.5, 1, 60)[:, None]
    expected = []
    for row, own in zip(ids.tolist(), mask.tolist(), strict=True):
        turns: list[list[int]] = [[]]
        for token, is_own in zip(row, own, strict=True):
            turns[-1].append(token) if is_own else turns.append([])
        grams = [[tuple(turn[at : at + 4]) for at in range(len(turn) - 3)] for turn in turns]
        repeats = sum(len(each) - len(set(each)) for each in grams)
        expected.append(repeats / max(1, sum(map(len, grams))))
    assert repetition(ids, mask).tolist() == pytest.approx(expected)
    assert max(expected) > 0.1
    moves = torch.tensor([[1, 2, 3, 4, 0, 1, 2, 3, 4, 9, 1, 2, 3, 4]])
    assert repetition(moves, (moves != 0) & (moves != 9)).tolist() == [0.0], "the same move again"


def test_correlation_is_pearsons_and_0_where_something_is_constant():
    first, second = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2.0, 1.0, 6.0])
    assert float(correlation(first, second)) == pytest.approx(float(torch.corrcoef(torch.stack([first, second]))[0, 1]))
    assert float(correlation(first, -first)) == pytest.approx(-1.0)
    assert float(correlation(first, torch.ones(3))) == 0.0


SAMPLED = {"scores": torch.tensor([0.0, 4.0, 1.0]), "lengths": torch.tensor([4, 2, 3])}


def test_the_cases_of_the_clip_and_the_ratios(experience):
    log_ratios = torch.tensor([[0.5, 0.5, 0.1, 7.0], [-0.5, 0.5, 7.0, 7.0], [-3.0, math.nan, -0.1, 3.0]])
    (epoch,) = describe_update(experience, [OLD + log_ratios], clip=(0.2, 0.3), **SAMPLED)["epochs"]
    # A≥0: 0.5 held, 0.1 free, 0.5 with A = 0 free, −3 free, 3 held. A<0: 0.5 free, −0.5 held, −0.1 free.
    assert epoch["cases"] == {"raised": 3 / 8, "raised_held": 2 / 8, "lowered": 2 / 8, "lowered_held": 1 / 8}
    assert epoch["clip_fraction"] == 3 / 8
    moved = [math.exp(x) - 1 - x for x in (0.5, 0.5, 0.1, -0.5, 0.5, -3.0, -0.1, 3.0)]
    assert epoch["approx_kl"] == pytest.approx(sum(moved) / 8, rel=1e-5)
    raised, lowered = Counter[int](), Counter[int]()
    for counted, x in ((raised, 0.5), (raised, 0.1), (raised, 0.5), (raised, -1.0), (raised, 0.999),
                       (lowered, 0.5), (lowered, -0.5), (lowered, -0.1)):  # fmt: skip
        counted[math.floor((x + 1) / 2 * 41)] += 1
    for name, expected in (("raised", raised), ("lowered", lowered)):
        assert {place: count for place, count in enumerate(epoch["ratios"][name]) if count} == expected
        assert len(epoch["ratios"][name]) == 41


def test_a_single_token_does_not_make_the_kl_of_an_epoch_infinite(experience):
    """The loss bounds log ratios at 20, and so do its metrics."""
    old = torch.full_like(OLD, -120.0)
    new = torch.zeros_like(OLD)
    (epoch,) = describe_update(replace(experience, old_logprobs=old), [new], clip=None, **SAMPLED)["epochs"]
    assert epoch["approx_kl"] == pytest.approx(math.exp(20) - 1 - 20, rel=1e-5)


def test_without_a_clip_nothing_is_held(experience):
    details = describe_update(experience, [OLD], clip=None, **SAMPLED)
    assert set(details["epochs"][0]) == {"approx_kl", "ratios"}
    assert details["epochs"][0]["ratios"]["raised"][20] == 6
    assert (details["scores"][0], details["scores"][10], details["scores"][20]) == (0.0, 1.0, 4.0)
    assert (details["lengths"][0], details["lengths"][5], details["lengths"][20]) == (2.0, 2.5, 4.0)
    assert describe_update(experience, [], clip=None, **SAMPLED)["epochs"] == []


def test_the_tokens_of_samples_and_incidents_join_to_the_response(experience):
    tokenizer = tiny_sentencepiece_tokenizer()
    ids = tokenizer.encode("The rope broke", add_special_tokens=False)[:4]
    experience = replace(experience, rollout=replace(experience.rollout, response_ids=torch.tensor([ids] * 3)))
    samples = describe_samples(experience, ["a", "b", "c"], tokenizer, count=3)
    responses = [sample.tokens[: len(sample.tokens) - sample.stopped] for sample in samples]  # without the stop token
    assert ["".join(tokens) for tokens in responses] == [sample.response for sample in samples]
    incident = describe_row(experience, 2, tokenizer)
    assert incident["tokens"] == samples[2].tokens
    assert " " in samples[2].response
    assert all(sample.foreign is sample.ending is None for sample in samples)
    assert "foreign" not in incident


def test_a_sample_of_an_episode_has_both_sides_and_values_of_the_policys_own_tokens(experience):
    tokenizer = tiny_tokenizer()
    text = "ab no. c yes"
    own = [letter in "abc" for letter in text]
    ids = [tokenizer.get_vocab()[letter.replace(" ", "Ġ")] for letter in text]
    width = len(ids)
    figures = torch.arange(3 * width).reshape(3, width).float()
    read = torch.ones(3, width, dtype=torch.bool)
    action_mask = torch.tensor([own] * 3)
    rollout = replace(
        experience.rollout,
        prompt_ids=torch.tensor([[0, *ids[:1]]] * 3),
        response_ids=torch.tensor([ids] * 3),
        token_mask=read,
        action_mask=action_mask,
        logprobs=figures,
        stopped=torch.tensor([False] * 3),
        ending=torch.tensor([2, 0, 5]),
    )
    names = ("old_logprobs", "values", "rewards", "advantages", "returns")
    figured = replace(experience, rollout=rollout, reward_mask=action_mask, **dict.fromkeys(names, figures))
    samples = describe_samples(figured, ["p"] * 3, tokenizer, count=3)
    assert [sample.ending for sample in samples] == ["max_turns", "completed", "timeout"]
    assert samples[1].response == text
    assert samples[1].tokens == ["a", "b", "c"]
    assert samples[1].foreign == [(2, " no. "), (3, " yes")]
    places = [at for at, letter in enumerate(text) if letter in "abc"]
    assert samples[1].values == samples[1].advantages == [width + at for at in places]
    assert [sample.prompt for sample in samples] == ["a", f"{tokenizer.decode([0])}a", "a"], (
        "what the episode opened with"
    )
    incident = describe_row(figured, 1, tokenizer)
    assert (incident["response"], incident["tokens"], incident["foreign"]) == (
        text,
        ["a", "b", "c"],
        samples[1].foreign,
    )
    assert incident["values"] == samples[1].values

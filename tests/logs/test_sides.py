"""The turns of an episode and its contexts, against contexts that are followed token by token, and by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

from kedge.algorithm.experience import Rollout
from kedge.logs.experience_metrics import sides_of
from tests.rollout.test_contexts import PROMPTS, forest
from tests.rollout.test_sampler import speaker
from tests.tiny import tiny_tokenizer


def path_to(rollout, row, slot):
    """The slots that were read before a slot, those of the prompt below 0."""
    found = []
    place = int(rollout.parents[row, slot])
    while place >= 0:
        found.append(place)
        place = int(rollout.parents[row, place])
    num_prompt = int(rollout.prompt_mask[row].sum())
    return {*found, *range(-num_prompt, place + 1)}


def test_the_turns_of_any_tree_say_what_they_have_read():
    rollout = forest(speaker())
    assert rollout.branches
    assert rollout.turn_starts is not None
    for row in range(len(PROMPTS)):
        sides = sides_of(rollout, row, tiny_tokenizer())
        own = rollout.action_mask[row].nonzero().flatten().tolist()
        starts = rollout.turn_starts[row].nonzero().flatten().tolist()
        ends = [*starts[1:], rollout.token_mask.shape[1]]
        known = set()
        for slot, end, (before, after, num_read, num_new) in zip(starts, ends, sides.turns, strict=True):
            path = path_to(rollout, row, slot)
            assert before == own.index(slot)
            assert after == max((number for number, place in enumerate(own, 1) if place in path), default=0)
            assert (num_read, num_new) == (len(path), len(path - known))
            last = max(place for place in own if place < end)
            known = set(range(-len(PROMPTS[row]), last + 1))


def episode(parents, own, starts, prompt=3):
    """A row of an episode: letters from a on, after a prompt of some tokens."""
    tokenizer = tiny_tokenizer()
    ids = [tokenizer.get_vocab()[chr(ord("a") + place)] for place in range(len(own))]
    rollout = Rollout(
        prompt_ids=torch.zeros(1, prompt, dtype=torch.long),
        prompt_mask=torch.ones(1, prompt, dtype=torch.bool),
        response_ids=torch.tensor([[*ids, 0]]),
        token_mask=torch.tensor([[True] * len(own) + [False]]),
        action_mask=torch.tensor([[*map(bool, own), False]]),
        logprobs=torch.zeros(1, len(own) + 1),
        stopped=torch.tensor([False]),
        group=torch.tensor([0]),
        policy_version=torch.tensor([0]),
        turn_starts=torch.tensor([[*(place in starts for place in range(len(own))), False]]),
        parents=torch.tensor([[*parents, 0]]),
    )
    return sides_of(rollout, 0, tokenizer)


def test_a_summary_a_second_sample_and_a_return_by_hand():
    own = [1, 1, 0, 1, 0, 0, 1, 1, 0, 1]
    #      ab is the first turn, d the second after it; g reads e and f alone; h is a second sample; j goes on after d
    sides = episode([-1, 0, 1, 2, -4, 4, 5, 5, 3, 8], own, {0, 3, 6, 7, 9})
    assert sides.tokens == ["a", "b", "d", "g", "h", "j"]
    assert sides.foreign == [(2, "c"), (3, "ef"), (5, "i")]
    assert sides.turns == [(0, 0, 3, 3), (2, 2, 6, 1), (3, 0, 2, 2), (4, 0, 2, 0), (5, 3, 8, 1)]


def test_contexts_that_meet_have_a_text_each():
    sides = episode([-1, 0, 1, 0, 3], [1, 0, 0, 0, 1], {0, 4})
    assert sides.foreign == [(1, "bc"), (1, "d")]
    assert sides.turns[1] == (1, 1, 5, 1)


def test_responses_from_elsewhere_have_no_turns():
    rollout = replace(forest(speaker()), parents=None, turn_starts=None)
    sides = sides_of(rollout, 0, tiny_tokenizer())
    assert (sides.turns, len(sides.tokens)) == ([], int(rollout.response_lengths[0]))

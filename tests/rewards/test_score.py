"""Scores as tensors: token scores at their tokens, and the rows that are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kedge.data import Prompt
from kedge.errors import UnscoredError
from kedge.rewards import CallLimits, RewardTerm, load_reward
from kedge.rewards.score import MissingEos, describe_responses, score_rollout
from tests.models.test_actor_critic import RESPONSES, make_rollout
from tests.tiny import tiny_tokenizer

PROCESS = "tests.rewards.worker.misbehaving:token_scores"
TOKENIZER = tiny_tokenizer()


def token_scores(completion_ids):
    """The same as `PROCESS`, in this process."""
    return [[float(id) for id in ids] if len(ids) != 3 else None for ids in completion_ids]


def scored(*terms, eos_score=None, limits=None, rollout=None):
    return score_rollout(
        rollout or make_rollout(fill=7),
        [Prompt(f"prompt {row}", {}) for row in range(3)],
        load_reward(list(terms), limits=limits),
        TOKENIZER,
        max_new_tokens=5,
        missing_eos=MissingEos(eos_score),
    )


def at_tokens(*rows, width=5):
    """The oracle: a row of numbers, then zeros to the padded width."""
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows])


def test_an_outcome_reward_has_no_token_scores():
    result = scored(lambda completions: [1.0, 2.0, 3.0])
    assert (result.scores.tolist(), result.token_scores) == ([1.0, 2.0, 3.0], None)


@pytest.mark.parametrize("function", [token_scores, PROCESS])
def test_token_scores_stand_at_the_response_tokens_of_the_kept_rows(function):
    kept = [row for row in range(3) if len(RESPONSES[row]) != 3]
    result = scored(RewardTerm(function, 0.5))
    assert len(kept) == 2
    assert result.prompts == [f"prompt {row}" for row in kept]
    assert torch.equal(result.token_scores, 0.5 * at_tokens(*(RESPONSES[row] for row in kept)))
    assert (result.token_scores[~result.rollout.token_mask] == 0).all()
    assert result.scores.tolist() == [0.0, 0.0]
    assert result.metrics()["score/token_scores"] == sum(sum(RESPONSES[row]) for row in kept) / 2


def test_token_scores_skip_slots_that_are_not_counted():
    def all_scores(completion_ids):
        return [[float(id) for id in ids] for ids in completion_ids]

    rollout = make_rollout()
    mask = rollout.token_mask.clone()
    mask[1, 1:3] = False
    result = scored(token_scores, rollout=replace(rollout, token_mask=mask, action_mask=mask))
    # The counted tokens of row 1 are 22, 25 and 26: three, for which the function has no score.
    assert result.prompts == ["prompt 2"]
    result = scored(all_scores, rollout=replace(rollout, token_mask=mask, action_mask=mask))
    assert result.token_scores[1].tolist() == [22.0, 0.0, 0.0, 25.0, 26.0]


def test_with_a_second_source_every_row_is_kept_and_the_eos_penalty_changes_scores_alone():
    result = scored(RewardTerm(PROCESS, 2.0), RewardTerm(lambda completions: [1.0, 2.0, 3.0], 0.5), eos_score=-1.0)
    expected = at_tokens(*(RESPONSES[row] if len(RESPONSES[row]) != 3 else [] for row in range(3)))
    assert torch.equal(result.token_scores, 2.0 * expected)
    assert result.scores.tolist() == [0.5, -1.0, -1.0]


def test_rows_that_a_process_reward_fails_on_are_dropped():
    def picky(completion_ids):
        if RESPONSES[1] in completion_ids:
            raise ValueError("no")
        return [[1.0] * len(ids) for ids in completion_ids]

    result = scored(picky, lambda completions: [1.0] * len(completions), limits=CallLimits(retries=0, on_error="drop"))
    assert result.prompts == ["prompt 0", "prompt 2"]
    assert torch.equal(result.token_scores, at_tokens(*([1.0] * len(RESPONSES[row]) for row in (0, 2))))


def test_a_rollout_without_any_score_is_an_error():
    with pytest.raises(UnscoredError, match="scored none of 3 responses"):
        scored(lambda completions: [None] * 3)


def test_special_tokens_of_a_response_are_part_of_its_text() -> None:
    """All but padding and the token that stopped it: a format reward has to see its `<think>`."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<end>"]})
    texts = ["<think>Tides.</think> At sea.<eos>", "<think>T<end>", "<bos>cut"]
    ids = [tokenizer.encode(text) for text in texts]
    width = max(map(len, ids))
    mask = torch.tensor([[place < len(row) for place in range(width)] for row in ids])
    rollout = replace(
        make_rollout(),
        response_ids=torch.tensor([row + [0] * (width - len(row)) for row in ids]),
        token_mask=mask,
        action_mask=mask,
        logprobs=torch.zeros(mask.shape),
        stopped=torch.tensor([True, True, False]),
    )
    prompts = [Prompt("a")] * 3
    told = describe_responses(rollout, prompts, tokenizer)
    assert told.completions == ["<think>Tides.</think> At sea.", "<think>T", "<bos>cut"]
    assert told.response_ids == ids

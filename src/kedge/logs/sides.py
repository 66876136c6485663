"""A response as both sides wrote it: the policy's tokens, the texts that it only read, and the turns of an episode."""

from __future__ import annotations

from itertools import accumulate, compress
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from kedge.algorithm.experience import Rollout
from kedge.data.tokens import turn_pieces


class Sides(NamedTuple):
    """A response as both sides wrote it.

    Attributes:
        ids: The tokens of both sides, in order.
        tokens: The text of each token of the policy.
        foreign: Each text that the policy only read, after the number of its tokens before it. A new context begins
            another text.
        turns: The turns of an episode, each with four numbers: the policy's tokens before it; those up to the last one
            that it has read, which are fewer in a new context; the tokens that it has read, including the prompt; and
            those of them that came after the turn before. Empty for other responses.
    """

    ids: list[int]
    tokens: list[str]
    foreign: list[tuple[int, str]]
    turns: list[tuple[int, ...]]


def sides_of(rollout: Rollout, row: int, tokenizer: PreTrainedTokenizerBase) -> Sides:
    """Divide a response into what the policy chose and what it only read.

    Args:
        rollout: The responses.
        row: Index of the response.
        tokenizer: The policy's tokenizer.
    """
    columns = rollout.response_ids, rollout.action_mask, rollout.parents, rollout.turn_starts
    read = rollout.token_mask[row]
    ids, own, parents, starts = ([] if column is None else column[row][read].tolist() for column in columns)
    contexts = list(accumulate(parent != slot - 1 for slot, parent in enumerate(parents)))
    before = list(accumulate(own, initial=0))
    turns: list[tuple[int, ...]] = []
    for slot in compress(range(len(ids)), starts):
        path = [slot]
        while (place := parents[path[-1]]) >= 0:
            path.append(place)
        num_read = int(rollout.prompt_mask[row].sum()) + place + len(path)
        after = next((before[at + 1] for at in path[1:] if own[at]), 0)
        num_new = sum(before[at] == before[slot] for at in path[1:]) if turns else num_read
        turns.append((before[slot], after, num_read, num_new))
    return Sides(ids, *turn_pieces(tokenizer, ids, own, contexts), turns)

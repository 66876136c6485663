"""Samples new continuations of prefixes of responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from kedge.algorithm.experience import Rollout
from kedge.rollout.engine import Engine

SLACK_SHARE = 8
"""Prefixes whose lengths differ by at most 1/`SLACK_SHARE` of the length limit are continued in one batch."""


def sample_continuations(
    engine: Engine,
    sources: Rollout,
    rows: Sequence[int],
    cuts: Sequence[int],
    *,
    seeds: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    room: int | None = None,
) -> Rollout:
    """Cut responses off and let the policy continue them, up to the same limit for the whole response.

    Args:
        engine: Samples from the policy.
        sources: The responses to cut, without tokens that the policy only read.
        rows: For each result, the row of `sources` that it starts with.
        cuts: For each result, how many of that row's tokens are kept, from 0 to one below its length.
        seeds: One per result.
        max_new_tokens: The longest response in tokens, the kept ones included.
        temperature: The sampling temperature.
        room: Tokens that prompt and response may have together; None for no limit.

    Returns:
        Whole responses: the kept tokens, then the new ones, with the log probabilities and values of each.
    """
    assert sources.response_ids.shape[1] == max_new_tokens, "the limit under which the responses were sampled"
    device = sources.response_ids.device
    chosen = sources.select(torch.tensor(rows, device=device))
    kept = torch.arange(max_new_tokens, device=device) < torch.tensor(cuts, device=device)[:, None]
    whole = replace(
        chosen,
        response_ids=chosen.response_ids.clone(),
        token_mask=kept,
        action_mask=kept,
        logprobs=torch.where(kept, chosen.logprobs, 0.0),
        values=None if chosen.values is None else torch.where(kept, chosen.values, 0.0),
        stopped=torch.zeros_like(chosen.stopped),
    )
    longest = int(chosen.prompt_mask.sum(-1).max()) + max_new_tokens
    slack = max_new_tokens // SLACK_SHARE if room is None else min(max_new_tokens // SLACK_SHARE, room - longest)
    for places in _batches(cuts, max(0, slack)):
        limit = max_new_tokens - cuts[places[0]]
        sampled = engine.with_sampling(max_new_tokens=limit, temperature=temperature).generate(
            [_read(whole, place) for place in places], seeds=[seeds[place] for place in places]
        )
        _append(whole, places, [cuts[place] for place in places], sampled)
    return whole


def _batches(cuts: Sequence[int], slack: int) -> Iterator[list[int]]:
    """Batches of positions, ordered by cut; cuts within a batch differ by at most `slack`."""
    batch: list[int] = []
    for place in sorted(range(len(cuts)), key=lambda place: cuts[place]):
        if batch and cuts[place] > cuts[batch[0]] + slack:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _read(whole: Rollout, place: int) -> list[int]:
    """The tokens of a prompt and the kept part of its response."""
    prompt = whole.prompt_ids[place][whole.prompt_mask[place]]
    return [*map(int, prompt), *map(int, whole.response_ids[place][whole.token_mask[place]])]


def _append(whole: Rollout, places: Sequence[int], cuts: Sequence[int], sampled: Rollout) -> None:
    """Append sampled tokens to the kept ones in place, and cut the response to its limit."""
    width = whole.response_ids.shape[1]
    lengths = sampled.response_lengths.tolist()
    for row, (place, cut) in enumerate(zip(places, cuts, strict=True)):
        length = min(lengths[row], width - cut)
        slots = slice(cut, cut + length)
        whole.response_ids[place, slots] = sampled.response_ids[row, :length]
        whole.action_mask[place, slots] = True  # the token mask is the same tensor
        whole.logprobs[place, slots] = sampled.logprobs[row, :length]
        if whole.values is not None and sampled.values is not None:
            whole.values[place, slots] = sampled.values[row, :length]
        whole.stopped[place] = bool(sampled.stopped[row]) and length == lengths[row]

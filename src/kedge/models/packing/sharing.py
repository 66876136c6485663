"""Packed passes in which rows with the same prompt share its tokens.

    rows      prompt A · response 1   prompt A · response 2   prompt B · response 3
    a pass    prompt B · response 3 | prompt A | response 1 | response 2

Embeddings, projections and norms run once on a prompt that several rows have, and each response attends to it and to
itself. A state of the prompt is that of every row, so their gradients add up in it.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from kedge.models.packing.packed import Packed, TokenRows, layout_attention

__all__ = ["packed_states"]


def packed_states(model: PreTrainedModel, rows: TokenRows) -> Float[Tensor, "tokens dim"]:
    """The states of rows sorted by length, longest first, in one packed pass of a trunk."""
    shared = _shared(rows)
    if not shared:
        return _states(model, rows.ids, rows.positions, Packed.of(rows))
    read, places, layout = _arrange(rows, shared)
    return _states(model, rows.ids[read], rows.positions[read], layout)[places]


def _states(
    model: PreTrainedModel, ids: Int[Tensor, " read"], positions: Int[Tensor, " read"], layout: Packed
) -> Float[Tensor, "read dim"]:
    with layout_attention(model.config):
        outputs = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, layout=layout)
    return outputs.last_hidden_state[0]


def _shared(rows: TokenRows) -> list[list[int]]:
    """The rows of each prompt that several have."""
    found: dict[int, list[int]] = defaultdict(list)
    for row, (number, length) in enumerate(rows.prompts):
        if length:
            found[number].append(row)
    return [each for each in found.values() if len(each) > 1]


def _arrange(rows: TokenRows, shared: list[list[int]]) -> tuple[Int[Tensor, " read"], Int[Tensor, " tokens"], Packed]:
    """The tokens to read, the place of every token among them, and their layout.

    First come whole rows and shared prompts, longest first, and then the rests of the rows of each shared prompt.
    """
    starts = rows.starts
    prompts = {row: rows.prompts[row][1] for members in shared for row in members}
    first = {row: members[0] for members in shared for row in members}
    heads = [(prompts.get(row, length), row) for row, length in enumerate(rows.lengths) if first.get(row, row) == row]
    heads.sort(key=lambda head: -head[0])
    lengths = tuple(length for length, _ in heads)
    begins = {row: end - length for end, (length, row) in zip(accumulate(lengths), heads, strict=True)}
    read = [starts[row] + place for length, row in heads for place in range(length)]
    places = [0] * len(rows.ids)
    for row, length in enumerate(rows.lengths):
        head = first.get(row, row)
        length = prompts.get(row, length)
        places[starts[row] : starts[row] + length] = range(begins[head], begins[head] + length)
    rests: list[tuple[slice, tuple[int, ...]]] = []
    for members in shared:
        prompt = prompts[members[0]]
        longer = [row for row in members if rows.lengths[row] > prompt]
        for row in longer:
            rest = range(starts[row] + prompt, starts[row] + rows.lengths[row])
            places[rest.start : rest.stop] = range(len(read), len(read) + len(rest))
            read.extend(rest)
        if longer:
            begin = begins[members[0]]
            rests.append((slice(begin, begin + prompt), tuple(rows.lengths[row] - prompt for row in longer)))
    device = rows.ids.device
    layout = Packed.of(TokenRows(rows.ids, lengths), rests)
    return torch.tensor(read, device=device), torch.tensor(places, device=device), layout

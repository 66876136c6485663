"""Records to padded batches for the two supervised stages: right-padded, the completion's tokens marked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kedge.data.records import Comparison, Demonstration, Ranking
from kedge.data.tokens import EncodedExample, Padded, encode_example, pad_right
from kedge.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "ComparisonBatch",
    "DemonstrationBatch",
    "RankingBatch",
    "collate_comparisons",
    "collate_demonstrations",
    "collate_rankings",
]


@dataclass(frozen=True)
class DemonstrationBatch:
    """Demonstrations as the supervised loss reads them.

    Attributes:
        ids: prompt and completion, right-padded.
        attention_mask: True on real tokens, EOS among them.
        loss_mask: True on the completion's tokens, EOS among them: the tokens to be predicted.
    """

    ids: Int[Tensor, "batch width"]
    attention_mask: Bool[Tensor, "batch width"]
    loss_mask: Bool[Tensor, "batch width"]


@dataclass(frozen=True)
class ComparisonBatch:
    """Pairs for one forward pass: the chosen texts in the first half of the rows, the rejected in the second.

    Attributes:
        ids: prompt and answer, right-padded.
        attention_mask: True on real tokens, EOS among them.
        margins: by how much each chosen score should lead; 0 where a pair asks for none.
    """

    ids: Int[Tensor, "two_pairs width"]
    attention_mask: Bool[Tensor, "two_pairs width"]
    margins: Float[Tensor, " pairs"]


@dataclass(frozen=True)
class RankingBatch:
    """Ranked lists for one forward pass: row `prompt · K + k` is that prompt's answer k.

    Attributes:
        ids: prompt and answer, right-padded.
        attention_mask: True on real tokens, EOS among them.
        ranks: a smaller rank is better.
    """

    ids: Int[Tensor, "rows width"]
    attention_mask: Bool[Tensor, "rows width"]
    ranks: Float[Tensor, "prompts responses"]


def collate_demonstrations(
    demonstrations: Sequence[Demonstration], tokenizer: PreTrainedTokenizerBase
) -> DemonstrationBatch:
    """Encode and pad demonstrations.

    Raises:
        ModelError: The tokenizer has no pad token of its own.

    Source: spec §2.1, §3.7.
    """
    examples = [encode_example(tokenizer, entry.prompt, entry.completion) for entry in demonstrations]
    padded = _padded(examples, tokenizer)
    columns = torch.arange(padded.ids.shape[1])
    starts = torch.tensor([[len(example.prompt)] for example in examples])
    return DemonstrationBatch(padded.ids, padded.mask, padded.mask & (columns >= starts))


def collate_comparisons(comparisons: Sequence[Comparison], tokenizer: PreTrainedTokenizerBase) -> ComparisonBatch:
    """Encode and pad pairs, chosen and rejected in one batch.

    Raises:
        ModelError: The tokenizer has no pad token of its own.

    Source: spec §3.9.
    """
    pairs = [(entry.prompt, entry.chosen) for entry in comparisons]
    pairs += [(entry.prompt, entry.rejected) for entry in comparisons]
    padded = _padded((encode_example(tokenizer, *pair) for pair in pairs), tokenizer)
    return ComparisonBatch(padded.ids, padded.mask, torch.tensor([entry.margin or 0.0 for entry in comparisons]))


def collate_rankings(rankings: Sequence[Ranking | Comparison], tokenizer: PreTrainedTokenizerBase) -> RankingBatch:
    """Encode and pad ranked lists of one length; a comparison is a list of two.

    Raises:
        ModelError: The tokenizer has no pad token of its own.
        ValueError: The lists differ in length.

    Source: spec §3.10.
    """
    lists = [_ranking(entry) for entry in rankings]
    sizes = sorted({len(entry.responses) for entry in lists})
    if len(sizes) > 1:
        raise ValueError(f"ranked lists of {sizes} answers cannot share a batch: group them by length")
    rows = ((entry.prompt, response) for entry in lists for response in entry.responses)
    padded = _padded((encode_example(tokenizer, *row) for row in rows), tokenizer)
    return RankingBatch(padded.ids, padded.mask, torch.tensor([entry.ranks for entry in lists]))


def _ranking(entry: Ranking | Comparison) -> Ranking:
    if isinstance(entry, Ranking):
        return entry
    return Ranking(entry.prompt, (entry.chosen, entry.rejected), (0.0, 1.0))


def _padded(examples: Iterable[EncodedExample], tokenizer: PreTrainedTokenizerBase) -> Padded:
    pad = cast("int | None", tokenizer.pad_token_id)
    if pad is None or pad == tokenizer.eos_token_id:
        raise ModelError("the tokenizer's pad token is missing or is its EOS: give it one of its own")
    return pad_right([[*example.prompt, *example.completion] for example in examples], pad)

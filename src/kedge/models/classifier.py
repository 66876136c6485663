"""Scores whole texts by a sequence classifier's own forward pass, in batches that do not change the scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from kedge.errors import ModelError
from kedge.models.packing.probe import Findings, trial_rows
from kedge.models.packing.rows import TokenRows
from kedge.models.pretrained import loading_reason, num_embeddings, rope_switch
from kedge.system.ranks import ALONE, Ranks

__all__ = ["BATCHINGS", "Batching", "classify", "find_batching"]

Batching = Literal["right", "left", "equal"]
"""Rows padded on the right, padded on the left, or only rows of equal length in one batch."""
BATCHINGS: tuple[Batching, ...] = ("right", "left", "equal")
TOLERANCE = 1e-3
"""Largest error of a score, in standard deviations of the scores of different texts."""


def classify(classifier: PreTrainedModel, rows: TokenRows, *, batching: Batching) -> Float[Tensor, " rows"]:
    """The classifier's output for each row, float32.

    Args:
        classifier: A sequence classifier with one label.
        rows: Token ids.
        batching: How rows of different lengths share a batch.
    """
    classifier.eval()
    order, switch = rows.order(), rope_switch(classifier)
    by_length = TokenRows(rows.ids[rows.token_indices(order)], tuple(rows.lengths[row] for row in order))

    def batch_of(length: int) -> object:
        return length if batching == "equal" else switch is not None and length > switch

    scores = []
    for part in by_length.split(len(list(lengths)) for _, lengths in groupby(by_length.lengths, batch_of)):
        # A decoder finds a row's last token by its pad id, so no other filler will do.
        ids, mask = part.pad(classifier.config.get_text_config().pad_token_id or 0, left=batching == "left")
        scores.append(classifier(input_ids=ids, attention_mask=mask.long()).logits.float().squeeze(-1))
    return torch.cat(scores)[torch.tensor(order, device=rows.ids.device).argsort()]


@torch.no_grad()
def find_batching(
    classifier: PreTrainedModel, by_trunk: Callable[[TokenRows], Tensor] | None = None, ranks: Ranks = ALONE
) -> Batching | Literal["trunk"]:
    """The fastest way to score rows that gives each the score that transformers gives it alone.

    Args:
        classifier: A sequence classifier with one label.
        by_trunk: Another way to compute its outputs, from token states; tried first.
        ranks: If they shard their models, the first finds it out for all.

    Raises:
        ModelError: The model cannot score a text, scores it differently each time, or needs it alone in a batch.
    """
    kind, findings = type(classifier).__name__, Findings(classifier, ranks)

    rows = trial_rows(classifier, ending=_ending(classifier))

    def error(score: Callable[[TokenRows], Tensor]) -> float:
        expected, again = (_each_alone(classifier, rows) for _ in range(2))
        if _error(again, expected) > TOLERANCE:
            raise ModelError(f"reward model {kind} gives equal texts different scores; use another architecture")
        return _error(score(rows), expected)

    if by_trunk is not None and findings.error("scores by trunk", partial(error, by_trunk)) <= TOLERANCE:
        return "trunk"
    for batching in BATCHINGS:
        score = partial(classify, classifier, batching=batching)
        if findings.error(f"scores, {batching}", partial(error, score)) <= TOLERANCE:
            return batching
    raise ModelError(f"reward model {kind} scores a text differently if other texts are in its batch")


def _ending(classifier: PreTrainedModel) -> int | None:
    """The token that ends a text, which encoder-decoders look for; None if config.json names none of the vocabulary."""
    config, num_tokens = classifier.config.get_text_config(), num_embeddings(classifier)
    named = getattr(config, "eos_token_id", None)  # some encoders' configurations lack the field
    ends = named if isinstance(named, (list, tuple)) else [named]
    return next((end for end in ends if type(end) is int and 0 <= end < num_tokens), None)


def _each_alone(classifier: PreTrainedModel, rows: TokenRows) -> Float[Tensor, " rows"]:
    try:
        return torch.cat([classifier(input_ids=row[None]).logits[0].float() for row in rows.ids.split(rows.lengths)])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the model's code may raise anything
        raise ModelError(
            f"reward model {type(classifier).__name__} cannot score a text: {loading_reason(error)}"
        ) from error


@torch.no_grad()
def _error(ours: Float[Tensor, " rows"], theirs: Float[Tensor, " rows"]) -> float:
    """The largest error, in standard deviations of the scores; infinite for NaN."""
    rounding = 1e-5 * theirs.abs().max()
    errors = ((ours - theirs).abs() - rounding).clamp(min=0) / theirs.std().clamp(min=1e-30)
    return float(errors.nan_to_num(nan=math.inf).max())

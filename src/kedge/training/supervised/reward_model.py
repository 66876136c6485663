"""Trains a reward model: fit rankings, measure agreement, normalize scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from kedge.data import Comparison, Demonstration, Ranking, encode_example
from kedge.errors import ConfigError
from kedge.models import ScalarModel, score_rows
from kedge.models.pretrained import inner_matrices
from kedge.training.supervised.agreement import Agreement, measure_agreement
from kedge.training.supervised.loop import Outcome, TrainingSettings, check_lengths, train_supervised
from kedge.training.supervised.losses import RankedResponses, RankingLoss

Reference = Literal["demonstrations", "comparisons", "none"]
"""The texts on which the mean score is set to 0."""

MOST_REFERENCES = 512
"""Enough to know the mean score to a twentieth of its standard deviation; all of them may cost as much as training."""


@dataclass(frozen=True)
class RewardModelReport:
    """Results of training a reward model.

    Attributes:
        outcome: Steps taken, and the interruption if any.
        agreement: Metrics on the held-out prompts, before normalization; None without held-out prompts.
        mean: Mean score on the reference texts before normalization; 0 without normalization.
        std: Divisor of the scores; 1 if they were only shifted.
    """

    outcome: Outcome
    agreement: Agreement | None
    mean: float
    std: float


def train_reward_model(
    model: ScalarModel,
    tokenizer: PreTrainedTokenizerBase,
    comparisons: Sequence[Comparison | Ranking],
    *,
    held_out: Sequence[Comparison | Ranking] = (),
    demonstrations: Sequence[Demonstration] = (),
    normalize: Reference | None = None,
    normalize_scale: bool = False,
    **training: Any,
) -> RewardModelReport:
    """Train a reward model in place, measure it, and normalize its scores.

    Args:
        model: The model to train.
        tokenizer: The model's tokenizer.
        comparisons: Training pairs and ranked lists.
        held_out: Pairs and ranked lists of other prompts, for measurement only.
        demonstrations: Reference texts.
        normalize: The texts that get a mean score of 0: the demonstrations, or the preferred responses of the
            comparisons; None uses the demonstrations if there are any.
        normalize_scale: Also divide the scores by their standard deviation on those texts. σ(Δ) is then no longer the
            fitted probability.
        training: Learning rate, batch size and so on: the fields of `TrainingSettings`.

    Raises:
        ConfigError: `normalize` is "demonstrations", but none are given.
        DataError: A text is longer than the model's context.
    """
    settings = TrainingSettings(**training)
    train, evaluation = (
        [RankedResponses.encode(tokenizer, record) for record in records] for records in (comparisons, held_out)
    )
    reference = _reference_rows(normalize, [_row(tokenizer, record) for record in demonstrations], train)
    every_row = [row for example in [*train, *evaluation] for row in example.rows]
    check_lengths((len(row) for row in [*every_row, *reference]), model.context_length)

    outcome = train_supervised(
        RankingLoss(model, settings.precision),
        model.parameters(),
        train,
        settings,
        held_out=evaluation,
        inner_matrices=inner_matrices(model),
    )
    agreement = (
        measure_agreement(model, evaluation, precision=settings.precision, **settings.passes) if evaluation else None
    )
    mean = 0.0
    std = 1.0
    if reference:
        # fp32 regardless of the run's precision, because the shift is saved with the model.
        scores = score_rows(model, reference, **settings.passes)
        mean = float(scores.mean())
        # A single text, or equal scores, have a standard deviation of 0.
        std = float(scores.std(correction=0)) or 1.0 if normalize_scale else 1.0
        model.normalize(mean=mean, std=std)
    return RewardModelReport(outcome, agreement, mean, std)


def _reference_rows(
    normalize: Reference | None, demonstrations: list[list[int]], train: Sequence[RankedResponses]
) -> list[list[int]]:
    """The texts on which the mean score is set to 0: as many as tell it, evenly spread over those that there are."""
    if normalize == "demonstrations" and not demonstrations:
        raise ConfigError(
            "normalize='demonstrations' needs demonstrations; add some, or choose 'comparisons' or 'none'"
        )
    if normalize == "none":
        return []
    if normalize == "comparisons" or not demonstrations:
        demonstrations = [example.rows[0] for example in train]
    every = -(-len(demonstrations) // MOST_REFERENCES)
    return demonstrations[:: max(1, every)]


def _row(tokenizer: PreTrainedTokenizerBase, record: Demonstration) -> list[int]:
    example = encode_example(tokenizer, record.prompt, record.completion, read=record.read)
    return [*example.prompt, *example.completion]

"""Training a reward model: rank, measure, normalise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase
from typing_extensions import Unpack

from kedge.data import Comparison, Demonstration, Ranking, encode_example
from kedge.errors import ConfigError
from kedge.models import ScalarModel
from kedge.training.supervised.agreement import Agreement, measure_agreement, score_rows
from kedge.training.supervised.loop import Outcome, TrainingSettings, check_lengths, train_supervised
from kedge.training.supervised.losses import RankedResponses, RankingLoss

__all__ = ["RewardModelReport", "train_reward_model"]

Reference = Literal["demonstrations", "comparisons", "none"]


@dataclass(frozen=True)
class RewardModelReport:
    """How the training of a reward model went.

    Attributes:
        outcome: Steps taken, interrupted or not.
        agreement: Figures on the held-out prompts, measured before the scores were normalised; None without any.
        mean: Mean score on the texts of the normalisation, before it; 0 where nothing was normalised.
        std: By what the scores were divided; 1 where they were only shifted.
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
    precision: Literal["fp32", "bf16"] = "fp32",
    **training: Unpack[TrainingSettings],
) -> RewardModelReport:
    """Train a reward model in place, measure it, and normalise its scores.

    Args:
        model: What learns.
        tokenizer: The model's.
        comparisons: Pairs and ranked lists to learn from.
        held_out: Pairs and lists of other prompts, which are only measured on.
        demonstrations: Texts whose mean score is to be 0.
        normalize: The texts that count for it: the demonstrations, or the preferred answers of the comparisons; None
            takes demonstrations where there are any.
        normalize_scale: Divide the scores by their standard deviation on those texts as well. σ(Δ) is then no longer
            the probability that was fitted.
        precision: Number format of the matrix products.
        training: Learning rate, batch size and so on: the arguments of `train_supervised`.

    Raises:
        ConfigError: Demonstrations are to count, and there are none.
        DataError: A text is longer than the model's context.
    """
    train, evaluation = (
        [RankedResponses.encode(tokenizer, record) for record in records] for records in (comparisons, held_out)
    )
    reference = _reference_rows(normalize, [_row(tokenizer, record) for record in demonstrations], train)
    every_row = [row for example in [*train, *evaluation] for row in example.rows]
    check_lengths((len(row) for row in [*every_row, *reference]), model.context_length)

    outcome = train_supervised(
        RankingLoss(model, precision), model.parameters(), train, held_out=evaluation, **training
    )
    budget = training.get("micro_batch_tokens")
    agreement = (
        measure_agreement(model, evaluation, precision=precision, micro_batch_tokens=budget) if evaluation else None
    )
    mean, std = 0.0, 1.0
    if reference:
        # In fp32 whatever the run's precision: the shift outlives the run.
        scores = score_rows(model, reference, micro_batch_tokens=budget)
        mean = float(scores.mean())
        # One text, or texts that all score the same, have no scale to divide by.
        std = float(scores.std(correction=0)) or 1.0 if normalize_scale else 1.0
        model.normalize(mean=mean, std=std)
    return RewardModelReport(outcome, agreement, mean, std)


def _reference_rows(
    normalize: Reference | None, demonstrations: list[list[int]], train: Sequence[RankedResponses]
) -> list[list[int]]:
    """The texts on which the mean score is to be 0."""
    if normalize == "demonstrations" and not demonstrations:
        raise ConfigError(
            "normalize is 'demonstrations', and there are none: give some, or choose 'comparisons' or 'none'"
        )
    if normalize == "none":
        return []
    if normalize == "comparisons" or not demonstrations:
        return [example.rows[0] for example in train]
    return demonstrations


def _row(tokenizer: PreTrainedTokenizerBase, record: Demonstration) -> list[int]:
    example = encode_example(tokenizer, record.prompt, record.completion)
    return [*example.prompt, *example.completion]

"""Trains a reward model: fit rankings, measure agreement with held-out ones, normalize scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kedge.algorithm.preference import Ties
from kedge.algorithm.statistics import Calibration, calibration
from kedge.data import Comparison, Demonstration, Ranking, encode_example
from kedge.models import Precision, ScalarModel, score_rows
from kedge.models.pretrained import inner_matrices
from kedge.ranks import ALONE, PassTokens, Ranks
from kedge.training.supervised.loop import Outcome, TrainingSettings, check_lengths, train_supervised
from kedge.training.supervised.losses import RankedResponses, RankingLoss
from kedge_base.errors import ConfigError, ModelError
from kedge_base.intervals import Interval, share_interval
from kedge_base.machine.memory import in_phase

Reference = Literal["demonstrations", "comparisons", "none"]
"""The texts on which the mean score is set to 0."""

MOST_REFERENCES = 512
"""Maximum number of texts on which the mean score is measured: enough for a standard error of a twentieth of the
scores' standard deviation. Scoring all texts may cost as much as training.
"""

TIE_RATE = 0.02
"""Peak learning rate of the parameter of ties. At that of a pretrained model, it would stay where it starts."""

NUM_QUANTILES = 21
"""Quantiles of the scores at 0, 5, …, 100%."""


@dataclass(frozen=True)
class Agreement:
    """Metrics on held-out prompts.

    Attributes:
        accuracy: Share of a prompt's pairs ordered correctly, ties count half; mean over prompts.
        length_accuracy: Accuracy of a baseline that prefers the longer response.
        calibration: Predicted against actual accuracy, over all pairs.
        chosen: Score of the better response of each pair.
        rejected: Score of the worse response of each pair.
    """

    accuracy: Interval
    length_accuracy: Interval
    calibration: Calibration
    chosen: list[float]
    rejected: list[float]

    def summary(self) -> dict[str, Any]:
        """The metrics as JSON values."""
        found = self.calibration
        bins = zip(*(each.tolist() for each in (found.confidence, found.accuracy, found.counts)), strict=True)
        return {
            "accuracy": self.accuracy.as_json(),
            "length_accuracy": self.length_accuracy.as_json(),
            "num_pairs": len(self.chosen),
            "calibration_error": self.calibration.error,
            "calibration_bins": [
                {"confidence": confidence, "accuracy": accuracy, "num_pairs": count}
                for confidence, accuracy, count in bins
            ],
            "chosen_scores": _quantiles(self.chosen),
            "rejected_scores": _quantiles(self.rejected),
        }


@dataclass(frozen=True)
class RewardModelReport:
    """Results of training a reward model.

    Attributes:
        outcome: Steps taken, and the interruption if any.
        agreement: Metrics on the held-out prompts, before normalization; None without held-out prompts.
        mean: Mean score on the reference texts before normalization; 0 without normalization.
        std: Divisor of the scores; 1 if they were only shifted.
        tie: The parameter of ties, for scores before normalization; None if ties were dropped.
    """

    outcome: Outcome
    agreement: Agreement | None
    mean: float
    std: float
    tie: float | None


def train_reward_model(
    model: ScalarModel,
    tokenizer: PreTrainedTokenizerBase,
    comparisons: Sequence[Comparison | Ranking],
    *,
    held_out: Sequence[Comparison | Ranking] = (),
    demonstrations: Sequence[Demonstration] = (),
    normalize: Reference | None = None,
    normalize_scale: bool = False,
    ties: Ties = "drop",
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
        normalize_scale: Also divide the scores by their standard deviation on the texts of `normalize`. σ(Δ) is then no
            longer the fitted probability.
        ties: What equal ranks are; see `ranking_loss`. The parameter is learned with the model, but starts
            at the share of ties in the comparisons and has its own learning rate, `TIE_RATE`.
        training: Learning rate, batch size and so on: the fields of `TrainingSettings`.

    Raises:
        ConfigError: `normalize` is "demonstrations", but none are given.
        ModelError: `normalize_scale` is set, but scores cannot be scaled.
        DataError: A text is longer than the model's context.
    """
    settings = TrainingSettings(**training)
    train, evaluation = (
        [RankedResponses.encode(tokenizer, record) for record in records] for records in (comparisons, held_out)
    )
    reference = _reference_rows(normalize, [_row(tokenizer, record) for record in demonstrations], train)
    if reference and normalize_scale and model.head is None:
        raise ModelError(
            "reward_model.normalize_scale=true does not work with an encoder with a pooled head, whose scores can be "
            "shifted but not scaled; use false"
        )
    every_row = [row for example in [*train, *evaluation] for row in example.rows]
    check_lengths((len(row) for row in [*every_row, *reference]), model.context_length)

    loss = RankingLoss.start(model, settings.precision, ties, train)
    own = [] if loss.tie is None else [loss.tie]
    outcome = train_supervised(
        loss,
        [*model.parameters(), *own],
        train,
        settings,
        held_out=evaluation,
        inner_matrices=inner_matrices(model),
        head_parameters=own,
        head_rate=TIE_RATE / settings.learning_rate if settings.learning_rate else 1.0,
    )
    ordered = [example for example in evaluation if example.ranks[0] < example.ranks[-1]]
    agreement = measure_agreement(model, ordered, precision=settings.precision, **settings.passes) if ordered else None
    mean = 0.0
    std = 1.0
    if reference:
        # fp32 regardless of the run's precision, because the shift is saved with the model.
        scores = score_rows(model, reference, **settings.passes)
        mean = float(scores.mean())
        # A single text, or equal scores, have a standard deviation of 0.
        std = float(scores.std(correction=0)) or 1.0 if normalize_scale else 1.0
        model.normalize(mean=mean, std=std)
    return RewardModelReport(outcome, agreement, mean, std, None if loss.tie is None else loss.tie.item())


def _reference_rows(
    normalize: Reference | None, demonstrations: list[list[int]], train: Sequence[RankedResponses]
) -> list[list[int]]:
    """Return the texts on which the mean score is set to 0: at most `MOST_REFERENCES`, evenly spread over all."""
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


@in_phase("evaluation")
def measure_agreement(
    model: ScalarModel,
    examples: Sequence[RankedResponses],
    *,
    precision: Precision = "fp32",
    micro_batch_tokens: PassTokens = None,
    ranks: Ranks = ALONE,
) -> Agreement:
    """Measure a reward model on responses with a known order.

    Args:
        model: The reward model, before `normalize_scale`, which would change the calibration.
        examples: Prompts with ranked responses, at least one.
        precision: Number format of the matrix products.
        micro_batch_tokens: Tokens per forward pass; None uses a single pass.
        ranks: The ranks that share the responses; each has all of them.

    Source: spec §3, §11.
    """
    rows = [row for example in examples for row in example.rows]
    scores = score_rows(model, rows, precision=precision, micro_batch_tokens=micro_batch_tokens, ranks=ranks)
    parts = scores.split([len(example.rows) for example in examples])
    pairs = [split_pairs(part, example.ranks) for part, example in zip(parts, examples, strict=True)]
    lengths = [split_pairs(torch.tensor(example.lengths).float(), example.ranks) for example in examples]
    chosen, rejected = (torch.cat(side) for side in zip(*pairs, strict=True))
    return Agreement(
        _accuracy(pairs), _accuracy(lengths), calibration(chosen - rejected), chosen.tolist(), rejected.tolist()
    )


def split_pairs(values: Tensor, ranks: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Split the values of each untied pair of a prompt's responses into the better and the worse response's."""
    pairs = [(i, j) for i, better in enumerate(ranks) for j, worse in enumerate(ranks) if better < worse]
    better, worse = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).unbind(dim=1)
    return values[better], values[worse]


def _quantiles(scores: Sequence[float]) -> list[float]:
    """Evenly spaced quantiles, from minimum to maximum; empty without scores."""
    values = torch.tensor(scores, dtype=torch.float64)
    levels = torch.linspace(0, 1, NUM_QUANTILES, dtype=torch.float64)
    return torch.quantile(values, levels).tolist() if scores else []


def _accuracy(pairs: Sequence[tuple[Tensor, Tensor]]) -> Interval:
    # Prompts are independent; the pairs of one prompt are not.
    return share_interval([float((1 + torch.sign(better - worse)).mean() / 2) for better, worse in pairs])

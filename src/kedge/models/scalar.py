"""Reward model and critic: a transformer with a scalar output at each position, or one score per text."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kedge.algorithm.critic import Bins
from kedge.algorithm.prefixes import Pieces, prefix_tree
from kedge.models.adapters import Adapter
from kedge.models.heads import HistogramHead, ValueHead, Values, read_values, scale_head
from kedge.models.packing.probe import Findings, trial_rows
from kedge.models.packing.rows import TokenRows
from kedge.models.packing.trunk import Trunk
from kedge.models.precision import Precision, autocast
from kedge.models.pretrained import (
    NORMALIZATION_KEY,
    PRIVILEGED_KEY,
    context_length,
    disable_dropout,
    fit_embedding,
    loading_reason,
    num_embeddings,
    rope_switch,
)
from kedge.ranks import ALONE, PassTokens, Ranks, evaluate_in_passes
from kedge_base.errors import ModelError

Batching = Literal["right", "left", "equal"]
"""Pad rows on the right or on the left, or batch only rows of equal length."""
BATCHINGS: tuple[Batching, ...] = ("right", "left", "equal")
SCORE_TOLERANCE = 1e-3
"""Largest error of a score, in standard deviations of the scores of different texts."""


class ScalarModel(nn.Module):
    """An `AutoModelForSequenceClassification` with one label, evaluated at every position.

    score = head(hidden state of the last real token) − shift

    Args:
        classifier: The transformers model; its dropout is disabled.
        tokenizer: Supplies the pad token.
        device: The device of the weights; needed where another rank has them.
        ranks: If they shard their models, the first has the weights, and checks them for all.

    Attributes:
        trained_here: kedge trained the model, so texts are presented as in training.
        pads_with_eos: The source pads with EOS, so the model never took a score at EOS.
        trunk: Computes states at every token; None if only whole texts have a score.
        batching: How texts of different lengths share a batch, without a trunk.
        has_values: Every token has a score that only depends on earlier tokens, as a critic requires.

    Raises:
        ModelError: The model has more than one label, fewer embeddings than the tokenizer has tokens, or a
            non-finite score shift; or its scores depend on the other texts of a batch (see `find_batching`).

    Source: spec §1 (read-out), §3.8, §3.11, §7.34.
    """

    shift: Tensor
    holds_bf16 = False  # see `hold_frozen`
    rounding_error: float | None = None
    """Mean change of a score due to the number format; None if not measured."""
    on_every_rank = False  # see `Loaded`
    host: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context for passes: `HostWeights.on_device` if the weights are in the host's memory between passes."""
    source = ""  # the folder or hub id
    has_new_head = False
    adapter: Adapter | None = None
    """The adapter, on a base that other models may share; None for a model with its own weights."""

    def __init__(
        self,
        classifier: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        device: torch.device | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        if classifier.config.num_labels != 1:
            raise ModelError(f"a reward model needs exactly one label; this model has {classifier.config.num_labels}")
        pads = classifier.config.get_text_config().pad_token_id
        self.pads_with_eos = pads is not None and pads == tokenizer.eos_token_id
        fit_embedding(classifier, tokenizer)
        disable_dropout(classifier)
        self.classifier = classifier
        self.trained_here = NORMALIZATION_KEY in vars(classifier.config)
        shift = checked_number(classifier.config, NORMALIZATION_KEY, 0.0)
        self.register_buffer("shift", torch.tensor(shift, device=device or classifier.device), persistent=False)
        self.batching: Batching
        self.trunk, self.batching = self._find_trunk(ranks)
        # Tested now rather than in the first pass of a run.
        self.has_values = self.trunk is not None and self.trunk.is_causal

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.shift.device

    @property
    def context_length(self) -> int | None:
        """Maximum tokens per row; None if the architecture has no limit."""
        return context_length(self.classifier)

    @property
    def privileged(self) -> str | None:
        """The template of a critic's privileged information, from `config.json`; None without it."""
        return getattr(self.classifier.config, PRIVILEGED_KEY, None)

    @property
    def shares_up_to(self) -> float:
        """Maximum length of rows that can share a prefix in a pass; 0 if sharing does not work."""
        return 0 if self.trunk is None else self.trunk.shares_up_to

    def pieces(self, rows: Sequence[Sequence[int]]) -> list[Pieces]:
        """Split whole rows of token ids into the pieces that they share in a pass of this model."""
        longest = max(map(len, rows), default=0)
        if longest > self.shares_up_to:
            return [((number, len(row)),) for number, row in enumerate(rows)]
        return prefix_tree([tuple(row) for row in rows], longest=longest)

    @property
    def head(self) -> nn.Linear | None:
        """The linear layer on a decoder's hidden states; None for an encoder with a pooled head."""
        head = self.value_head
        return head if isinstance(head, nn.Linear) else None

    @property
    def value_head(self) -> ValueHead | None:
        """The head on a decoder's hidden states, with a scalar output or a histogram."""
        head = dict(self.classifier.named_children()).get("score")
        return head if isinstance(head, nn.Linear | HistogramHead) else None

    def predict_histogram(self, bins: Bins) -> ScalarModel:
        """Replace the scalar head of a critic by a histogram of the return, with the same values; returns itself."""
        head = self.head
        assert head is not None, "a critic has a linear head"
        shift = float(self.shift)
        histogram = HistogramHead(head.in_features, bins, device=self.device).start_from(head, shift=shift)
        self.classifier.add_module("score", histogram)
        self.shift.zero_()
        return self

    def read_values(self, rows: TokenRows) -> Values:
        """The output at every token, float32.

        Raises:
            ModelError: The model only scores whole texts (an encoder, for example), so it cannot serve as a critic.
        """
        if self.trunk is None or not self.has_values:
            raise ModelError(f"{type(self.classifier).__name__} only scores whole texts; a critic needs a decoder")
        return self._read(self.trunk.hidden(rows))

    def scores(self, rows: TokenRows) -> Float[Tensor, " rows"]:
        """One score per row, taken at its last token (spec §2.4)."""
        if self.trunk is not None:
            return self._read(self.trunk.hidden(rows)[rows.last]).values
        return classify(self.classifier, rows, batching=self.batching) - self.shift

    def _find_trunk(self, ranks: Ranks) -> tuple[Trunk | None, Batching]:
        """Return the trunk if scores are the head's outputs at the last token; else find how to batch whole texts."""
        trunk = None
        head = self.head
        if head is not None:
            with suppress(ModelError):
                trunk = Trunk(cast(PreTrainedModel, self.classifier.base_model), ranks)

        def by_trunk(rows: TokenRows) -> Tensor:
            assert trunk is not None
            assert head is not None
            return read_values(head, trunk.hidden(rows)[rows.last]).values  # a large shift would round these

        batching = find_batching(self.classifier, None if trunk is None else by_trunk, ranks)
        return (trunk, "right") if batching == "trunk" else (None, batching)

    def _read(self, hidden: Tensor) -> Values:
        head = self.value_head
        assert head is not None
        values, logits = read_values(head, hidden)
        return Values(values - self.shift, logits)

    @torch.no_grad()
    def normalize(self, *, mean: float, std: float = 1.0) -> None:
        """Change the score s to (s − mean)/std; stored in the weights and the configuration, so it survives a reload.

        Source: spec §3.11 (S3; Ziegler's gain and bias).
        """
        self.rescale(1 / std, -mean / std)

    @torch.no_grad()
    def rescale(self, gain: float, offset: float) -> None:
        """Change every output s to gain·s + offset, in the weights and the configuration."""
        if gain != 1.0:
            head = self.head
            assert head is not None, "the outputs of a pooled head cannot be scaled"
            scale_head(head, gain)
        self.shift.mul_(gain).sub_(offset)
        setattr(self.classifier.config, NORMALIZATION_KEY, float(self.shift))


def checked_number(config: PreTrainedConfig, name: str, default: float) -> float:
    """Check a number in a configuration, which comes from a file.

    Raises:
        ModelError: It is not a finite number.
    """
    value: object = getattr(config, name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < sys.float_info.max:  # nor NaN
        raise ModelError(f"the reward model's {name} is {value!r}; it must be a finite number")
    return float(value)


@torch.no_grad()
def score_rows(
    model: ScalarModel,
    rows: Sequence[Sequence[int]],
    *,
    precision: Precision = "fp32",
    micro_batch_tokens: PassTokens = None,
    ranks: Ranks = ALONE,
) -> Float[Tensor, " rows"]:
    """Score many rows of token ids; float32 on the CPU, in the given order.

    A pass reads shared prefixes only once.

    Args:
        model: The reward model.
        rows: Token ids, at least one per row.
        precision: Number format of the matrix products.
        micro_batch_tokens: Tokens per forward pass; None uses a single pass. It only affects rounding.
        ranks: Ranks that divide the rows among them; each passes all rows.
    """
    if not rows:
        return torch.empty(0)
    pieces = model.pieces(rows)

    def score(chosen: list[int]) -> list[Tensor]:
        part = TokenRows.of([rows[row] for row in chosen], model.device, [pieces[row] for row in chosen])
        with autocast("bf16" if model.holds_bf16 else precision, model.device):
            return [model.scores(part).float().cpu()]

    with model.host():
        [scores] = evaluate_in_passes(
            score, [len(row) for row in rows], micro_batch_tokens, prompts=pieces, ranks=ranks
        )
    return scores


def classify(classifier: PreTrainedModel, rows: TokenRows, *, batching: Batching) -> Float[Tensor, " rows"]:
    """The classifier's output for each row, float32.

    Args:
        classifier: A sequence classifier with one label.
        rows: Token ids.
        batching: How rows of different lengths share a batch.
    """
    classifier.eval()
    order = rows.order()
    sides = rows.take(order).apart(rope_switch(classifier))
    scores = []
    for part in (part for side in sides for part in side.batches(equal=batching == "equal")):
        # A decoder finds a row's last token by the pad id, so no other filler would work.
        ids, mask = part.pad(classifier.config.get_text_config().pad_token_id or 0, left=batching == "left")
        scores.append(classifier(input_ids=ids, attention_mask=mask.long()).logits.float().squeeze(-1))
    return torch.cat(scores)[torch.tensor(order, device=rows.ids.device).argsort()]


@torch.no_grad()
def find_batching(
    classifier: PreTrainedModel, by_trunk: Callable[[TokenRows], Tensor] | None = None, ranks: Ranks = ALONE
) -> Batching | Literal["trunk"]:
    """Find the fastest way to score rows in batches that reproduces transformers' score of each row alone.

    Args:
        classifier: A sequence classifier with one label.
        by_trunk: Computes its outputs from token states instead; tried first.
        ranks: If they shard their models, the first rank runs the tests for all.

    Raises:
        ModelError: The model cannot score a text, scores it differently each time, or differently in any batch.
    """
    kind = type(classifier).__name__
    findings = Findings(classifier, ranks)
    rows = trial_rows(classifier, ending=_ending(classifier))

    def error(score: Callable[[TokenRows], Tensor]) -> float:
        expected, again = (_each_alone(classifier, rows) for _ in range(2))
        if _error(again, expected) > SCORE_TOLERANCE:
            raise ModelError(f"reward model {kind} gives equal texts different scores; use another architecture")
        return _error(score(rows), expected)

    if by_trunk is not None and findings.error("scores by trunk", partial(error, by_trunk)) <= SCORE_TOLERANCE:
        return "trunk"
    for batching in BATCHINGS:
        score = partial(classify, classifier, batching=batching)
        if findings.error(f"scores, {batching}", partial(error, score)) <= SCORE_TOLERANCE:
            return batching
    raise ModelError(f"reward model {kind} scores a text differently if other texts are in its batch")


def _ending(classifier: PreTrainedModel) -> int | None:
    """Return the end token, which encoder-decoders look for in a text; None if config.json names no token of the
    vocabulary.
    """
    config = classifier.config.get_text_config()
    num_tokens = num_embeddings(classifier)
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

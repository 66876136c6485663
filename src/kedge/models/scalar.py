"""Reward model and critic: a transformer with one number per position."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from kedge.errors import ModelError
from kedge.models.heads import initialise_head
from kedge.models.packing.rows import TokenRows, budget_batches
from kedge.models.packing.trunk import Trunk
from kedge.models.precision import autocast
from kedge.models.pretrained import context_length, disable_dropout, fit_embedding, load_pretrained

__all__ = ["ScalarModel", "load_scalar_model", "score_rows"]

NORMALIZATION_KEY = "kedge_score_shift"


class ScalarModel(nn.Module):
    """An `AutoModelForSequenceClassification` with one label, read position by position.

    score = head(hidden state of the last real token) − shift

    Args:
        classifier: The transformers model; its dropout is switched off.
        tokenizer: Names the pad token.

    Raises:
        ModelError: The model has more than one label, more tokens in the tokenizer than embeddings, or a normalisation
            that is no finite number.
    Source: spec §1 (read-out), §3.8, §3.11, §7.34.
    """

    shift: Tensor

    def __init__(self, classifier: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        if classifier.config.num_labels != 1:
            raise ModelError(f"a reward model has one label, this one has {classifier.config.num_labels}")
        fit_embedding(classifier, tokenizer)
        disable_dropout(classifier)
        self.classifier = classifier
        shift = _checked_shift(getattr(classifier.config, NORMALIZATION_KEY, 0.0))
        self.register_buffer("shift", torch.tensor(shift, device=classifier.device), persistent=False)
        # An encoder's pooled head reads whole texts: nobody asks for the states of its tokens.
        self.trunk = None if self.head is None else Trunk(cast(PreTrainedModel, classifier.base_model))

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.shift.device

    @property
    def context_length(self) -> int | None:
        """The most tokens that one row may hold, or None where the architecture sets no limit."""
        return context_length(self.classifier)

    @property
    def head(self) -> nn.Linear | None:
        """The linear layer that reads a decoder's hidden states, or None for an encoder with a pooled head."""
        head = dict(self.classifier.named_children()).get("score")
        return head if isinstance(head, nn.Linear) else None

    def values(self, rows: TokenRows) -> Float[Tensor, " tokens"]:
        """The scalar at every token, float32.

        Raises:
            ModelError: The model pools its input (an encoder): it can score a response but not be a critic.
        """
        if self.trunk is None:
            raise ModelError(f"{type(self.classifier).__name__} scores whole texts only; a critic needs a decoder")
        return self._read(self.trunk.hidden(rows))

    def scores(self, rows: TokenRows) -> Float[Tensor, " rows"]:
        """One score per row, read at its last token (spec §2.4)."""
        if self.trunk is None:
            ids, mask = rows.pad()
            outputs = self.classifier(input_ids=ids, attention_mask=mask.long())
            return outputs.logits.float().squeeze(-1) - self.shift
        return self._read(self.trunk.hidden(rows)[rows.last])

    def _read(self, hidden: Tensor) -> Tensor:
        assert self.head is not None
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden.float()).squeeze(-1) - self.shift

    @torch.no_grad()
    def normalize(self, *, mean: float, std: float = 1.0) -> None:
        """From now on score (s − mean)/std; stored in weights and configuration, so that a reload scores the same.

        Source: spec §3.11 (S3; Ziegler's gain and bias).
        """
        if std != 1.0:
            head = self.head
            if head is None:
                raise ModelError("scores of a pooled encoder can be shifted, not scaled")
            head.weight.div_(std)
            if head.bias is not None:
                head.bias.div_(std)
        self.shift.copy_((self.shift + mean) / std)
        setattr(self.classifier.config, NORMALIZATION_KEY, float(self.shift))


def _checked_shift(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < sys.float_info.max:  # nor NaN
        raise ModelError(f"the reward model's {NORMALIZATION_KEY} is {value!r}; expected a finite number")
    return float(value)


@torch.no_grad()
def score_rows(
    model: ScalarModel,
    rows: Sequence[Sequence[int]],
    *,
    precision: Literal["fp32", "bf16"] = "fp32",
    micro_batch_tokens: int | None = None,
) -> Float[Tensor, " rows"]:
    """The scores of many rows of token ids, float32 on the CPU, in the order given.

    Args:
        model: The reward model.
        rows: Token ids, at least one each.
        precision: Number format of the matrix products.
        micro_batch_tokens: Tokens per forward pass; None reads all at once. It changes no score by more than rounding.
    """
    scores = torch.empty(len(rows))
    for batch in budget_batches([len(row) for row in rows], micro_batch_tokens):
        with autocast(precision, model.device):
            scores[batch] = model.scores(TokenRows.of([rows[index] for index in batch], model.device)).float().cpu()
    return scores


def load_scalar_model(
    source: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    init: Literal["saved", "fresh"] = "saved",
) -> ScalarModel:
    """Load a reward model, or start one (or a critic) on the trunk of a causal LM.

    Args:
        source: A folder or hub id.
        tokenizer: The tokenizer that belongs to it, from `load_tokenizer`.
        device: Where it is to live.
        trust_remote_code: Run Python code that the model folder brings along.
        init: `saved` wants a trained head; `fresh` starts one with std 1/√(d+1) (spec §3.8).

    Raises:
        ModelError: See `load_pretrained`; `saved` and the source has no scalar head; weights of the trunk are missing.
    """
    labels = {} if init == "saved" else {"num_labels": 1}
    classifier, missing = load_pretrained(
        AutoModelForSequenceClassification, source, trust_remote_code=trust_remote_code, **labels
    )
    head = {name for name in missing if name.split(".")[0] in ("score", "classifier")}
    if init == "saved" and head:
        raise ModelError(
            f"model {str(source)!r} has no trained scalar head; a reward model is saved from "
            "AutoModelForSequenceClassification with one label (`kedge reward` makes one)"
        )
    if missing - head:
        raise ModelError(f"model {str(source)!r} lacks weights, first: {sorted(missing - head)[0]}")
    model = ScalarModel(classifier, tokenizer).to(device)
    if init == "fresh":
        if model.head is None:
            raise ModelError(
                f"{type(classifier).__name__} has no linear score head; start from a causal language model"
            )
        initialise_head(model.head, "normal")
        model.normalize(mean=-float(model.shift))  # a reward model that is started anew forgets its old shift
    return model

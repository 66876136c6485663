"""Reward model and critic: a transformer with one number per position."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from kedge.errors import ModelError
from kedge.models.heads import initialise_head
from kedge.models.pretrained import context_length, disable_dropout, fit_embedding, load_pretrained, run_trunk

__all__ = ["ScalarModel", "last_real_index", "load_scalar_model"]

NORMALIZATION_KEY = "kedge_score_shift"


def last_real_index(attention_mask: Bool[Tensor, "batch seq"] | Int[Tensor, "batch seq"]) -> Int[Tensor, "batch"]:
    """The index of each row's last real token, whichever side the padding is on."""
    columns = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return torch.where(attention_mask.bool(), columns, 0).amax(dim=-1)


class ScalarModel(nn.Module):
    """An `AutoModelForSequenceClassification` with one label, read position by position.

    score = head(hidden state of the last real token) − shift

    Args:
        classifier: The transformers model; its dropout is switched off.
        tokenizer: Names the pad token.

    Raises:
        ModelError: The model has more than one label, or more tokens in the tokenizer than embeddings.
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
        shift = float(getattr(classifier.config, NORMALIZATION_KEY, 0.0))
        self.register_buffer("shift", torch.tensor(shift, device=classifier.device), persistent=False)

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

    def values(self, input_ids: Int[Tensor, "batch seq"], attention_mask: Tensor) -> Float[Tensor, "batch seq"]:
        """The scalar at every position, float32.

        Raises:
            ModelError: The model pools its input (an encoder): it can score a response but not be a critic.
        """
        head = self.head
        if head is None:
            raise ModelError(f"{type(self.classifier).__name__} scores whole texts only; a critic needs a decoder")
        hidden = run_trunk(self.classifier.base_model, input_ids, attention_mask)
        with torch.autocast(hidden.device.type, enabled=False):
            return head(hidden.float()).squeeze(-1) - self.shift

    def scores(self, input_ids: Int[Tensor, "batch seq"], attention_mask: Tensor) -> Float[Tensor, "batch"]:
        """One score per row, read at the last real token; left and right padding give the same (spec §2.4)."""
        if self.head is None:
            outputs = self.classifier(input_ids=input_ids, attention_mask=attention_mask.long())
            return outputs.logits.float().squeeze(-1) - self.shift
        values = self.values(input_ids, attention_mask)
        return values.gather(1, last_real_index(attention_mask)[:, None]).squeeze(1)

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

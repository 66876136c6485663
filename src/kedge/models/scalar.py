"""Reward model and critic: a transformer with a scalar output at each position."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kedge.algorithm.histogram import Bins
from kedge.errors import ModelError
from kedge.models.adapters import Adapter, AdapterSettings
from kedge.models.bases import Bases
from kedge.models.classifier import Batching, classify, find_batching
from kedge.models.first_rank import give_model, inner_weights
from kedge.models.heads import HistogramHead, ValueHead, Values, find_head, initialize_head, read_values, scale_head
from kedge.models.offloading import HostWeights, at_hand
from kedge.models.packing.rows import TokenRows
from kedge.models.packing.trunk import Trunk
from kedge.models.precision import Precision, autocast
from kedge.models.pretrained import (
    NORMALIZATION_KEY,
    check_source,
    context_length,
    disable_dropout,
    find_adapter,
    fit_embedding,
    load_pretrained,
    local_folder,
    shares_base,
    take_settings,
)
from kedge.models.run_models import find_model
from kedge.system.ranks import ALONE, PassTokens, Ranks, tokens_of, within_memory

__all__ = ["ScalarModel", "load_scalar_model", "score_rows"]


class ScalarModel(nn.Module):
    """An `AutoModelForSequenceClassification` with one label, evaluated at every position.

    score = head(hidden state of the last real token) − shift

    Args:
        classifier: The transformers model; its dropout is disabled.
        tokenizer: Supplies the pad token.
        device: The device of the weights; needed where another rank has them.
        ranks: If they shard their models, the first has the weights, and checks them for all.

    Attributes:
        trained_here: Whether kedge trained it, so that it is read as in training.
        pads_with_eos: Whether it came with EOS as its padding, and so was never read at EOS.
        trunk: Gives states at every token; None if only whole texts have a score.
        batching: How texts of different lengths share a batch, without a trunk.
        has_values: Whether every token has a score that depends on earlier tokens only, as a critic needs.

    Raises:
        ModelError: The model has more than one label, fewer embeddings than the tokenizer has tokens, or a
            non-finite score shift; or its scores depend on the other texts of a batch (see `find_batching`).

    Source: spec §1 (read-out), §3.8, §3.11, §7.34.
    """

    shift: Tensor
    holds_bf16 = False  # see `hold_frozen`
    rounding_error: float | None = None
    """How much its number format changes its scores, where that was measured."""
    on_every_rank = False  # see `Loaded`
    host: HostWeights | None = None
    source = ""  # the folder or hub id
    has_new_head = False
    adapter: Adapter | None = None
    """What differs from a base whose weights other models share."""

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
        shift = _checked_number(classifier.config, NORMALIZATION_KEY, 0.0)
        self.register_buffer("shift", torch.tensor(shift, device=device or classifier.device), persistent=False)
        self.batching: Batching
        self.trunk, self.batching = self._find_trunk(ranks)
        # Found out now, not in the first pass of a run.
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
    def head(self) -> nn.Linear | None:
        """The linear layer on a decoder's hidden states; None for an encoder with a pooled head."""
        head = self._score_layer
        return head if isinstance(head, nn.Linear) else None

    @property
    def value_head(self) -> ValueHead | None:
        """The head on a decoder's hidden states, with a scalar output or a histogram."""
        head = self._score_layer
        return head if isinstance(head, nn.Linear | HistogramHead) else None

    def predict_histogram(self, bins: Bins) -> ScalarModel:
        """Replace the scalar head of a critic by a histogram of the return, with the same values; returns itself.

        Args:
            bins: The support.
        """
        head = self.head
        assert head is not None, "a critic has a linear head"
        shift = float(self.shift)
        histogram = HistogramHead(head.in_features, bins, device=self.device).start_from(head, shift=shift)
        self.classifier.add_module("score", histogram)
        self.shift.zero_()
        return self

    def values(self, rows: TokenRows) -> Float[Tensor, " tokens"]:
        """The value at every token, float32; see `read_values`."""
        return self.read_values(rows).values

    def read_values(self, rows: TokenRows) -> Values:
        """The output at every token, float32.

        Raises:
            ModelError: The model reads the whole text for its score (an encoder, for example), so it can score
                responses but not serve as a critic.
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
        """The trunk, if the scores are its head's outputs at the last token; else how to batch whole texts."""
        trunk, head = None, self.head
        if head is not None:
            with suppress(ModelError):
                trunk = Trunk(cast(PreTrainedModel, self.classifier.base_model), ranks)

        def by_trunk(rows: TokenRows) -> Tensor:
            assert trunk is not None
            assert head is not None
            return read_values(head, trunk.hidden(rows)[rows.last]).values  # a large shift would round them

        batching = find_batching(self.classifier, None if trunk is None else by_trunk, ranks)
        return (trunk, "right") if batching == "trunk" else (None, batching)

    @property
    def _score_layer(self) -> nn.Module | None:
        return dict(self.classifier.named_children()).get("score")

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
        if std != 1.0 and self.head is None:
            raise ModelError(
                "normalize_scale: the scores of an encoder with a pooled head can be shifted but not scaled"
            )
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


def _checked_number(config: PreTrainedConfig, name: str, default: float) -> float:
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

    Args:
        model: The reward model.
        rows: Token ids, at least one per row.
        precision: Number format of the matrix products.
        micro_batch_tokens: Tokens per forward pass; None uses a single pass. It changes scores by rounding only.
        ranks: They share the rows, which all of them have.
    """
    scores, own = torch.empty(len(rows)), torch.zeros(len(rows), dtype=torch.bool)
    lengths = [len(row) for row in rows]

    def score() -> None:
        for part in ranks.plan(lengths, tokens_of(micro_batch_tokens)):
            with autocast("bf16" if model.holds_bf16 else precision, model.device):
                found = model.scores(TokenRows.of([rows[index] for index in part.rows], model.device)).float().cpu()
            if part.counts:
                scores[part.rows], own[part.rows] = found, True

    with at_hand(model.host):
        within_memory(micro_batch_tokens, lengths, score, ranks=ranks)
    ranks.fill_in(own, scores)
    return scores


def load_scalar_model(
    source: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    init: Literal["saved", "fresh", "any"] = "saved",
    adapter: AdapterSettings | None = None,
    bases: Bases | None = None,
    ranks: Ranks = ALONE,
) -> ScalarModel:
    """Load a reward model, or create one (or a critic) on the trunk of a causal LM.

    If the ranks shard their models, `shard_model` is called next, if it can be; until then only the first has the
    trunk's weights.

    Args:
        source: A folder or hub id.
        tokenizer: Its tokenizer, from `load_tokenizer`.
        device: Target device.
        trust_remote_code: Run Python code from the model folder.
        init: `saved` requires a trained head; `fresh` creates one with std 1/√(d+1) (spec §3.8); `any` keeps a trained
            head, or creates one if the source lacks a head.
        adapter: Train an adapter on the frozen model: this new one, or, if the source is an adapter, that one further.
        bases: Where it finds the weights of its base, if it has them already, and which may load it in the host's
            memory; not for ranks that shard their models.
        ranks: The run's.

    Raises:
        ModelError: See `load_pretrained`; also if `saved` finds no scalar head, or weights of the trunk are missing.
    """
    if bases is None and adapter is not None:
        bases = Bases(trust_remote_code=trust_remote_code)
    device = torch.device(device) if bases is None else bases.place(device)
    start = find_adapter(source)
    if init == "saved" and start is not None and start.settings.get("task_type") == "CAUSAL_LM":
        raise ModelError(
            f"{str(source)!r} is the adapter of a language model; expected one of a reward model or critic"
        )
    if bases is not None and start is not None:
        trained = adapter is not None
        if not shares_base(start, tokenizer, is_trained=trained, trust_remote_code=trust_remote_code):
            bases = None
    base = find_model(source) if start is None else start.base
    # Not what config.json says, which may not name the labels; the shape of the head is checked.
    if bases is None:
        loaded = load_pretrained(
            AutoModelForSequenceClassification, source, trust_remote_code=trust_remote_code, ranks=ranks, num_labels=1
        )
    else:
        loaded = bases.load(AutoModelForSequenceClassification, base, tokenizer, device, num_labels=1)
    classifier, missing = loaded.model, loaded.missing
    in_adapter = set[str]()
    if bases is not None and start is not None:
        in_adapter = start.whole
        take_settings(classifier, start, in_adapter)
    head = {name for name in missing if name.split(".")[0] in ("score", "classifier")}
    is_fresh = init == "fresh" or not head <= in_adapter
    foreign = _foreign_head(classifier, check_source(base)) if is_fresh and init != "fresh" else None
    is_fresh = is_fresh and foreign is None
    if init == "saved" and is_fresh:
        raise ModelError(
            f"model {str(source)!r} has no trained scalar head; use a reward model saved from "
            "AutoModelForSequenceClassification with one label (`kedge reward` and `kedge critic` train one)"
        )
    if missing - head:
        raise ModelError(f"model {str(source)!r} lacks weights; first: {sorted(missing - head)[0]}")
    if foreign is not None and classifier.device.type != "meta":
        classifier.get_submodule("score").weight = nn.Parameter(foreign.weight.detach())
    if classifier.device.type != "meta":
        nn.Module.to(classifier, device)  # first, so that it is checked on the device that it will run on
    model = ScalarModel(classifier, tokenizer, device=device, ranks=ranks)
    model.source, model.on_every_rank = str(source), loaded.on_every_rank
    if ranks.is_sharded:
        can_be_sharded = model.trunk is not None and model.trunk.takes_one_pass
        left = inner_weights(model, model.trunk.model) if model.trunk is not None and can_be_sharded else ()
        give_model(model, ranks, device=device, left=left)
    if bases is not None and (adapter is not None or start is not None):
        model.adapter = Adapter(classifier, adapter, base=base, start=start)
    model.has_new_head = is_fresh
    if not is_fresh and not model.trained_here:
        _take_normalization(model, foreign)
    if is_fresh:
        if model.head is None:
            raise ModelError(
                f"{type(classifier).__name__} has no linear score head; start from a causal language model"
            )
        initialize_head(model.head, "normal")
        model.normalize(mean=-float(model.shift))  # drops the shift of the reward model that the trunk came from
    return model


def _foreign_head(classifier: PreTrainedModel, source: str) -> nn.Linear | None:
    """The head that another library saved with a model, if it fits a decoder's; see `find_head`."""
    score = dict(classifier.named_children()).get("score")
    if not isinstance(score, nn.Linear) or score.bias is not None:
        return None
    folder = local_folder(source)
    if folder is None:
        return None
    head = find_head(folder, trunk=classifier.base_model_prefix, width=score.in_features)
    if head is not None and not all(weight.isfinite().all() for weight in head.parameters()):
        raise ModelError(f"model {source!r}: the weights of its head contain NaN or infinity")
    return head


def _take_normalization(model: ScalarModel, foreign: nn.Linear | None) -> None:
    """Take over the bias of another library's head, and the mean and deviation of OpenRLHF's scores."""
    config, mean, std = model.classifier.config, 0.0, 1.0
    if getattr(config, "normalize_reward", False):
        mean, std = _checked_number(config, "mean", 0.0), _checked_number(config, "std", 1.0)
        if std <= 0:
            raise ModelError(f"the reward model's std is {std}; it must be positive")
    if foreign is not None and foreign.bias is not None:
        mean -= foreign.bias.item()
    if (mean, std) != (0.0, 1.0):
        model.normalize(mean=mean, std=std)

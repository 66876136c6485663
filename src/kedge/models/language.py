"""A causal language model split into trunk, output layer and optional value head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from kedge.algorithm.histogram import Bins
from kedge.errors import ModelError
from kedge.models.adapters import Adapter, AdapterSettings
from kedge.models.bases import Bases
from kedge.models.first_rank import give_model, inner_weights
from kedge.models.heads import HistogramHead, ValueHead, Values, initialize_head, read_values
from kedge.models.offloading import HostWeights
from kedge.models.packing.probe import TOLERANCE, Findings, relative_error, trial_rows
from kedge.models.packing.rows import TokenRows
from kedge.models.packing.trunk import Trunk
from kedge.models.pretrained import (
    context_length,
    disable_dropout,
    find_adapter,
    fit_embedding,
    load_pretrained,
    rope_switch,
    shares_base,
    take_settings,
)
from kedge.models.run_models import find_model
from kedge.system.ranks import ALONE, Ranks
from kedge.system.ranks.sharding import whole_for_a_pass

__all__ = ["FORBIDDEN_LOGIT", "LanguageModel", "load_language_model", "output_layer"]

PROBED_LOGIT = 30.0
"""Size of the largest logit when the output layer is compared with the model's own: that of a trained model."""
FORBIDDEN_LOGIT = -1e9
"""Finite, so that p·log p of a forbidden token is 0 and not NaN; exp(−1e9) is 0 in every format."""
MAX_LOGITS = 2**24
"""Logits in memory at a time: 64 MiB in float32. More are computed in chunks, and recomputed in the backward pass."""


class LanguageModel(nn.Module):
    """Policy or reference: a transformers causal LM, split so that unused positions are not computed.

    Padding and ids without a token (the output matrix can be wider than the vocabulary) are never sampled. Their logits
    are replaced here, the one place shared by policy, reference, sampler and trainer, so all four use the same
    distribution.

    Args:
        causal: Any `AutoModelForCausalLM`; its dropout is disabled.
        tokenizer: Supplies the pad token and the vocabulary.
        value_head: Add a zero-initialized value head on the trunk (`critic: shared`).
        bins: The support of a value head that predicts a histogram; None for a scalar head.
        device: The device of the weights; needed where another rank has them.
        ranks: If they shard their models, the first has the weights, and checks them for all.

    Raises:
        ModelError: The tokenizer has more tokens than the model has embeddings, or kedge would not compute what
            transformers computes.

    Source: spec §2.2, §7.34 (S0, S1, S4).
    """

    forbidden: Tensor
    forbidden_ids: Tensor
    holds_bf16 = False  # see `hold_frozen`
    on_every_rank = False  # see `Loaded`
    host: HostWeights | None = None
    adapter: Adapter | None = None
    """What differs from a base whose weights other models share."""

    def __init__(
        self,
        causal: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        value_head: bool = False,
        bins: Bins | None = None,
        device: torch.device | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.causal, device = causal, device or causal.device
        fit_embedding(causal, tokenizer)
        disable_dropout(causal)
        ids = torch.arange(output_layer(causal).out_features, device=device)
        known = torch.tensor(list(tokenizer.get_vocab().values()), device=device)
        forbidden = torch.ones_like(ids, dtype=torch.bool).index_fill_(0, known[known < len(ids)], False)
        forbidden |= ids == tokenizer.pad_token_id
        self.register_buffer("forbidden", forbidden, persistent=False)
        self.register_buffer("forbidden_ids", forbidden.nonzero().squeeze(1), persistent=False)
        self.value_head: ValueHead | None = None
        if value_head:
            width = output_layer(causal).in_features
            head = nn.Linear(width, 1, device=device) if bins is None else HistogramHead(width, bins, device=device)
            self.value_head = initialize_head(head, "zero")
        self.trunk = Trunk(_base_model(causal), ranks)
        self._check(ranks)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.forbidden.device

    @property
    def context_length(self) -> int | None:
        """Maximum tokens per row; None if the architecture has no limit."""
        return context_length(self.causal)

    @property
    def sampling_length(self) -> int | None:
        """Maximum tokens of a prompt and its sampled response; None if the architecture has no limit."""
        limits = (self.context_length, rope_switch(self.causal))
        return min((limit for limit in limits if limit is not None), default=None)

    def check_sampling(self) -> None:
        """Check before a run that responses can be sampled (`ModelError` if not)."""
        self.trunk.check_decoding()

    def hidden(self, rows: TokenRows) -> Float[Tensor, "tokens dim"]:
        """The trunk's last hidden state at every token."""
        return self.trunk.hidden(rows)

    def logits(self, hidden: Float[Tensor, "*rest dim"]) -> Float[Tensor, "*rest vocab"]:
        """Float32 logits of the next token; forbidden tokens have probability 0."""
        return self._logits(hidden, self._output_weight())

    def _logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self._raw_logits(hidden, weight).index_fill_(-1, self.forbidden_ids, FORBIDDEN_LOGIT)

    def over_logits(
        self,
        measure: Callable[[Float[Tensor, "tokens vocab"], Int[Tensor, " tokens"]], tuple[Tensor, ...]],
        hidden: Float[Tensor, "tokens dim"],
        targets: Int[Tensor, " tokens"],
    ) -> tuple[Tensor, ...]:
        """Apply `measure` to the logits of each hidden state and its target token.

        With a large vocabulary, the logits of a batch would be the largest tensor of all. They are computed in chunks,
        measured and freed, and recomputed in the backward pass.

        Args:
            measure: Maps logits and targets to tensors with one number per token.
            hidden: Hidden states.
            targets: Target token of each hidden state.
        """
        size, weight = max(1, MAX_LOGITS // len(self.forbidden)), self._output_weight()
        if len(targets) <= size:
            return measure(self._logits(hidden, weight), targets)

        def chunk(states: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
            return measure(self._logits(states, weight), tokens)

        parts = [
            checkpoint(chunk, states, tokens, use_reentrant=False)
            for states, tokens in zip(hidden.split(size), targets.split(size), strict=True)
        ]
        return tuple(torch.cat(measures) for measures in zip(*parts, strict=True))

    def values(self, hidden: Float[Tensor, "*rest dim"]) -> Float[Tensor, "*rest"]:
        """The value head's value at each hidden state, float32."""
        return self.read_values(hidden).values

    def read_values(self, hidden: Float[Tensor, "*rest dim"]) -> Values:
        """The value head's output at each hidden state, float32."""
        assert self.value_head is not None, "the model has no value head"
        return read_values(self.value_head, hidden)

    def _output_weight(self) -> Tensor:
        """The matrix of the output layer, once per pass: chunks must not ask other ranks for their parts."""
        return whole_for_a_pass(output_layer(self.causal).weight)

    def _raw_logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        config, layer = self.causal.config.get_text_config(), output_layer(self.causal)
        is_whole = weight is layer.weight
        logits = (layer(hidden) if is_whole else functional.linear(hidden, weight, layer.bias)).float()
        if scale := getattr(config, "logit_scale", None):  # Cohere
            logits = logits * scale
        if scale := getattr(config, "lm_head_multiplier", None):  # Falcon-H1
            logits = logits * scale
        if scaling := getattr(config, "logits_scaling", None):  # Granite divides, HyperCLOVA X multiplies
            logits = logits * scaling if config.model_type.startswith("hyperclovax") else logits / scaling
        # Gemma, RecurrentGemma
        if cap := getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None):
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _check(self, ranks: Ranks) -> None:
        """Refuse a model whose states depend on later tokens, or whose logits are computed in an unsupported way."""
        kind = type(self.causal).__name__
        if not self.trunk.is_causal:
            raise ModelError(f"{kind} reads later tokens, too, so it is no language model; use a causal language model")
        if Findings(self.causal, ranks).error("logits", self._logit_error) > TOLERANCE:
            raise ModelError(
                f"{kind} computes its logits in a way that kedge does not support; use another architecture"
            )

    @torch.no_grad()
    def _logit_error(self) -> float:
        """The error of the log probabilities, compared with the model's own forward pass for one row alone.

        The hidden states are scaled up on the way, so that a cap on the logits shows in a model with small logits.
        """
        rows = trial_rows(self.causal)
        ids = rows.ids[: rows.longest]
        hidden = self.hidden(TokenRows(ids, (len(ids),)))
        weight = self._output_weight()
        factor = max(1.0, PROBED_LOGIT / float(self._raw_logits(hidden, weight).abs().max()))

        def amplify(module: nn.Module, inputs: object, output: Any) -> Any:
            nonlocal hidden
            output.last_hidden_state = output.last_hidden_state * factor
            hidden = hidden * factor  # stays as it is where the model calls only a part of its trunk (OPT)
            return output

        handle = self.trunk.model.register_forward_hook(amplify)
        try:
            expected = self.causal(input_ids=ids[None]).logits[0].float()
        finally:
            handle.remove()
        return relative_error(self._raw_logits(hidden, weight).log_softmax(-1), expected.log_softmax(-1))


def load_language_model(
    source: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    value_head: bool = False,
    bins: Bins | None = None,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    adapter: AdapterSettings | None = None,
    bases: Bases | None = None,
    ranks: Ranks = ALONE,
) -> LanguageModel:
    """Load a policy or reference from a folder or hub id.

    If the ranks shard their models, `shard_model` is called next; until then only the first has the trunk's weights.

    Args:
        source: The folder or hub id.
        tokenizer: Its tokenizer.
        value_head: See `LanguageModel`.
        bins: See `LanguageModel`.
        device: The device of the weights.
        trust_remote_code: Run Python code from the model folder.
        adapter: Train an adapter on the frozen model: this new one, or, if the source is an adapter, that one further.
        bases: Where it finds the weights of its base, if it has them already, and which may load it in the host's
            memory; not for ranks that shard their models.
        ranks: The ranks that load it.

    Raises:
        ModelError: See `load_pretrained`; also if the source lacks weights of the language model.
    """
    if bases is None and adapter is not None:
        bases = Bases(trust_remote_code=trust_remote_code)
    device = torch.device(device) if bases is None else bases.place(device)
    found = find_adapter(source)
    if found is not None and found.is_scalar:
        raise ModelError(
            f"{str(source)!r} is the adapter of a reward model or critic; expected one of a language model"
        )
    if bases is not None and found is not None:
        trained = adapter is not None
        if not shares_base(found, tokenizer, is_trained=trained, trust_remote_code=trust_remote_code):
            bases = None
    start = None if bases is None else found
    base = find_model(source) if start is None else start.base
    if bases is None:
        loaded = load_pretrained(AutoModelForCausalLM, source, trust_remote_code=trust_remote_code, ranks=ranks)
    else:
        loaded = bases.load(AutoModelForCausalLM, base, tokenizer, device)
    causal, missing = loaded.model, loaded.missing
    if type(causal.config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not trust_remote_code:
        raise ModelError(
            f"model {str(source)!r}: {type(causal).__name__} cannot be loaded again once it is saved, since no "
            f"AutoModelForCausalLM has its configuration; use another architecture"
        )
    if missing:
        raise ModelError(f"model {str(source)!r} lacks weights of a causal language model; first: {sorted(missing)[0]}")
    if causal.device.type != "meta":
        nn.Module.to(causal, device)  # first, so that it is checked on the device that it will run on
    model = LanguageModel(causal, tokenizer, value_head=value_head, bins=bins, device=device, ranks=ranks)
    model.on_every_rank = loaded.on_every_rank
    if ranks.is_sharded:
        give_model(model, ranks, device=device, left=inner_weights(model, model.trunk.model))
    if bases is not None and (adapter is not None or start is not None):
        if start is not None:
            take_settings(causal, start, start.whole)
        model.adapter = Adapter(causal, adapter, base=base, start=start)
    return model


def _base_model(causal: PreTrainedModel) -> PreTrainedModel:
    """The model without its output layer; `base_model` is the whole model in some architectures (Llama 4)."""
    base = cast(PreTrainedModel, causal.base_model)
    parts = [part for part in causal.children() if isinstance(part, PreTrainedModel)]
    return max(parts, key=lambda part: part.num_parameters()) if base is causal and parts else base


def output_layer(causal: PreTrainedModel) -> nn.Linear:
    """The layer that computes the logits."""
    layer = causal.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise ModelError(f"{type(causal).__name__} has no linear output layer; use a causal language model")
    return layer

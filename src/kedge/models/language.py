"""A causal language model whose trunk, output layer and optional value head are called one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from kedge.errors import ModelError
from kedge.models.heads import initialise_head
from kedge.models.packing.rows import TokenRows
from kedge.models.packing.trunk import Trunk
from kedge.models.pretrained import (
    context_length,
    disable_dropout,
    fit_embedding,
    load_pretrained,
    quiet_transformers,
)

__all__ = ["FORBIDDEN_LOGIT", "LanguageModel", "load_language_model"]

# Finite, so that p·log p of a forbidden token is 0 and not NaN; exp(-1e9) is 0 in every format.
FORBIDDEN_LOGIT = -1e9
# Logits that are held at a time, as numbers: 64 MiB in float32. Beyond it they are computed in chunks, and once more in
# the backward pass.
MAX_LOGITS = 2**24


class LanguageModel(nn.Module):
    """Policy or reference: a transformers causal LM, split so that nothing is computed for positions nobody reads.

    Padding and ids that are no token (an output matrix can be wider than its tokenizer) can never be sampled. Their
    logits are replaced here, in the one place that policy, reference, sampler and trainer share, so that all of them
    speak of the same distribution.

    Args:
        causal: Any `AutoModelForCausalLM`; its dropout is switched off.
        tokenizer: Names the pad token and the size of the vocabulary.
        value_head: Add a scalar head on the trunk (`critic: shared`), zero-initialised.

    Raises:
        ModelError: The tokenizer has more tokens than the model has embeddings, or the output layer is unknown.
    Source: spec §2.2, §7.34 (S0, S1, S4).
    """

    forbidden: Tensor
    forbidden_ids: Tensor

    def __init__(
        self, causal: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, value_head: bool = False
    ) -> None:
        super().__init__()
        self.causal = causal
        fit_embedding(causal, tokenizer)
        disable_dropout(causal)
        ids = torch.arange(_output_layer(causal).out_features, device=causal.device)
        known = torch.tensor(sorted(tokenizer.get_vocab().values()), device=causal.device)
        forbidden = ~torch.isin(ids, known) | (ids == tokenizer.pad_token_id)
        self.register_buffer("forbidden", forbidden, persistent=False)
        self.register_buffer("forbidden_ids", forbidden.nonzero().squeeze(1), persistent=False)
        self.value_head = None
        if value_head:
            head = nn.Linear(_output_layer(causal).in_features, 1, device=causal.device)
            self.value_head = initialise_head(head, "zero")
        self.trunk = Trunk(cast(PreTrainedModel, causal.base_model))
        self._check_output_layer()

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.forbidden.device

    @property
    def context_length(self) -> int | None:
        """The most tokens that one row may hold, or None where the architecture sets no limit."""
        return context_length(self.causal)

    def hidden(self, rows: TokenRows) -> Float[Tensor, "tokens dim"]:
        """The trunk's last hidden state of every token."""
        return self.trunk.hidden(rows)

    def logits(self, hidden: Float[Tensor, "*rest dim"]) -> Float[Tensor, "*rest vocab"]:
        """Float32 logits of the next token; forbidden tokens have probability 0."""
        return self._raw_logits(hidden).index_fill_(-1, self.forbidden_ids, FORBIDDEN_LOGIT)

    def over_logits(
        self,
        measure: Callable[[Float[Tensor, "tokens vocab"], Int[Tensor, " tokens"]], tuple[Tensor, ...]],
        hidden: Float[Tensor, "tokens dim"],
        targets: Int[Tensor, " tokens"],
    ) -> tuple[Tensor, ...]:
        """What `measure` says about the logits behind each hidden state and its target token.

        Over a large vocabulary the logits of a batch would be the largest tensor of all. They are never held together:
        chunk by chunk they are computed, measured and dropped, and computed again when the gradient is.

        Args:
            measure: From logits and targets to one number per token each.
            hidden: Hidden states.
            targets: The token that each is asked about.
        """
        size = max(1, MAX_LOGITS // len(self.forbidden))
        if len(targets) <= size:
            return measure(self.logits(hidden), targets)

        def chunk(states: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
            return measure(self.logits(states), tokens)

        parts = [
            checkpoint(chunk, states, tokens, use_reentrant=False)
            for states, tokens in zip(hidden.split(size), targets.split(size), strict=True)
        ]
        return tuple(torch.cat(measures) for measures in zip(*parts, strict=True))

    def values(self, hidden: Float[Tensor, "*rest dim"]) -> Float[Tensor, "*rest"]:
        """The value head's forecast, in float32, of the state that each hidden state stands for."""
        assert self.value_head is not None, "this model was built without a value head"
        with torch.autocast(hidden.device.type, enabled=False):
            return self.value_head(hidden.float()).squeeze(-1)

    def _raw_logits(self, hidden: Tensor) -> Tensor:
        config = self.causal.config.get_text_config()
        logits = _output_layer(self.causal)(hidden).float()
        if scale := getattr(config, "logit_scale", None):  # Cohere
            logits = logits * scale
        if scaling := getattr(config, "logits_scaling", None):  # Granite
            logits = logits / scaling
        if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits

    @torch.no_grad()
    def _check_output_layer(self) -> None:
        """Compare with the model's own forward pass once: an unknown kind of head is refused, not mistrained."""
        ids = torch.arange(4, device=self.device)[None]
        with quiet_transformers():
            expected = self.causal(input_ids=ids).logits.float()
        actual = self._raw_logits(self.hidden(TokenRows(ids[0], (4,))))[None]
        if not torch.allclose(actual, expected, rtol=1e-3, atol=1e-3):
            kind = type(self.causal).__name__
            raise ModelError(f"{kind} turns hidden states into logits in a way that kedge does not know")


def load_language_model(
    source: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    value_head: bool = False,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
) -> LanguageModel:
    """Load a policy or reference from a folder or hub id.

    Raises:
        ModelError: See `load_pretrained`; also when weights of the language model are missing from the source.
    """
    causal, missing = load_pretrained(AutoModelForCausalLM, source, trust_remote_code=trust_remote_code)
    if missing:
        raise ModelError(f"model {str(source)!r} lacks weights of a causal language model, first: {sorted(missing)[0]}")
    return LanguageModel(causal, tokenizer, value_head=value_head).to(device)


def _output_layer(causal: PreTrainedModel) -> nn.Linear:
    layer = causal.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise ModelError(f"{type(causal).__name__} has no linear output layer; give a causal language model")
    return layer

"""Runs a transformer without its head: packed if its attention allows it, else padded."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from kedge.models.packing.decoders import DECODERS, Decoder, DecoderKind, GroupedDecoder, PaddedDecoder, StartDecoder
from kedge.models.packing.packed import Gather, PackedDecoder, packed_states, recompute_attention
from kedge.models.packing.probe import LONGEST, TOLERANCE, Findings, Trial
from kedge.models.packing.rows import TokenRows
from kedge.models.pretrained import least, rope_switch
from kedge.ranks import Ranks
from kedge_base.errors import ModelError

WINDOW_LIMITS = ("sliding_window", "attention_chunk_size")
"""Settings that restrict a model's attention further than causality for rows longer than the setting's value."""
FLOORS = ("floor_scale", "log_scaling_n_floor")
"""Settings with the length from which attention sharpens with the position (Llama 4, Inkling). Positions there include
the padding before a prompt, which no short trial reveals.
"""


class Trunk:
    """The trunk of a policy, reference, critic or reward model.

    The constructor tests on a few tokens how the model can be run: packed, padded on the right with rows of similar
    length, or with rows of equal length only. It uses the first way that reproduces the states and gradients of
    transformers' own pass over each row alone, and rejects a model for which none does.

    Args:
        model: A transformers model without its head (`base_model`).
        ranks: If they shard their models, the first rank runs the tests for all.

    Attributes:
        arranged_for: The kind of device that passes are arranged for, to plan their memory; None for the model's own.

    Raises:
        ModelError: No way to run the model gives the right results.
    """

    def __init__(self, model: PreTrainedModel, ranks: Ranks) -> None:
        self.model = model
        self.arranged_for: str | None = None
        self._checkpointed: list[GradientCheckpointingLayer] = []
        self._findings = Findings(model, ranks)
        config = model.config.get_text_config()
        self._reach = least(*(getattr(config, name, None) or None for name in WINDOW_LIMITS))
        self._floor = least(*(getattr(config, name, None) for name in FLOORS))
        self._rope_switch = rope_switch(model)
        self._pad_id = getattr(config, "pad_token_id", None) or 0
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._packs = self._takes_positions and self._error("packed", self._packed, longest=self._reach) <= TOLERANCE
        # Tested now rather than in the middle of a pass.
        self._shares = self._packs and self._error("shared", self._shared, longest=self._reach) <= TOLERANCE
        by_length = partial(self._in_batches, equal=True)
        if not ((self._packs and self._reach is None) or self.pads) and self._error("by length", by_length) > TOLERANCE:
            raise self._refusal("a row's states depend on the other rows of its batch")

    @cached_property
    def is_causal(self) -> bool:
        """True if the state of a token does not depend on later tokens."""
        return self._findings.error("causal", lambda: self._trial().error_of_prefix(self._hidden_sorted)) <= TOLERANCE

    @cached_property
    def pads(self) -> bool:
        """True if padding on the right changes nothing; otherwise only rows of equal length run together."""
        return self._error("padded", partial(self._in_batches, equal=False)) <= TOLERANCE

    @property
    def takes_one_pass(self) -> bool:
        """True if rows of all lengths are read in one call of the model."""
        return self._packs and self._reach is None and self._rope_switch is None

    def packs(self, longest: int) -> bool:
        """True if rows up to this length are packed."""
        return self._packs and (self._reach is None or longest <= self._reach)

    @property
    def shares_up_to(self) -> float:
        """Maximum length of rows that can share the tokens of a common prompt; 0 if sharing does not work."""
        return (least(self._reach, self._rope_switch) or math.inf) if self._shares else 0

    def checkpoint_activations(self) -> None:
        """Enable activation checkpointing: the backward pass recomputes the activations inside the layers.

        Raises:
            ModelError: The model has no such layers, or recomputing changes its gradients.
        """
        layers = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        # Newer versions of transformers renamed this method, and warn about the old name.
        enable = getattr(self.model, "activation_checkpointing_enable", self.model.gradient_checkpointing_enable)
        try:
            enable({"use_reentrant": False, "context_fn": self._recompute_contexts})
        except ValueError:
            layers = []
        if not layers:
            raise self._refusal("it has no activation checkpointing; set runtime.activation_checkpointing=false")
        self._checkpointed = layers
        if self._error("checkpointed", self._hidden_sorted) > TOLERANCE:
            raise self._refusal("with activation checkpointing its gradients change; switch it off")

    def hidden(self, rows: TokenRows) -> Float[Tensor, "tokens dim"]:
        """The last hidden state of every token, in the order of `rows`; rows do not see each other."""
        if list(rows.lengths) == sorted(rows.lengths, reverse=True):
            return self._hidden_sorted(rows)
        order = rows.order()
        return Gather.apply(self._hidden_sorted(rows.take(order)), rows.token_indices(order).argsort())

    def check_decoding(self) -> None:
        """Check that reading token by token gives the states of a whole pass (`ModelError` if not)."""
        if not (self._packs and self._packed_decoding) or self._reach is not None:
            self._padded_decoding()

    def decoder(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, pad_id: int, longest: int | None = None
    ) -> Decoder:
        """Return a decoder that has read the prompts (at least one token each).

        Args:
            prompts: One per row.
            max_new_tokens: Maximum tokens to add to a row's prompt.
            pad_id: Token id of the padding.
            longest: Maximum length of a row; None for the longest prompt plus `max_new_tokens`.

        Raises:
            ModelError: The model cannot be sampled from at all, or not beyond the switch of its rotary embedding.
        """
        longest = longest or max(map(len, prompts)) + max_new_tokens
        if self._rope_switch is not None and longest > self._rope_switch:
            raise self._refusal(
                f"its rotary embedding changes at {self._rope_switch} tokens; sample rows of at most that length"
            )
        if self.packs(longest) and self._packed_decoding:
            shares = longest <= self.shares_up_to
            return PackedDecoder(
                self.model,
                prompts,
                max_new_tokens=max_new_tokens,
                shares=shares,
                arranged_for=self.arranged_for,
            )
        kind, can_drop_rows = self._padded_decoding()
        if self._floor is not None and longest > self._floor:
            kind = "grouped"
        return self._start(kind, prompts, pad_id=pad_id, can_drop_rows=can_drop_rows)

    def _hidden_sorted(self, rows: TokenRows) -> Tensor:
        """The states of rows sorted by length, longest first."""
        if self.takes_one_pass:
            return self._packed(rows)
        parts = rows.apart(self._rope_switch)
        return _join(
            [
                self._packed(part) if self.packs(part.longest) else self._in_batches(part, equal=not self.pads)
                for part in parts
            ]
        )

    def _packed(self, rows: TokenRows) -> Tensor:
        if rows.prompts and rows.longest > self.shares_up_to:
            rows = replace(rows, prompts=())
        with self._in_mode():
            return packed_states(self.model, rows, self.arranged_for)

    def _shared(self, rows: TokenRows) -> Tensor:
        """Read every row twice, as two rows that share its first half; return that half and the second one's rest."""
        twice = rows.take([row for row in range(len(rows.lengths)) for _ in range(2)])
        halves = [length // 2 for length in rows.lengths]
        prompts = tuple(((row, half),) for row, half in enumerate(halves) for _ in range(2))
        with self._in_mode():
            hidden = packed_states(self.model, replace(twice, prompts=prompts)).split(twice.lengths)
        pairs = zip(halves, hidden[::2], hidden[1::2], strict=True)
        return torch.cat([part for half, one, other in pairs for part in (one[:half], other[half:])])

    def _in_batches(self, rows: TokenRows, *, equal: bool) -> Tensor:
        return _join([self._pad_and_run(part) for part in rows.batches(equal=equal)])

    def _pad_and_run(self, rows: TokenRows) -> Tensor:
        ids, mask = rows.pad(self._pad_id)
        with self._in_mode():
            # No positions: padding on the right does not shift them, and some models do not count from 0.
            return self.model(input_ids=ids, attention_mask=mask.long(), use_cache=False).last_hidden_state[mask]

    def _in_mode(self) -> AbstractContextManager[None]:
        """A context for a pass in evaluation mode, except for the layers to be checkpointed."""
        if self.model.training:
            self.model.eval()
        return self._layers_in_training() if torch.is_grad_enabled() else nullcontext()

    @contextmanager
    def _layers_in_training(self) -> Iterator[None]:
        """Put the layers to be checkpointed into training mode, the only mode in which transformers checkpoints.

        Their submodules stay in evaluation mode, since training mode would add noise, such as a router's jitter.
        """
        for layer in self._checkpointed:
            layer.training = True
        try:
            yield
        finally:
            for layer in self._checkpointed:
                layer.training = False

    def _recompute_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts for a layer's first computation and for its recomputation, which must run the same code."""
        attention = recompute_attention(self.model.config)

        @contextmanager
        def compute() -> Iterator[None]:
            # Autocast would keep a copy of every weight until the end of the pass, which only the first pass of a layer
            # reads: it takes 2 bytes per weight, and splits the memory that each layer frees for the next one.
            caches = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)
            try:
                yield
            finally:
                torch.set_autocast_cache_enabled(caches)

        @contextmanager
        def recompute() -> Iterator[None]:
            with attention, self._layers_in_training():  # a layer may contain others (Zamba)
                yield

        return compute(), recompute()

    @cached_property
    def _packed_decoding(self) -> bool:
        start = partial(PackedDecoder, self.model, max_new_tokens=LONGEST)
        return self._error_decoding("packed decoding", start, drop_rows=True, longest=self._reach) <= TOLERANCE

    def _padded_decoding(self) -> tuple[DecoderKind, bool]:
        """Find a way to sample without packing; also return whether finished rows can be dropped."""
        for kind, drop_rows in product(DECODERS, (True, False)):
            start = partial(self._start, kind, pad_id=self._pad_id, can_drop_rows=drop_rows)
            way = f"{kind} decoding, drop_rows={drop_rows}"
            if self._error_decoding(way, start, drop_rows=drop_rows) <= TOLERANCE:
                return kind, drop_rows
        raise self._refusal("read token by token, it gives other states than in one pass, so it cannot be sampled from")

    def _start(
        self, kind: DecoderKind, prompts: Sequence[Sequence[int]], *, pad_id: int, can_drop_rows: bool
    ) -> Decoder:
        padded = partial(
            PaddedDecoder,
            self.model,
            pad_id=pad_id,
            takes_positions=self._takes_positions,
            can_drop_rows=can_drop_rows,
        )
        return padded(prompts) if kind == "padded" else GroupedDecoder(padded, prompts)

    def _error(self, way: str, run: Callable[[TokenRows], Tensor], *, longest: int | None = None) -> float:
        return self._findings.error(way, lambda: self._trial(longest).error(self.model, run))

    def _error_decoding(self, way: str, start: StartDecoder, *, drop_rows: bool, longest: int | None = None) -> float:
        return self._findings.error(way, lambda: self._trial(longest).error_of_decoder(start, drop_rows=drop_rows))

    def _trial(self, longest: int | None = None) -> Trial:
        return Trial.of(self.model, longest=min(LONGEST, least(longest, self._rope_switch) or LONGEST))

    def _refusal(self, reason: str) -> ModelError:
        return ModelError(f"kedge cannot run {type(self.model).__name__}: {reason}")


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))

"""Runs a transformer without its head, packed if its attention allows it, else padded, in a chosen number format."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby, product
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from kedge.data.tokens import pad_left
from kedge.models.packing.packed import (
    Decoder,
    Gather,
    PackedDecoder,
    TokenRows,
    cache_name_of,
    group_by_length,
    packed_states,
    recompute_attention,
)
from kedge.models.packing.probe import LONGEST, TOLERANCE, Findings, Trial
from kedge.models.pretrained import rope_switch
from kedge.ranks import ALONE, Ranks
from kedge_base.errors import ModelError
from kedge_base.machine.memory import free_memory

WINDOW_LIMITS = ("sliding_window", "attention_chunk_size")
"""Settings that restrict a model's attention further than causality for rows longer than the setting's value."""

DecoderKind = Literal["padded", "grouped"]
DECODERS: tuple[DecoderKind, ...] = ("padded", "grouped")
"""Ways to sample from a model that cannot be packed, the faster one first."""

Precision = Literal["fp32", "bf16"]

MIN_CPU_WIDTH = 256
"""Hidden size below which casting to bf16 on a CPU costs more than the faster products save."""
ROOM_SHARE = 1 / 8
"""Share of the free memory that copies of frozen weights may take."""


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

    def __init__(self, model: PreTrainedModel, ranks: Ranks = ALONE) -> None:
        self.model = model
        self.arranged_for: str | None = None
        self._checkpointed: list[GradientCheckpointingLayer] = []
        self._findings = Findings(model, ranks)
        config = model.config.get_text_config()
        self._reach = min(
            (int(limit) for name in WINDOW_LIMITS if (limit := getattr(config, name, None))), default=None
        )
        self._rope_switch = rope_switch(model)
        self._pad_id = getattr(config, "pad_token_id", None) or 0
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._packs = self._takes_positions and self._error("packed", self._packed, longest=self._reach) <= TOLERANCE
        # Tested now rather than in the middle of a pass.
        self._shares = self._packs and self._error("shared", self._shared, longest=self._reach) <= TOLERANCE
        if not self._packs or self._reach is not None:
            self._check_batches()

    @cached_property
    def is_causal(self) -> bool:
        """True if the state of a token does not depend on later tokens."""
        return self._findings.error("causal", lambda: self._trial().error_of_prefix(self._hidden_sorted)) <= TOLERANCE

    @cached_property
    def pads(self) -> bool:
        """True if padding on the right changes nothing; otherwise only rows of equal length run together."""
        return self._error("padded", self._padded) <= TOLERANCE

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
        limits = [limit for limit in (self._reach, self._rope_switch) if limit is not None]
        return min(limits, default=math.inf) if self._shares else 0

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
        return self._start(kind, prompts, pad_id=pad_id, can_drop_rows=can_drop_rows)

    def _hidden_sorted(self, rows: TokenRows) -> Tensor:
        """The states of rows sorted by length, longest first."""
        if self.takes_one_pass:
            return self._packed(rows)
        parts = [rows]
        if self._rope_switch is not None:
            num_beyond = sum(length > self._rope_switch for length in rows.lengths)
            parts = rows.split([num_beyond, len(rows.lengths) - num_beyond])
        return _join([self._packed(part) if self.packs(part.longest) else self._unpacked(part) for part in parts])

    def _packed(self, rows: TokenRows) -> Tensor:
        if rows.prompts and max(rows.lengths) > self.shares_up_to:
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

    def _unpacked(self, rows: TokenRows) -> Tensor:
        return self._padded(rows) if self.pads else self._by_length(rows)

    def _padded(self, rows: TokenRows) -> Tensor:
        return _join([self._pad_and_run(part) for part in rows.split(map(len, group_by_length(rows.lengths)))])

    def _by_length(self, rows: TokenRows) -> Tensor:
        equal = (len(list(lengths)) for _, lengths in groupby(rows.lengths))
        return _join([self._pad_and_run(part) for part in rows.split(equal)])

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

    def _check_batches(self) -> None:
        if not self.pads and self._error("by length", self._by_length) > TOLERANCE:
            raise self._refusal("a row's states depend on the other rows of its batch")

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

    def _error_decoding(
        self,
        way: str,
        start: Callable[[Sequence[Sequence[int]]], Decoder],
        *,
        drop_rows: bool,
        longest: int | None = None,
    ) -> float:
        return self._findings.error(way, lambda: self._trial(longest).error_of_decoder(start, drop_rows=drop_rows))

    def _trial(self, longest: int | None = None) -> Trial:
        limits = (longest, self._rope_switch)
        return Trial.of(self.model, longest=min([LONGEST, *(limit for limit in limits if limit)]))

    def _refusal(self, reason: str) -> ModelError:
        return ModelError(f"kedge cannot run {type(self.model).__name__}: {reason}")


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class PaddedDecoder:
    """Decodes left-padded rows with the model's own cache, for models that cannot be packed.

    Args:
        model: A trunk.
        prompts: One per row.
        pad_id: Token id of the padding.
        takes_positions: The model accepts position ids.
        can_drop_rows: True if rows of the cache can be selected.

    Raises:
        ModelError: The model has no cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        *,
        pad_id: int,
        takes_positions: bool,
        can_drop_rows: bool = True,
    ) -> None:
        self._model = model
        self._takes_positions = takes_positions
        self.can_drop_rows = can_drop_rows
        self._cache_name = cache_name_of(model)
        self._cache: Any = None
        device = next(model.parameters()).device
        ids, mask = pad_left(prompts, pad_id)
        self._mask = mask.to(device)
        self.hidden = self._run(ids.to(device))

    def step(self, tokens: Tensor, running: Tensor | None = None) -> Tensor:
        """See `Decoder.step`."""
        added = torch.ones_like(self._mask[:, :1]) if running is None else running[:, None]
        self._mask = torch.cat([self._mask, added], dim=1)
        self.hidden = self._run(tokens[:, None])
        return self.hidden

    def keep(self, rows: Tensor) -> None:
        """See `Decoder.keep`."""
        self._cache.reorder_cache(rows)
        self._mask = self._mask[rows]
        self.hidden = self.hidden[rows]

    def _run(self, ids: Tensor) -> Tensor:
        inputs: dict[str, Any] = {self._cache_name: self._cache}
        # A recurrent state has no columns to mask, so its mask is only passed with the prompt.
        if self._cache is None or _has_columns(self._cache):
            inputs["attention_mask"] = self._mask.long()
        if self._takes_positions:
            # Positions only count real tokens, so padding does not shift them (spec §2.3).
            inputs["position_ids"] = (self._mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        outputs = self._model(input_ids=ids, use_cache=True, **inputs)
        self._cache = outputs[self._cache_name]
        return outputs.last_hidden_state[:, -1]


class GroupedDecoder:
    """Decodes rows with prompts of equal length together, for models whose states padding would change.

    Args:
        start: Creates the decoder of some prompts of equal length.
        prompts: One per row.
    """

    def __init__(self, start: Callable[[Sequence[Sequence[int]]], Decoder], prompts: Sequence[Sequence[int]]) -> None:
        lengths = [len(prompt) for prompt in prompts]
        groups = [[row for row, length in enumerate(lengths) if length == each] for each in dict.fromkeys(lengths)]
        self._groups = [start([prompts[row] for row in rows]) for rows in groups]
        self._places = torch.tensor([row for rows in groups for row in rows], device=self._groups[0].hidden.device)
        self.can_drop_rows = all(group.can_drop_rows for group in self._groups)
        self._collect()

    def step(self, tokens: Tensor, running: Tensor | None = None) -> Tensor:
        """See `Decoder.step`."""
        goes_on = torch.ones_like(tokens, dtype=torch.bool) if running is None else running
        parts = (self._parts(entries[self._places]) for entries in (tokens, goes_on))
        for group, *part in zip(self._groups, *parts, strict=True):
            group.step(*part)
        return self._collect()

    def keep(self, rows: Tensor) -> None:
        """See `Decoder.keep`."""
        kept = torch.isin(self._places, rows)
        remaining = []
        for group, keeps in zip(self._groups, self._parts(kept), strict=True):
            if keeps.any():
                group.keep(keeps.nonzero().squeeze(1))
                remaining.append(group)
        # The index of each kept row among the kept rows.
        self._groups = remaining
        self._places = (self._places[kept][:, None] == rows).long().argmax(dim=1)
        self._collect()

    def _parts(self, entries: Tensor) -> tuple[Tensor, ...]:
        """Reorder entries by group, and split them into the groups."""
        return entries.split([len(group.hidden) for group in self._groups])

    def _collect(self) -> Tensor:
        hidden = torch.cat([group.hidden for group in self._groups])
        self.hidden = torch.empty_like(hidden).index_copy_(0, self._places, hidden)
        return self.hidden


def _has_columns(cache: Any) -> bool:
    """True if a cache has entries per token, unlike recurrent states and custom caches of a model."""
    return isinstance(cache, Cache) and any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)


def resolve_precision(
    precision: Precision | Literal["auto"], device: str | torch.device, *, width: int | None = None
) -> Precision:
    """Resolve `auto` to bf16 where the hardware supports it natively and the model is wide enough to gain, else fp32.

    Native support: CUDA from compute capability 8.0, and CPUs with AVX-512-BF16 or AMX. A narrow model (hidden size
    below 256) spends its time outside matrix products, so on a CPU it stays in fp32.

    Args:
        precision: `auto`, or the format itself.
        device: The models' device.
        width: The model's hidden size; None if unknown.

    Raises:
        ModelError: The name is not one of the three.
    """
    if precision not in ("auto", "fp32", "bf16"):
        raise ModelError(f"runtime.precision {precision!r} is unknown; choose auto, fp32 or bf16")
    if precision != "auto":
        return precision
    kind = torch.device(device).type
    if kind == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device)[0] >= 8 else "fp32"
    if kind == "cpu" and (width is None or width >= MIN_CPU_WIDTH):
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return "bf16" if native else "fp32"
    return "fp32"


def autocast(precision: Precision, device: str | torch.device) -> AbstractContextManager[object]:
    """A context in which matrix products run in `precision`; fp32 turns autocast off."""
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=precision == "bf16")


@contextmanager
def prepacked(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Prepack the weights of linear layers within the block, in the order in which a CPU's kernels read them.

    Products of few rows, as in a sampling step, become a fifth to a half faster, because weights are not reordered for
    each of them. For trained weights, the copies replace those that autocast makes. Frozen weights are copied if there
    is plenty of memory; frozen bf16 weights, which need no other copy, only if no part of the model is trained, since
    such a run's memory was planned without these copies. Passes with gradients, or without autocast, use the original
    weights.

    Args:
        model: The model; only the rounding of its results changes.
        precision: Number format of the products; this only has an effect for bf16 on a CPU.
    """
    layers = []
    if precision == "bf16" and next(model.parameters()).device.type == "cpu" and _can_prepack():
        layers = [layer for layer in model.modules() if type(layer) is nn.Linear and "forward" not in vars(layer)]
        layers = [layer for layer in layers if type(layer.weight) is nn.Parameter]
        if any(weight.requires_grad for weight in model.parameters()):
            layers = [layer for layer in layers if layer.weight.dtype != torch.bfloat16]
        frozen = sum(layer.weight.numel() for layer in layers if not layer.weight.requires_grad)
        if frozen * torch.bfloat16.itemsize > ROOM_SHARE * free_memory():
            layers = [layer for layer in layers if layer.weight.requires_grad]
    try:
        for layer in layers:
            weight, bias = (None if each is None else each.detach().bfloat16() for each in (layer.weight, layer.bias))
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            vars(layer)["forward"] = partial(_multiply, layer, layer.weight, packed, bias)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _multiply(
    layer: nn.Linear, weight: Tensor, packed: Tensor, bias: Tensor | None, *inputs: Tensor, **named: Tensor
) -> Tensor:
    # Not prepacked: with gradients, in fp32 as in a trial of the model, or with an adapter instead of the weight.
    if torch.is_grad_enabled() or not torch.is_autocast_enabled("cpu") or layer.weight is not weight:
        return nn.Linear.forward(layer, *inputs, **named)
    [states] = (*inputs, *named.values())
    return torch.ops.mkldnn._linear_pointwise(states.bfloat16(), packed, bias, "none", [], "")


def _can_prepack() -> bool:
    """True if torch has oneDNN's linear layers, and they support bf16 on this processor."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()

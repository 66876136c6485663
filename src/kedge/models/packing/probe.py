"""Checks, when a model is loaded, that kedge's way of running it matches plain transformers on each row alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from kedge.models.live_bytes import Hollow
from kedge.models.packing.decoders import StartDecoder
from kedge.models.packing.rows import TokenRows
from kedge.models.pretrained import context_length, num_embeddings
from kedge.models.sources import loading_reason, quiet_transformers
from kedge.ranks import Ranks
from kedge_base.errors import ModelError
from kedge_base.machine.memory import is_out_of_memory

TOLERANCE = 1e-4
"""Largest relative error of a token's state, about 1e-3 nats. In all architectures of transformers, float32 rounding
errors were at most 2e-5, and errors from a wrong mask, position or state at least 1e-4.
"""
GRADIENT_SCALE = 10.0
"""Ratio of the allowed error of gradients to that of states."""
LONGEST = 16
"""Tokens of the longest trial row, longer than the convolutions in recurrent layers."""


class Findings:
    """Measured errors of the ways to run a model, cached by architecture and configuration, regardless of the weights.

    Policy, reference and critic usually share a configuration, so each check runs once.

    Args:
        model: The model.
        ranks: If they shard their models, the first rank, which has the weights, runs the checks for all.
    """

    _known: ClassVar[dict[tuple[object, ...], dict[str, float]]] = {}

    def __init__(self, model: PreTrainedModel, ranks: Ranks) -> None:
        settings = model.config.to_dict()
        settings.pop("_name_or_path", None)
        self._device = model.device.type
        # Tensors without contents have no measurable error, so every way counts as right.
        self._hollow = any(isinstance(weight, Hollow) for weight in model.parameters())
        key = (type(model), self._device, json.dumps(settings, sort_keys=True, default=str))
        self._measured = self._known.setdefault(key, {})
        # Findings that all ranks know, so that all of them request the same ones from the first rank.
        self._told: dict[str, float] = {}
        self._ranks = ranks

    def error(self, way: str, measure: Callable[[], float]) -> float:
        """Return the error of a way to run the model, measured at most once; infinite if the model's code fails."""
        if self._hollow:
            return 0.0
        if not self._ranks.is_sharded:
            return self._error(way, measure)
        if way not in self._told:
            self._told[way] = self._ranks.first(lambda: self._error(way, measure))
        return self._told[way]

    def _error(self, way: str, measure: Callable[[], float]) -> float:
        if way not in self._measured:
            try:
                with quiet_transformers(), _full_precision(self._device):
                    self._measured[way] = measure()
            except ModelError:
                raise
            except Exception as error:  # the model's code may raise anything on inputs that it does not expect
                if is_out_of_memory(error):
                    raise
                self._measured[way] = math.inf
        return self._measured[way]


@dataclass(frozen=True)
class Trial:
    """Rows of different lengths, and the results of transformers for each row alone.

    Attributes:
        rows: The rows, longest first; two have the same length.
        hidden: The last hidden state of every token.
        gradients: Gradients of a fixed function of all states in the model's vectors (norms and biases); they pass
            through every layer, and are small.
    """

    rows: TokenRows
    hidden: Float[Tensor, "tokens dim"]
    gradients: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, model: PreTrainedModel, *, longest: int = LONGEST) -> Trial:
        """Run rows of at most `longest` tokens through a model's own forward pass.

        Raises:
            ModelError: The pass fails, or two passes over the same rows give different results.
        """
        rows = trial_rows(model, longest=longest)

        def alone(row: Tensor) -> Tensor:
            return model(input_ids=row[None], use_cache=False).last_hidden_state[0]

        parts = rows.ids.split(rows.lengths)
        try:
            with _all_trainable(model):
                hidden = torch.cat([alone(row) for row in parts])
                gradients = _gradients(model, hidden)
            with torch.no_grad():
                again = alone(parts[0])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the model's code may raise anything
            raise _unusable(model, f"its forward pass fails: {loading_reason(error)}") from error
        if relative_error(again, hidden[: len(again)]) > TOLERANCE:
            raise _unusable(model, "two passes over the same tokens differ")
        return cls(rows, hidden.detach(), gradients)

    def error(self, model: PreTrainedModel, run: Callable[[TokenRows], Tensor]) -> float:
        """The error in states and gradients of another way to compute the states of all rows."""
        with _all_trainable(model):
            hidden = run(self.rows)
            gradients = _gradients(model, hidden)
        return max(relative_error(hidden, self.hidden), self._gradient_error(gradients) / GRADIENT_SCALE)

    @torch.no_grad()
    def error_of_prefix(self, run: Callable[[TokenRows], Tensor]) -> float:
        """The error when only the start of a row is read; large if states depend on later tokens."""
        half = self.rows.longest // 2
        return relative_error(run(TokenRows(self.rows.ids[:half], (half,))), self.hidden[:half])

    @torch.no_grad()
    def error_of_decoder(self, start: StartDecoder, *, drop_rows: bool) -> float:
        """The error when the starts of rows are read at once, and the rest token by token.

        Args:
            start: Creates a decoder that has read some prompts.
            drop_rows: Also drop some rows halfway.
        """
        rows = [row.tolist() for row in self.rows.ids.split(self.rows.lengths)]
        num_steps = max(2, self.rows.longest // 4)
        kept = list(range(len(rows)))
        decoder = start([row[:-num_steps] for row in rows])
        errors = [relative_error(decoder.hidden, self._states(kept, -num_steps - 1))]
        for place in range(-num_steps, 0):
            if drop_rows and place == -num_steps // 2:
                decoder.keep(torch.tensor([0, len(rows) - 1], device=self.hidden.device))
                kept = [kept[0], kept[-1]]
            hidden = decoder.step(torch.tensor([rows[row][place] for row in kept], device=self.hidden.device))
            errors.append(relative_error(hidden, self._states(kept, place)))
        return max(errors)

    def _states(self, rows: Sequence[int], place: int) -> Tensor:
        """The states of some rows at one position, counted from the rows' end."""
        last = self.rows.last[torch.tensor(rows, device=self.hidden.device)]
        return self.hidden[last + 1 + place]

    def _gradient_error(self, gradients: tuple[Tensor | None, ...]) -> float:
        """The error of all gradients relative to their joint norm, since single gradients can be 0."""
        if [each is None for each in gradients] != [each is None for each in self.gradients]:
            return math.inf
        ours, theirs = (
            torch.cat([each.flatten() for each in of if each is not None] or [torch.zeros(1)])
            for of in (gradients, self.gradients)
        )
        return relative_error(ours, theirs)


def trial_rows(model: PreTrainedModel, *, longest: int = LONGEST, ending: int | None = None) -> TokenRows:
    """Make four rows that fit into the model's context, without padding tokens.

    Args:
        model: Supplies vocabulary, context and device.
        longest: Most tokens of a row, ≥ 4.
        ending: The last token of every row, and nowhere else; None for any.
    """
    config = model.config.get_text_config()
    longest = min(longest, context_length(model) or longest)
    lengths = (longest, *[max(3, 2 * longest // 3)] * 2, max(3, longest // 2))
    pad_id = getattr(config, "pad_token_id", None)
    tokens = [token for token in range(min(num_embeddings(model), 4096)) if token not in (pad_id, ending)]
    ids = [tokens[(37 * place + 5) % len(tokens)] for place in range(sum(lengths))]
    rows = TokenRows(torch.tensor(ids, device=model.device), lengths)
    if ending is not None:
        rows.ids[rows.last] = ending
    return rows


@torch.no_grad()
def relative_error(ours: Float[Tensor, "*vectors dim"], theirs: Float[Tensor, "*vectors dim"]) -> float:
    """The largest relative error (L2) of a vector; infinite for a different shape or NaN."""
    if ours.shape != theirs.shape:
        return math.inf
    error = (ours - theirs).float().norm(dim=-1)
    scale = theirs.float().norm(dim=-1)
    return float((error / scale.clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num(nan=math.inf).max())


def _gradients(model: nn.Module, hidden: Tensor) -> tuple[Tensor | None, ...]:
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    vectors = [weight for weight in trained if weight.ndim == 1] or sorted(trained, key=Tensor.numel)[:1]
    if not vectors:
        return ()
    weights = torch.arange(hidden.numel(), device=hidden.device).view(hidden.shape).cos()
    return torch.autograd.grad((hidden * weights).sum(), vectors, allow_unused=True)


@contextmanager
def _all_trainable(model: nn.Module) -> Iterator[None]:
    """Enable gradients of frozen weights in the block, since the checks need those of norms and biases."""
    frozen = [weight for weight in model.parameters() if weight.is_floating_point() and not weight.requires_grad]
    for weight in frozen:
        weight.requires_grad_(True)
    try:
        with torch.enable_grad():
            yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)


@contextmanager
def _full_precision(device: str) -> Iterator[None]:
    """Switch off autocast and TF32, whose rounding is larger than the tolerance."""
    usual = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(allow_tf32=False), torch.autocast(device, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(usual)


def _unusable(model: nn.Module, reason: str) -> ModelError:
    return ModelError(f"kedge cannot run {type(model).__name__}: {reason}; use another architecture")

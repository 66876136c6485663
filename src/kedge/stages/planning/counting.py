"""Counts what the passes of a run hold: kedge's own code, on models that may have no contents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from kedge.models.hollow import layers_of
from kedge.models.language import LanguageModel
from kedge.models.live_bytes import LiveBytes, Work, watch_gradients
from kedge.models.scalar import ScalarModel

__all__ = ["Figures", "count_pass", "count_training", "extrapolated", "held_by"]

Figures = dict[str, float]
"""Named numbers of one machine's plan; those of passes are bytes above what the models hold."""


def count_pass(models: Sequence[nn.Module], run: Callable[[], object]) -> Figures:
    """The peak of a pass without gradients, what its result holds, and its work."""
    counter = LiveBytes()
    held = counter.hold(held_by(models))
    counter.restart()
    with counter, torch.no_grad():
        result = run()
    figures = {"peak": float(counter.peak - held), "kept": float(counter.live - held), **_work(counter.work)}
    del result
    return figures


def count_training(
    models: Sequence[LanguageModel | ScalarModel], forward: Callable[[], Tensor], *, accumulates: bool = True
) -> Figures:
    """The peaks of a forward and backward pass, with new gradients or with some that are added to.

    The backward pass is cut where it reaches the first block of a model. Before, the activations of the other blocks
    are held; afterwards, their gradients; so each part's peak grows linearly with the number of blocks.

    Args:
        models: Trained models.
        forward: The loss of one micro-batch.
        accumulates: Whether the pass adds to the gradients of others, which holds more at every moment than a first
            pass: all gradients, and the one that is added.

    Returns:
        `PASS.N.peak` and `PASS.N.gradients`, the new gradients at that moment, with PASS `fresh` or `again` and N from
        0. `forward`: the peak of the forward pass. `saved`: held at its end. `trunk`: held of it by the trunks.
        `gradients`: all. And the work of a pass.
    """
    weights = [weight for model in models for weight in model.parameters()]
    name, gradients = ("again", [*_zeros_for(weights)]) if accumulates else ("fresh", [])
    counter = LiveBytes()
    held = counter.hold(held_by(models)) + counter.hold(gradients)
    counter.restart()
    with _watched(models, counter) as watched, counter:
        loss = forward()
        figures = {"forward": counter.peak - held, "saved": counter.live - held, "trunk": watched.trunk}
        loss.backward()
        del loss
        watched.cut(counter)
    for number, (peak, fresh) in enumerate(watched.parts):
        figures |= {f"{name}.{number}.peak": peak - held, f"{name}.{number}.gradients": fresh}
    figures |= _work(counter.work)
    figures["gradients"] = sum(weight.grad.nbytes for weight in weights if weight.grad is not None)
    return {name: float(figure) for name, figure in figures.items()}


def _zeros_for(weights: Sequence[nn.Parameter]) -> Iterator[Tensor]:
    """Gradients of earlier passes."""
    for weight in weights:
        if weight.requires_grad:
            weight.grad = torch.zeros_like(weight)
            yield weight.grad


def extrapolated(
    measure: Callable[[Mapping[str, int]], Figures], layers: Mapping[str, int], shallow: int | None
) -> Figures:
    """The figures of models of some depth, from shallow ones: each block adds the same to every figure.

    Models of one depth are measured with one block more together, since they grow together.

    Args:
        measure: The figures of models with these numbers of blocks, by role.
        layers: Blocks of each role.
        shallow: Blocks that are measured, and one more; None measures all of them.
    """
    if shallow is None or all(number <= shallow for number in layers.values()):
        return measure(layers)
    start = {role: min(number, shallow) for role, number in layers.items()}
    base = measure(start)
    figures = dict(base)
    for number in sorted({each for each in layers.values() if each > shallow}):
        deeper = measure({role: start[role] + (layers[role] == number) for role in layers})
        for name, figure in deeper.items():
            figures[name] += (number - shallow) * (figure - base[name])
    return figures


class _Watched:
    """What the hooks of a pass have seen."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, int]] = []
        self.trunk = 0

    def cut(self, counter: LiveBytes) -> None:
        gradients = counter.gradients
        self.parts.append((counter.restart(), gradients))


@contextmanager
def _watched(models: Sequence[LanguageModel | ScalarModel], counter: LiveBytes) -> Iterator[_Watched]:
    """Hooks that cut the backward pass into parts, and measure what the trunks save in the forward pass."""
    watched, handles = _Watched(), []
    for model in models:
        handles += watch_gradients(model, counter)
        blocks = layers_of(model)
        assert model.trunk is not None
        if blocks:
            handles.append(blocks[0].register_forward_hook(_cutting(watched, counter)))

        def before(module: nn.Module, inputs: Any) -> None:
            watched.trunk -= counter.live

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            watched.trunk += counter.live

        handles += [
            model.trunk.model.register_forward_pre_hook(before),
            model.trunk.model.register_forward_hook(after),
        ]
    try:
        yield watched
    finally:
        for handle in handles:
            handle.remove()


def _cutting(watched: _Watched, counter: LiveBytes) -> Callable[..., None]:
    seen: list[object] = []

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if not seen and isinstance(hidden, Tensor) and hidden.requires_grad:  # a checkpointed block runs twice
            seen.append(None)
            hidden.register_hook(lambda gradient: watched.cut(counter))

    return hook


def held_by(models: Sequence[nn.Module]) -> Iterator[Tensor]:
    """The weights and buffers of models."""
    for model in models:
        yield from model.parameters()
        yield from model.buffers()


def _work(work: Work) -> Figures:
    return asdict(work)

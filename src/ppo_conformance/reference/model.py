"""A Llama of a few thousand weights in numpy float64, forward and backward by hand.

The names and shapes of the weights are those of transformers' `LlamaForCausalLM`, so that any library can load them. A
function of the forward pass returns its result and a function that maps the result's gradient to that of its input;
on the way, this adds the gradients of the weights to `gradients`.

Source: Touvron et al. 2023 (arXiv 2302.13971) §2.2; RMSNorm: arXiv 1910.07467; rotary positions: arXiv 2104.09864;
SwiGLU: arXiv 2002.05202.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo_conformance.protocol import Array

Ints = NDArray[np.int64]
Weights = dict[str, Array]
Backward = Callable[[Array], Array]

NORM_EPS = 1e-6
ROTARY_BASE = 10_000.0
NEVER = -1e9
"""A score of attention whose probability is exactly 0."""


def shapes_of(model: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each weight of a case's model, in the order that `initial_weights` counts.

    Args:
        model: `vocabulary`, `width`, `layers`, `heads`, `hidden`; `tied` if the output layer is the embedding; `head`
            is the name of a scalar output layer: `value_head`, which has a bias, `score`, or None; `lora`, the `rank`
            and `alpha` of an adapter of q and v, or None.
    """
    width, hidden = model["width"], model["hidden"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model["vocabulary"], width)}
    for layer in range(model["layers"]):
        name = f"model.layers.{layer}."
        for each in "qkvo":
            shapes[f"{name}self_attn.{each}_proj.weight"] = (width, width)
        for each in ("gate", "up"):
            shapes[f"{name}mlp.{each}_proj.weight"] = (hidden, width)
        shapes[f"{name}mlp.down_proj.weight"] = (width, hidden)
        for each in ("input", "post_attention"):
            shapes[f"{name}{each}_layernorm.weight"] = (width,)
    shapes["model.norm.weight"] = (width,)
    if not model["tied"]:
        shapes["lm_head.weight"] = (model["vocabulary"], width)
    if model["head"]:
        shapes[f"{model['head']}.weight"] = (1, width)
    if model["head"] == "value_head":
        shapes["value_head.bias"] = (1,)
    if model.get("lora"):  # drawn last, so that all other weights equal those of the model without LoRA
        for name in [name for name in shapes if name.endswith(("q_proj.weight", "v_proj.weight"))]:
            shapes[name.replace("weight", "lora_A.weight")] = (model["lora"]["rank"], width)
            shapes[name.replace("weight", "lora_B.weight")] = (width, model["lora"]["rank"])
    return shapes


def initial_weights(model: Mapping[str, Any]) -> Weights:
    """The weights that a case starts from: weight i of all, counted row by row, is s·sin(i² + i/7); vectors, 1 + that.

    s = √(2 / columns) for matrices, so that the variance is 1 / columns, and 0.1 for vectors.
    """
    weights: Weights = {}
    start = 0
    for name, shape in shapes_of(model).items():
        index = np.arange(start, start + np.prod(shape), dtype=np.float64).reshape(shape)
        start += index.size
        wave = np.sin(index * index + index / 7)
        weights[name] = 1 + 0.1 * wave if len(shape) == 1 else np.sqrt(2 / shape[1]) * wave
    return weights


@dataclass
class Llama:
    """A forward pass of the model, and its backward pass.

    Attributes:
        weights: By name; see `shapes_of`.
        heads: Heads of attention.
        gradients: The sum of what the backward passes found.
    """

    weights: Weights
    heads: int
    gradients: Weights = field(init=False)

    def __post_init__(self) -> None:
        self.gradients = {name: np.zeros_like(weight) for name, weight in self.weights.items()}

    def hidden(self, ids: Ints) -> tuple[Array, Callable[[Array], None]]:
        """The last hidden states of texts, [lines, time]. What follows a text is read by nothing of it."""
        states = self.weights["model.embed_tokens.weight"][ids]
        undo: list[Backward] = []
        for layer in range(sum(name.endswith("q_proj.weight") for name in self.weights)):
            name = f"model.layers.{layer}."
            for part, norm in ((self._attention, "input"), (self._mlp, "post_attention")):
                normed, norm_backward = self._norm(states, f"{name}{norm}_layernorm.weight")
                added, part_backward = part(normed, name)
                states = states + added
                undo += [_residual(norm_backward, part_backward)]
        states, last = self._norm(states, "model.norm.weight")

        def backward(gradient: Array) -> None:
            gradient = last(gradient)
            for each in reversed(undo):
                gradient = each(gradient)
            np.add.at(self.gradients["model.embed_tokens.weight"], ids, gradient)

        return states, backward

    def output(self, states: Array, layer: str = "lm_head") -> tuple[Array, Backward]:
        """The logits, or the output of a scalar layer, at hidden states."""
        name, bias = f"{layer}.weight", f"{layer}.bias"
        output, weight_backward = self._linear(states, name if name in self.weights else "model.embed_tokens.weight")

        def backward(gradient: Array) -> Array:
            if bias in self.weights:
                self.gradients[bias] += gradient.sum()
            return weight_backward(gradient)

        return output + self.weights.get(bias, 0.0), backward

    def _linear(self, states: Array, name: str) -> tuple[Array, Backward]:
        """Compute y = x Wᵀ."""
        weight = self.weights[name]

        def backward(gradient: Array) -> Array:
            self.gradients[name] += gradient.reshape(-1, len(weight)).T @ states.reshape(-1, weight.shape[1])
            return gradient @ weight

        return states @ weight.T, backward

    def _norm(self, states: Array, name: str) -> tuple[Array, Backward]:
        """Compute y = w·x / √(mean x² + ε)."""
        weight = self.weights[name]
        scale = 1 / np.sqrt((states**2).mean(-1, keepdims=True) + NORM_EPS)

        def backward(gradient: Array) -> Array:
            self.gradients[name] += (gradient * states * scale).reshape(-1, len(weight)).sum(0)
            inner = gradient * weight
            return scale * (inner - states * scale**2 * (inner * states).mean(-1, keepdims=True))

        return states * scale * weight, backward

    def _attention(self, states: Array, name: str) -> tuple[Array, Backward]:
        """softmax(q kᵀ / √d) v by head, with q and k rotated by their positions."""

        def split(each: Array) -> Array:
            return each.reshape(*each.shape[:2], self.heads, -1).swapaxes(1, 2)

        def joined(each: Array) -> Array:
            return each.swapaxes(1, 2).reshape(states.shape)

        projected = [self._linear(states, f"{name}self_attn.{each}_proj.weight") for each in "qkv"]
        query, key, value = (split(each) for each, _ in projected)
        query, key = rotated(query), rotated(key)
        scale = query.shape[-1] ** -0.5
        scores = np.where(np.tri(states.shape[1], dtype=bool), query @ key.swapaxes(2, 3) * scale, NEVER)
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        chances /= chances.sum(-1, keepdims=True)
        mixed, out_backward = self._linear(joined(chances @ value), f"{name}self_attn.o_proj.weight")

        def backward(gradient: Array) -> Array:
            inner = split(out_backward(gradient))
            slope = inner @ value.swapaxes(2, 3)
            slope = chances * (slope - (slope * chances).sum(-1, keepdims=True)) * scale
            found = (
                rotated(slope @ key, -1),
                rotated(slope.swapaxes(2, 3) @ query, -1),
                chances.swapaxes(2, 3) @ inner,
            )
            parts = [undo(joined(each)) for (_, undo), each in zip(projected, found, strict=True)]
            return parts[0] + parts[1] + parts[2]

        return mixed, backward

    def _mlp(self, states: Array, name: str) -> tuple[Array, Backward]:
        """W_down (silu(W_gate x) · W_up x)."""
        gate, gate_backward = self._linear(states, f"{name}mlp.gate_proj.weight")
        up, up_backward = self._linear(states, f"{name}mlp.up_proj.weight")
        sigmoid = 1 / (1 + np.exp(-gate))
        down, down_backward = self._linear(gate * sigmoid * up, f"{name}mlp.down_proj.weight")

        def backward(gradient: Array) -> Array:
            inner = down_backward(gradient)
            gate_slope = sigmoid * (1 + gate * (1 - sigmoid))
            return gate_backward(inner * up * gate_slope) + up_backward(inner * gate * sigmoid)

        return down, backward


def _residual(norm: Backward, part: Backward) -> Backward:
    """The backward pass of x + part(norm(x))."""
    return lambda gradient: gradient + norm(part(gradient))


def rotated(vectors: Array, sign: int = 1) -> Array:
    """Rotate each pair (i, i + d/2) of the last axis by ± position · base^(−2i/d); [lines, heads, time, d]."""
    half = vectors.shape[-1] // 2
    angles = sign * np.arange(vectors.shape[2])[:, None] * ROTARY_BASE ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = vectors[..., :half], vectors[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def merged(weights: Weights, model: Mapping[str, Any]) -> tuple[Weights, Callable[[Weights], Weights]]:
    """The weights W + α/r·B A of a model with an adapter, and the map of their gradients to those of what is trained.

    Without an adapter, all weights are trained; with one, the adapter and the scalar output layer.

    Source: LoRA, Hu et al. 2021 (arXiv 2106.09685) §4.1.
    """
    if not model.get("lora"):
        return weights, lambda gradients: gradients
    scale = model["lora"]["alpha"] / model["lora"]["rank"]
    matrices = [name.removesuffix("lora_A.weight") for name in weights if "lora_A" in name]
    pairs = {f"{name}weight": (f"{name}lora_A.weight", f"{name}lora_B.weight") for name in matrices}
    whole = {name: weight for name, weight in weights.items() if "lora" not in name}
    whole |= {name: whole[name] + scale * weights[b] @ weights[a] for name, (a, b) in pairs.items()}

    def trained(gradients: Weights) -> Weights:
        found = {name: each for name, each in gradients.items() if name.startswith(f"{model['head']}.")}
        for name, (a, b) in pairs.items():
            found[a] = scale * weights[b].T @ gradients[name]
            found[b] = scale * gradients[name] @ weights[a].T
        return found

    return whole, trained

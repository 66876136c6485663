"""Layouts: how the tokens of a micro-batch are arranged in the tensors that the model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppo_conformance.protocol import Mask
from ppo_conformance.reference.model import Ints

Text = tuple[list[int], list[int]]
"""The tokens of a prompt and of the response to it."""


@dataclass(frozen=True)
class Layout:
    """The tensors of a micro-batch. In every layout a token reads its prompt, and its response up to itself.

    Attributes:
        ids: Tokens, [lines, time].
        positions: The place of each token in its own text.
        visible: True where token [.., t, :] reads token [.., :, s].
        states: For slot t of each response, the line and column of the token before it, in whose state token t was
            chosen; the last slot is the state after the response. [2, responses, slots], 0 beyond the end.
        slots: True at the slots of `states` that exist.
    """

    ids: Ints
    positions: Ints
    visible: Mask
    states: Ints
    slots: Mask

    @classmethod
    def of(cls, texts: Sequence[Text], execution: Mapping[str, Any], pad: int) -> Layout:
        """Lay out the texts.

        Args:
            texts: Prompts and responses.
            execution: `layout`: `padded` (a line per text), `left` (padding before the text), `packed` (all texts in
                one line) or `shared_prompts` (likewise, and equal prompts once); `pad_to`, the least length of lines
                and of responses.
            pad: The padding token.
        """
        kind = execution.get("layout", "padded")
        lines: list[list[tuple[int, int, Any, Any]]] = []
        starts: dict[Any, int] = {}
        states = np.zeros((2, len(texts), 1 + padded_width([each for _, each in texts], execution)), dtype=int)
        slots = np.zeros(states.shape[1:], dtype=bool)
        for number, (prompt, response) in enumerate(texts):
            if kind in ("padded", "left") or not lines:
                lines.append([])
            line = lines[-1]
            shared = ("prompt", tuple(prompt) if kind == "shared_prompts" else number)
            if shared not in starts:
                starts[shared] = len(line)
                line += [(token, place, shared, shared) for place, token in enumerate(prompt)]
            ends = [starts[shared] + len(prompt) - 1, *range(len(line), len(line) + len(response))]
            line += [(token, place, number, shared) for place, token in enumerate(response, len(prompt))]
            states[0, number], slots[number, : len(ends)] = len(lines) - 1, True
            states[1, number, : len(ends)] = ends
        width = max(execution.get("pad_to", 0), *map(len, lines))
        for number, line in enumerate(lines):
            padding: list[tuple[int, int, Any, Any]] = [(pad, 0, "padding", "padding")] * (width - len(line))
            if kind == "left":
                states[1, number] += len(padding)
            lines[number] = padding + line if kind == "left" else line + padding
        ids, positions = (np.array([[token[part] for token in line] for line in lines]) for part in (0, 1))
        names = {name: number for number, name in enumerate({token[2] for line in lines for token in line} | {*starts})}
        own, read = (np.array([[names[token[part]] for token in line] for line in lines]) for part in (2, 3))
        visible = (own[:, None] == own[:, :, None]) | (own[:, None] == read[:, :, None])
        return cls(ids, positions, visible & np.tri(width, dtype=bool), states * slots, slots)


def padded_width(responses: Sequence[list[int]], execution: Mapping[str, Any]) -> int:
    """The width of tensors with a row per response."""
    return max(execution.get("pad_to", 0), *map(len, responses))

"""The records that stages train on: one frozen record per usable row.

Texts are plain strings: conversations are rendered through the chat template when they are read, so later stages never
handle messages. `prompt + completion` is the whole text, character by character.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

__all__ = ["Comparison", "Demonstration", "Prompt", "Ranking", "Record"]


@dataclass(frozen=True)
class Demonstration:
    """An answer to imitate.

    Attributes:
        prompt: the text before the answer; empty for plain text, where the whole text is the completion.
        completion: the text that the loss covers, without the end-of-sequence token that follows it.
        read: ranges of `completion`, in characters, that the loss does not cover: other messages between the answers.
    """

    prompt: str
    completion: str
    read: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Two answers to one prompt, one of them preferred.

    Attributes:
        prompt: the text before both answers.
        chosen: the better answer.
        rejected: the worse answer.
        margin: by how much the chosen answer's score should lead, in units of the score; None for no margin.
    """

    prompt: str
    chosen: str
    rejected: str
    margin: float | None = None


@dataclass(frozen=True)
class Ranking:
    """K answers to one prompt, ranked.

    Attributes:
        prompt: the text before all answers.
        responses: the answers, at least two.
        ranks: one per answer; a smaller rank is better, equal ranks are ties.
    """

    prompt: str
    responses: tuple[str, ...]
    ranks: tuple[float, ...]


@dataclass(frozen=True)
class Prompt:
    """A prompt to sample responses to.

    Attributes:
        text: the text that the policy continues.
        columns: the row's other fields, passed to reward functions.
    """

    text: str
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])


Record: TypeAlias = "Demonstration | Comparison | Ranking | Prompt"

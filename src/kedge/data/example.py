"""An example as the model reads it: its parts in tokens, and what happens to each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kedge.data.records import Comparison, Demonstration, Prompt, Ranking
from kedge.data.token_pieces import token_pieces
from kedge.data.tokens import encode_completion, encode_example, encode_prompt
from kedge.system.texts import printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Part", "example_lines", "parts_of"]

LONGEST_PART = 200
"""Tokens at each end of a part that are decoded for display."""

CONTEXT = 16
"""Tokens before a part that are decoded with it: SentencePiece drops the space of a first token."""


@dataclass(frozen=True)
class Part:
    """A part of an example.

    Attributes:
        name: `prompt`, `completion`, `chosen`, …
        use: what the stage does with it: `read`, `trained on`, `scored`, `continued by the policy`.
        length: its tokens, special tokens included.
        pieces: the text of each token; of a very long part those at both ends.
    """

    name: str
    use: str
    length: int
    pieces: tuple[str, ...]


def parts_of(
    record: Demonstration | Comparison | Ranking | Prompt, tokenizer: PreTrainedTokenizerBase, *, display: bool = True
) -> list[Part]:
    """The parts of a record as the stage encodes them.

    Args:
        record: the record.
        tokenizer: the model's.
        display: decode the pieces; False if only lengths are needed.
    """

    def part(name: str, use: str, ids: Sequence[int], before: Sequence[int] = ()) -> Part:
        return Part(name, use, len(ids), _pieces(tokenizer, ids, before) if display else ())

    if isinstance(record, Prompt):
        return [part("prompt", "continued by the policy", encode_prompt(tokenizer, record.text))]
    if isinstance(record, Demonstration):
        example = encode_example(tokenizer, record.prompt, record.completion, read=record.read)
        prompt = [part("prompt", "read", example.prompt)] if example.prompt else []
        ids, done, turns = example.completion, 0, list[Part]()
        for first, end in (*example.read, (len(ids), len(ids))):
            before = [*example.prompt, *ids[:done]]
            turns.append(part("completion" if record.prompt else "text", "trained on", ids[done:first], before))
            turns += [part("messages", "read", ids[first:end], [*before, *ids[done:first]])] if end > first else []
            done = end
        return [*prompt, *turns]
    answers = (
        {"chosen": record.chosen, "rejected": record.rejected}
        if isinstance(record, Comparison)
        else {f"rank {rank:g}": text for rank, text in zip(record.ranks, record.responses, strict=True)}
    )
    prompt = encode_prompt(tokenizer, record.prompt)
    scored = [part(name, "scored", encode_completion(tokenizer, text), prompt) for name, text in answers.items()]
    return [part("prompt", "read", prompt), *scored]


def _pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], before: Sequence[int]) -> tuple[str, ...]:
    """The text of each token, in the context of those before it; of a long part only both ends."""
    if len(ids) > 2 * LONGEST_PART:
        head, tail = ids[:LONGEST_PART], ids[-LONGEST_PART:]
        return (*_pieces(tokenizer, head, before), *_pieces(tokenizer, tail, ids[:-LONGEST_PART]))
    context = list(before[-CONTEXT:])
    return tuple(token_pieces(tokenizer, [*context, *ids])[len(context) :])


def example_lines(parts: Sequence[Part], *, width: int, num_lines: int = 1, separator: str = "|") -> list[str]:
    """Each part: name, length, use, and the text of its tokens.

    Args:
        parts: the parts.
        width: characters per line.
        num_lines: lines per part; a longer one loses its middle.
        separator: printed between tokens.
    """
    names = max((len(part.name) for part in parts), default=0)
    uses = max((len(part.use) for part in parts), default=0)
    lines: list[str] = []
    for part in parts:
        head = f"  {part.name:{names}} {part.length:6,} {part.use:{uses}}  "
        room = max(width - len(head), 20)
        text = _shortened(separator.join(map(printable, part.pieces)), room * num_lines)
        rows = [text[start : start + room] for start in range(0, len(text), room)] or [""]
        lines += [(head if number == 0 else " " * len(head)) + row for number, row in enumerate(rows)]
    return lines


def _shortened(text: str, most: int) -> str:
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]} … {text[len(text) - half :]}"

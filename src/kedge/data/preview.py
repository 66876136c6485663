"""Previews data: the rows that a stage would read, their lengths, and the rows that it would drop."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import ceil
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy

from kedge.data.records import Comparison, Demonstration, Prompt, Ranking, Table, hint_of
from kedge.data.tokens import encode_completion, encode_example, encode_prompt, token_pieces
from kedge_base.texts import counted, printable, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BARS = "▁▂▃▄▅▆▇█"
NUM_BINS = 16
PLAIN_WIDTH = 100
LINES_PER_PART = 3
MOST_OF_COLUMNS = 2000
"""Maximum characters of the line about columns: a file with ids as keys may read as a row with thousands."""


@dataclass(frozen=True)
class Preview:
    """A source as a stage would read it. `print` shows it.

    Attributes:
        stage: the stage.
        usage: rows, and the number dropped for each reason.
        columns: columns of the first row, each with the kind of its value.
        lengths: length of each part of every usable row, by the part's name, and of whole rows as `row`.
        examples: the first usable rows, split into parts.
        unit: the unit of lengths: `tokens`, or `characters` without a model.
    """

    stage: str
    usage: DataUsage
    columns: Mapping[str, str]
    lengths: Mapping[str, Sequence[int]]
    examples: Sequence[Sequence[Part]]
    unit: str

    def lines(self, width: int) -> list[str]:
        """The preview as text.

        Args:
            width: characters per line; longer examples lose their middle.
        """
        columns = ", ".join(f"{name} ({kind})" for name, kind in self.columns.items()) or "none: bare texts"
        remedy = next(filter(None, map(hint_of, self.usage.dropped)), "")
        separator = "|" if self.unit == "tokens" else ""
        shown = partial(example_lines, width=width, num_lines=LINES_PER_PART, separator=separator)
        note = "" if self.unit == "tokens" else "; without a model, no limit of length is checked"
        return [
            f"as data of {self.stage}: {self.usage.line}",
            f"columns: {shortened(columns, MOST_OF_COLUMNS)}",
            f"lengths in {self.unit}{note}:" if self.lengths else f"no usable row{remedy}",
            *_table(self.lengths),
            *(
                line
                for number, parts in enumerate(self.examples, start=1)
                for line in ("", f"example {number}, in {self.unit}:", *shown(parts))
            ),
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines(shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns))

    __repr__ = __str__


def _table(lengths: Mapping[str, Sequence[int]]) -> list[str]:
    """Smallest, median and largest length, and a histogram between the smallest and the largest."""
    names = max((len(name) for name in lengths), default=0)
    return [
        f"  {name:{names}}  min {min(values):,}  median {median(values):,.0f}  max {max(values):,}  {histogram(values)}"
        for name, values in lengths.items()
    ]


def histogram(values: Sequence[int]) -> str:
    """Draw a bar per bin of equal width, from the smallest value to the largest."""
    if min(values) == max(values):
        return BARS[-1]
    counts, _ = numpy.histogram(values, NUM_BINS)
    return "".join(f" {BARS}"[ceil(count * len(BARS) / max(counts))] for count in counts)


LONGEST_PART = 200
"""Tokens to decode for display at each end of a long part."""

CONTEXT = 16
"""Number of preceding tokens decoded along with a part, because SentencePiece drops the leading space of the first
token it decodes."""


@dataclass(frozen=True)
class Part:
    """A part of an example.

    Attributes:
        name: `prompt`, `completion`, `chosen`, …
        use: the stage's use of it: `read`, `trained on`, `scored`, `continued by the policy`.
        length: its tokens, special tokens included.
        pieces: the text of each token; for a very long part, only of tokens at both ends.
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
        display: also decode the pieces; False if only lengths are needed.
    """

    def part(name: str, use: str, ids: Sequence[int], before: Sequence[int] = ()) -> Part:
        return Part(name, use, len(ids), _pieces(tokenizer, ids, before) if display else ())

    if isinstance(record, Prompt):
        return [part("prompt", "continued by the policy", encode_prompt(tokenizer, record.text))]
    if isinstance(record, Demonstration):
        example = encode_example(tokenizer, record.prompt, record.completion, read=record.read)
        prompt = [part("prompt", "read", example.prompt)] if example.prompt else []
        ids = example.completion
        done = 0
        turns = list[Part]()
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
    """Decode each token in the context of those before it; of a long part, only both ends."""
    if len(ids) > 2 * LONGEST_PART:
        head = ids[:LONGEST_PART]
        tail = ids[-LONGEST_PART:]
        return (*_pieces(tokenizer, head, before), *_pieces(tokenizer, tail, ids[:-LONGEST_PART]))
    context = list(before[-CONTEXT:])
    return tuple(token_pieces(tokenizer, [*context, *ids])[len(context) :])


def example_lines(parts: Sequence[Part], *, width: int, num_lines: int = 1, separator: str = "|") -> list[str]:
    """Format each part: name, length, use, and the text of its tokens.

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


MOST_NAMED = 3
"""Maximum number of sources that the line names."""


@dataclass(frozen=True)
class DataUsage:
    """The rows of one role of the data, such as the prompts of a PPO run.

    Attributes:
        sources: Names of files, folders or hub data sets; empty for rows passed from Python.
        rows: Rows that the sources hold.
        used: Rows that the run uses, those held out included.
        held_out: Rows that are evaluated on but not trained on.
        cut: Rows with a part that was cut to fit.
        dropped: Unusable rows, by reason.
        shares: The share of each source in the rows that are drawn; empty if every row is drawn once per pass.
        notes: Further facts, such as how rows were held out.
    """

    sources: Sequence[str] = ()
    rows: int = 0
    used: int = 0
    held_out: int = 0
    cut: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    shares: Sequence[float] = ()
    notes: Sequence[str] = ()

    @classmethod
    def of(
        cls, table: Table[Any], limits: Mapping[str, str], *, sources: Sequence[str] = (), further: Sequence[str] = ()
    ) -> DataUsage:
        """The usage of a table that has been read.

        Args:
            table: The table.
            limits: Names of the limits to use in reasons, by the reader's text.
            sources: See the attribute.
            further: Notes beyond those of the table.
        """
        dropped = table.dropped()
        for text, name in limits.items():
            dropped = {reason.replace(text, name): count for reason, count in dropped.items()}
        notes = (*table.notes, *further)
        return cls(sources, table.num_rows, len(table.records), cut=table.num_cut, dropped=dropped, notes=notes)

    @property
    def line(self) -> str:
        """`212 of 400 rows of a.jsonl used, 10 of them held out; 188 dropped: 180 longer than …, 8 empty`."""
        return self._line(self.sources)

    @property
    def public_line(self) -> str:
        """The line with only the last part of each local path, to reveal nothing about the machine."""
        paths = [name for name in self.sources if os.path.exists(name) or name.startswith((".", "~", os.sep))]
        return self._line([os.path.basename(name.rstrip("/")) if name in paths else name for name in self.sources])

    def as_json(self) -> dict[str, Any]:
        """The counts and the line."""
        return {**asdict(self), "line": self.line}

    def _line(self, names: Sequence[str]) -> str:
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        where = f" of {', '.join(names[:MOST_NAMED])}{more}" if names else ""
        part = f"{self.used:,} of " if self.used < self.rows else "all " if self.rows > 1 else ""
        head = f"{part}{counted(self.rows, 'row')}{where} used"
        parts = [f"{head}, {self.held_out:,} of them held out" if self.held_out else head]
        if self.dropped:
            numbers = [f"{number:,} {reason}" for reason, number in self.dropped.items()]
            reasons = ", ".join(numbers if len(numbers) > 1 else self.dropped)
            parts.append(f"{sum(self.dropped.values()):,} dropped: {reasons}")
        if self.cut:
            parts.append(f"{self.cut:,} row{'s' * (self.cut > 1)} cut to fit")
        if self.shares:
            drawn = (f"{share:.0%} {name}" for share, name in zip(self.shares, names, strict=True))
            parts.append(f"drawn as {', '.join(drawn)}")
        return "; ".join([*parts, *self.notes])

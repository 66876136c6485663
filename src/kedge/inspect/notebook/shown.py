"""A result as text of at most three lines, and as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from kedge.inspect.notebook.curve import svg_curve
from kedge.system.texts import printable

__all__ = ["Sample", "Shown", "text_table"]

LONGEST_TEXT = 600
CELL = 'style="text-align:left;vertical-align:top;padding:.1em 1em .1em 0;white-space:pre-wrap;overflow-wrap:anywhere"'


@dataclass(frozen=True)
class Sample:
    """A response to show: the prompt, and texts with their headings."""

    prompt: str
    texts: Mapping[str, str]


@dataclass(frozen=True)
class Shown:
    """What a result shows of itself.

    Attributes:
        kind: Name of the result's class.
        place: Its folder.
        figures: Key figures as text, by label.
        paths: The files to open next, by label.
        following: The call that would come next; empty if there is none.
        curves: Series of values by label; in a notebook only.
        samples: Responses; in a notebook only.
    """

    kind: str
    place: str
    figures: Mapping[str, str]
    paths: Mapping[str, str] = field(default_factory=dict)
    following: str = ""
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    samples: Sequence[Sample] = ()

    def text(self) -> str:
        """At most three lines: what and where with its key figures, the files, and the next call."""
        figures = ", ".join(f"{label} {value}" for label, value in self.figures.items())
        lines = [f"{self.kind} in {self.place}: {figures}" if figures else f"{self.kind} in {self.place}"]
        lines += [", ".join(f"{label}: {path}" for label, path in self.paths.items())] if self.paths else []
        lines += [f"next: {self.following}"] if self.following else []
        return "\n  ".join(map(printable, lines))

    def html(self) -> str:
        """A block without scripts and without external resources; all texts of the run are escaped."""
        rows = {**self.figures, **self.paths, **({"next": self.following} if self.following else {})}
        return "".join(
            [
                f"<div><p><b>{escape(self.kind)}</b> in <code>{_escaped(self.place)}</code></p>",
                "".join(svg_curve(label, values) for label, values in self.curves.items()),
                text_table([[label, value] for label, value in rows.items()]),
                *map(_sample, self.samples),
                "</div>",
            ]
        )


def _sample(sample: Sample) -> str:
    texts = {"prompt": sample.prompt, **sample.texts}
    return f"<hr>{text_table([[label, text] for label, text in texts.items()])}"


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """An HTML table of plain texts."""
    lines = ("".join(f"<td {CELL}>{_escaped(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _escaped(text: str) -> str:
    """Text for HTML, with line breaks kept, other control characters written out, and long texts cut."""
    shown = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"
    return escape("\n".join(printable(line) for line in shown.split("\n")))

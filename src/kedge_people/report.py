"""The report on a folder of labels: a page, and the same figures as text."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from kedge.logs.table import Cell, cell_text, print_table
from kedge_base.intervals import Interval
from kedge_base.run_folder.output import replace_file
from kedge_inspect.doctor import one_line
from kedge_inspect.page.document import render_page
from kedge_inspect.page.numbers import fitting, shortened
from kedge_inspect.report import check_replaceable
from kedge_people.agreement import alike, cohens_kappa, share_of
from kedge_people.labels import Answer
from kedge_people.quality import FASTEST_READING, Disagreement, Person, Quality, prompt_text

REPORT_FILE = "labels.html"

MOST_BYTES = 4_000_000
"""Size limit of the disagreements on the page."""


@dataclass(frozen=True)
class Table:
    """A table: its title, the headings, and the cells by the name of the row."""

    title: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[Cell]]


def write_label_report(folder: Path, quality: Quality) -> Path:
    """Write the page about a folder of labels; return its path.

    Raises:
        OutputError: The page cannot be written, or the file there is not a kedge report.
    """
    path = folder / REPORT_FILE
    check_replaceable(path)
    replace_file(path, [render_page(_page(quality, folder.resolve().name))])
    return path


def text_report(quality: Quality) -> str:
    """Return the report as text."""
    stream = io.StringIO()
    for sentence in _sentences(quality):
        print(sentence, file=stream)
    print(file=stream)
    for each in _tables(quality):
        print_table(each.title, each.columns, each.rows, stream=stream)
    for _, finding in quality.findings:
        print(f"{one_line(finding)}. {finding.means} Try: {finding.try_}.", file=stream)
    return stream.getvalue()


def _page(quality: Quality, name: str) -> dict[str, Any]:
    answers = {(each.person, each.item): each for each in reversed(quality.labels.answers)}
    findings = [{**finding.as_json(), "run": 0} for _, finding in quality.findings]
    return {
        "title": f"Labels in {name}",
        "runs": [],
        "written": time.strftime("Written %d %B %Y, %H:%M"),
        "labels": {
            "sentences": list(_sentences(quality)),
            "findings": [{"severity": each["severity"], "findings": [each]} for each in findings],
            "tables": [
                {
                    "title": each.title,
                    "columns": each.columns,
                    "rows": [[row, *map(cell_text, cells)] for row, cells in each.rows.items()],
                }
                for each in _tables(quality)
            ],
            "disagreements": fitting([_pair(quality, each, answers) for each in quality.disagreements], MOST_BYTES),
            "num_disagreements": len(quality.disagreements),
        },
    }


def _pair(quality: Quality, each: Disagreement, answers: Mapping[tuple[str, str], Answer]) -> dict[str, Any]:
    item = quality.labels.items[each.item]
    return {
        "item": each.item,
        "prompt": shortened(prompt_text(item)),
        "sureness": each.sureness,
        "sides": [
            {
                "person": person,
                "model": item.models[place],
                "text": shortened(item.responses[place]),
                "seconds": answers[person, each.item].seconds,
                "note": shortened(answers[person, each.item].note),
            }
            for person, place in zip(each.people, each.responses, strict=True)
        ],
    }


def _sentences(quality: Quality) -> Iterator[str]:
    people = quality.people
    if not people:
        yield "Nothing to report: no answer compares responses."
        return
    total = sum(person.num_answers for person in people)
    yield (
        f"{total:,} answers by {'one person' if len(people) == 1 else f'{len(people):,} people'}; "
        f"{quality.num_shared:,} items have those of two or more."
    )
    if quality.agreement is None:
        yield "Agreement is unknown yet: no item has answers of two people."
        return
    yield (
        f"Two people agree on {quality.agreement.value:.0%} of the comparisons "
        f"({quality.agreement.low:.0%} to {quality.agreement.high:.0%}); labelers of InstructGPT did on 73%."
    )
    known = quality.alpha or "unknown, as all answers are equal"
    yield f"Krippendorff's α, 0 for chance and 1 for full agreement: {known}."
    if count := len(quality.disagreements):
        yield f"Of {count:,} items, two people prefer opposite responses; {REPORT_FILE} shows them."


def _tables(quality: Quality) -> Iterator[Table]:
    if not quality.people:
        return
    limits = " or ".join(f"{FASTEST_READING[unit]} {unit}" for unit in sorted({each.unit for each in quality.people}))
    yield Table(
        f"People (too fast: over {limits} per minute)",
        ["person", "answers", "skipped", "ties", "time", "per minute", "too fast", "same again"],
        {person.name: _habits(person) for person in quality.people},
    )
    yield Table(
        "Choices (reliability: share of the better response, biases aside, by the joint model)",
        ["person", "agrees", "reliability", "shown first", "longer"],
        {person.name: _choices(person) for person in quality.people},
    )
    axes = sorted({axis for person in quality.people for axis in person.above})
    if axes:
        rows = {person.name: [person.above.get(axis) for axis in axes] for person in quality.people}
        yield Table("Grades above those of an average person", ["person", *axes], rows)
    if quality.pairs:
        rows = {
            " and ".join(people): [str(len(tables)), _percent(share_of(alike(tables))), cohens_kappa(tables)]
            for people, by_item in quality.pairs.items()
            for tables in [[*by_item.values()]]
        }
        yield Table("Agreement of two people", ["people", "items", "the same", "Cohen's κ"], rows)
    if quality.win_rates:
        rows = {
            f"{each.models[0]} over {each.models[1]}": [
                str(each.num_items),
                _percent(each.raw),
                each.controlled and _percent(each.controlled.rate),
                each.controlled and ", ".join(each.controlled.of),
            ]
            for each in quality.win_rates
        }
        yield Table("Win rates of the models", ["models", "items", "win rate", "controlled", "for"], rows)


def _habits(person: Person) -> list[Cell]:
    return [
        str(person.num_answers),
        str(person.num_skipped),
        f"{fmean(person.tied):.0%}",
        f"{person.seconds:.0f} s",
        f"{person.pace:,.0f} {person.unit}",
        f"{fmean(person.fast):.0%}",
        _percent(share_of(person.again)),
    ]


def _choices(person: Person) -> list[Cell]:
    reliability = person.model.accuracy if person.others else None
    others, first, longer = map(share_of, (person.others, person.first, person.longer))
    return [_percent(each) for each in (others, reliability, first, longer)]


def _percent(interval: Interval | None) -> str | None:
    if interval is None:
        return None
    limits = f" ({100 * interval.low:.0f}–{100 * interval.high:.0f})" if interval.is_known else ""
    return f"{interval.value:.0%}{limits}"

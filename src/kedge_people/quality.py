"""The quality of labels: figures per person, findings on people, and disagreements that deserve a second look.

The findings are the doctor's: the evidence, its meaning and what to do.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import fmean, median

from kedge_base.intervals import Interval, share_interval
from kedge_base.machine.progress import format_figure
from kedge_base.texts import names_judge
from kedge_inspect.doctor.rule import Finding, Severity, severity_rank
from kedge_people.agreement import (
    Comparison,
    Tables,
    alike,
    alpha_of_choices,
    by_unit,
    comparisons_in,
    judgments,
    outcomes,
    share_of,
    summed,
    tables_between,
)
from kedge_people.controlled import WinRate, win_rates
from kedge_people.labels import Answer, Item, Labels
from kedge_people.raters import Comparer, fit_comparers, fit_severities

CERTAIN = 0.999
"""Confidence of the intervals that decide on findings."""

FEW = 10
"""Number of answers below which no one is judged."""

FASTEST_READING = {"words": 400, "characters": 650}
"""Per minute. Most adults read 175 to 320 words (Brysbaert 2019, J. Memory and Language 109, 104047); above 400,
understanding is lost (Rayner et al. 2016, Psychological Science in the Public Interest 17, 4–34).

Characters are those of Chinese and Japanese, which have no spaces between words. Read aloud, 228 words of English take
as long as 255 characters of Chinese and 357 of Japanese (Trauzettel-Klosinski and Dietz 2012, Invest. Ophthalmol. Vis.
Sci. 53, 5452–5461), and thus 400 as long as 447 and 626.
"""

_HAN_AND_KANA = (
    r"\u3005-\u3007\u3041-\u3096\u30a1-\u30fa\u30fc\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9d"
    r"\U00020000-\U0003ffff"
)
_UNITS = re.compile(rf"(?P<characters>[{_HAN_AND_KANA}])|(?P<words>[^\W{_HAN_AND_KANA}][^\s{_HAN_AND_KANA}]*)")
"""Count a text in characters if it is Chinese or Japanese, and in words otherwise."""

OFTEN_FAST = 0.2
"""Share of answers faster than reading from which a person is named; some pairs are decided at a glance."""

ONE_SIDED = 0.75
"""Share of the answers in favor of one position from which a person is named; chance has ½."""

USUALLY_LONGER = 0.6
"""Share of the longer response in the choices of a person whose like is not known: always preferring the longer summary
agrees with people on so many pairs (Stiennon et al. 2020).
"""

LONGER = 0.8
SHORTER = 0.3
APART = 0.05
"""Shares of the longer response from which a person is named, if they are as far apart from the others' median."""

MOSTLY_TIED = 0.7
"""Share of ties from which a person is named."""

NEARLY_ALL = 0.9
"""Share from which a habit is serious."""

MANY_DEVIATIONS = 3.5
"""Standard deviations by which the number of changes of side differs from that of chance (Wald and Wolfowitz 1940)."""

UNLIKELY_STREAK = 5e-4
"""Probability of a streak on one side from which a person is named."""

UNLIKE_OTHERS = 3.0
SURELY_UNLIKE = 5.0
"""Log likelihood ratios of a warning and of a serious finding: 20 and 150 times. An
honest person gets the warning by chance in about 1 % of the cases, if 20 pairs are shared."""

DOCS = "docs/labels.md"


@dataclass(frozen=True)
class Person:
    """Figures of one person; without repeats.

    Attributes:
        name: The person.
        num_answers: Number of items compared.
        num_skipped: Number of items skipped.
        seconds: Median time of an answer.
        pace: Median of what was shown per minute, in `unit`. Prompts that the person has seen before do not count.
        unit: Characters if most of the texts are Chinese or Japanese, else words.
        fast: Share of answers faster than reading.
        tied: Share of answers without any preference.
        first: Share of the response shown first, of the answers with a preference.
        longer: Share of the longer response, likewise.
        again: Share of the same outcomes in each repeated item.
        others: Share of the same outcomes as other people in each shared item.
        num_others: Number of people who answered items that this one answered.
        model: Reliability and biases in the joint model.
        above: By axis, grades given above those of an average person.
    """

    name: str
    num_answers: int
    num_skipped: int
    seconds: float
    pace: float
    unit: str
    fast: Sequence[float]
    tied: Sequence[float]
    first: Sequence[float]
    longer: Sequence[float]
    again: Sequence[float]
    others: Sequence[float]
    num_others: int
    model: Comparer
    above: Mapping[str, Interval]


@dataclass(frozen=True)
class Disagreement:
    """Two people's opposite choices between two responses.

    Attributes:
        item: The item's id.
        people: Who prefers the first of the responses, and who the second.
        responses: The places of both responses in the item.
        sureness: The lower of the probabilities that each of the two is right, by their own answer alone.
    """

    item: str
    people: tuple[str, str]
    responses: tuple[int, int]
    sureness: float


@dataclass(frozen=True)
class Quality:
    """The quality of labels.

    Attributes:
        labels: The labels.
        people: Figures per person.
        pairs: Of each two people with shared items, the tables of their outcomes.
        num_shared: Number of items with answers of two or more people.
        agreement: Share of the same outcomes of two people, each item counted alike.
        alpha: Krippendorff's α of the outcomes.
        disagreements: One per item, the surest first.
        win_rates: Of each two models.
        findings: With the person, most severe first.
    """

    labels: Labels
    people: Sequence[Person]
    pairs: Mapping[tuple[str, str], Tables]
    num_shared: int
    agreement: Interval | None
    alpha: Interval | None
    disagreements: Sequence[Disagreement]
    win_rates: Sequence[WinRate]
    findings: Sequence[tuple[str, Finding]]


def examine_labels(labels: Labels) -> Quality:
    """Examine labels; answers that compare nothing, such as a thumb for a single response, are left out."""
    answers, repeats = judgments(labels)
    comparisons = comparisons_in(labels, answers)
    tables = tables_between(comparisons)
    models = fit_comparers(comparisons)
    severities = fit_severities(labels.answers)

    def person(name: str) -> Person:
        mine = answers[name]
        counts, paces = _read(labels, mine)
        unit = max(FASTEST_READING, key=lambda each: _minutes({each: counts[each]}))
        by_item = [comparisons_in(labels, {name: {item: answer}}) for item, answer in mine.items()]
        others = [each for names, each in tables.items() if name in names]
        again = [(outcomes(first), outcomes(other)) for first, other in repeats if first.person == name]
        return Person(
            name=name,
            num_answers=len(mine),
            num_skipped=sum(each.person == name and each.verdict == "skipped" for each in labels.answers),
            seconds=median(answer.seconds for answer in mine.values()),
            pace=median(paces) * FASTEST_READING[unit],
            unit=unit,
            fast=[float(pace > 1) for pace in paces],
            tied=[float(not any(each.outcome for each in item)) for item in by_item],
            first=_shares([each.outcome * each.position for each in item] for item in by_item),
            longer=_shares([each.outcome * each.longer for each in item] for item in by_item),
            again=[fmean(other[pair] == outcome for pair, outcome in first.items()) for first, other in again],
            others=alike(summed(others)),
            num_others=len(others),
            model=models[name],
            above={axis: each[name] for axis, each in severities.items() if name in each},
        )

    people = [person(name) for name in answers]
    shared = summed(tables.values())
    return Quality(
        labels=labels,
        people=people,
        pairs=tables,
        num_shared=len(shared),
        agreement=share_of(alike(shared)),
        alpha=alpha_of_choices(comparisons),
        disagreements=_disagreements(comparisons, models),
        win_rates=win_rates(labels, comparisons),
        findings=sorted(_findings(people), key=lambda each: severity_rank(each[1])),
    )


def _shares(items: Iterable[Sequence[int]]) -> list[float]:
    """Share of the positive signs of each item, among those that are not 0; without items that have none."""
    known = ([sign > 0 for sign in signs if sign] for signs in items)
    return [fmean(signs) for signs in known if signs]


def prompt_text(item: Item) -> str:
    """Return an item's prompt, of a conversation all messages."""
    return item.prompt if isinstance(item.prompt, str) else "\n".join(each["content"] for each in item.prompt)


def _read(labels: Labels, answers: Mapping[str, Answer]) -> tuple[Counter[str], list[float]]:
    """Count the words and characters shown, and return the pace of each answer as a multiple of the fastest reading."""
    total, paces = Counter[str](), list[float]()
    seen = set[str]()
    for name, answer in answers.items():
        item = labels.items[name]
        prompt = prompt_text(item)
        texts = [*item.responses, *([] if prompt in seen else [prompt])]
        seen.add(prompt)
        counts = Counter(str(unit.lastgroup) for text in texts for unit in _UNITS.finditer(text))
        total += counts
        paces.append(60 * _minutes(counts) / max(answer.seconds, 0.01))
    return total, paces


def _minutes(counts: Mapping[str, int]) -> float:
    """Return the least time (minutes) in which these numbers of words and characters can be read."""
    return sum(number / FASTEST_READING[unit] for unit, number in counts.items())


def _disagreements(comparisons: Sequence[Comparison], models: Mapping[str, Comparer]) -> list[Disagreement]:
    found: dict[str, Disagreement] = {}
    for (item, i, j), unit in by_unit(comparisons).items():
        sure = {each.person: models[each.person].evidence(each) for each in unit}
        for one in unit:
            for other in unit:
                if (one.outcome, other.outcome) == (1, -1):
                    sureness = min(sure[one.person], 1 - sure[other.person])
                    if item not in found or sureness > found[item].sureness:
                        found[item] = Disagreement(item, (one.person, other.person), (i, j), sureness)
    return sorted(found.values(), key=lambda each: -each.sureness)


def _findings(people: Sequence[Person]) -> Iterator[tuple[str, Finding]]:
    judged = [person for person in people if person.num_answers >= FEW]
    for person in judged:
        others = [other for other in judged if other is not person]
        checked = (_position(person), _length(person, others), _ties(person, others), _fast(person),
                   _reliability(person))  # fmt: skip
        yield from ((person.name, finding) for finding in checked if finding is not None)


def _position(person: Person) -> Finding | None:
    """Look for a preferred position, then for a pattern of positions."""
    sides = person.first
    if len(sides) < FEW:
        return None
    share = share_interval(sides, confidence=CERTAIN)
    for value, reach, name, place in (
        (share.value, share.low, "always_first", "first (left)"),
        (1 - share.value, 1 - share.high, "always_last", "last (right)"),
    ):
        if value >= ONE_SIDED and reach > 0.5:
            return _found(
                person,
                name,
                _graded(value, NEARLY_ALL),
                f"prefers the response shown {place} in {value:.0%} of {len(sides)} answers with a preference; the "
                "order is random, so chance has 50%",
                "The position decides, not the text.",
                "withdraw the answers (--withdraw), or show the person a few of them and let them judge again",
            )
    clear = [side > 0.5 for side in sides if side != 0.5]
    changes = sum(one != other for one, other in pairwise(clear))
    odds = 2 * sum(clear) * (len(clear) - sum(clear)) / max(len(clear), 1)
    deviation = math.sqrt(max(odds * (odds - 1) / max(len(clear) - 1, 1), 0.0))
    streak = max((len(list(group)) for _, group in groupby(clear)), default=0)
    if abs(changes - odds) <= MANY_DEVIATIONS * deviation and len(clear) * 0.5**streak > UNLIKELY_STREAK:
        return None
    return _found(
        person,
        "pattern_of_positions",
        "warning",
        f"changes the preferred side {changes} times in {len(clear)} answers, with up to {streak} in a row on the same "
        f"side; by chance, it changes about {odds:.0f} times",
        "The answers follow a pattern, such as alternating or one key for a while. The order shown is random, so no "
        "honest choice does.",
        "look at the time of the answers to find where the pattern begins, and withdraw or repeat them",
    )


def _length(person: Person, others: Sequence[Person]) -> Finding | None:
    if len(person.longer) < FEW:
        return None
    share = share_interval(person.longer, confidence=CERTAIN)
    usual = median([fmean(each.longer) for each in others if len(each.longer) >= FEW] or [USUALLY_LONGER])
    is_longer = share.value >= LONGER and share.low > usual + APART
    if not is_longer and not (share.value <= SHORTER and share.high < usual - APART):
        return None
    word = "longer" if is_longer else "shorter"
    value = share.value if is_longer else 1 - share.value
    return _found(
        person,
        f"always_{word}",
        _graded(value, NEARLY_ALL),
        f"prefers the {word} response in {value:.0%} of {len(person.longer)} answers with a preference; usual is "
        f"{usual if is_longer else 1 - usual:.0%}",
        "The length decides, not the content. A reward model learns that first.",
        "say in the instructions that length is no merit, and let others judge these items",
    )


def _ties(person: Person, others: Sequence[Person]) -> Finding | None:
    share = share_interval(person.tied, confidence=CERTAIN)
    usual = median([fmean(each.tied) for each in others] or [0.2])
    if share.value < MOSTLY_TIED or share.low <= usual + 2 * APART:
        return None
    return _found(
        person,
        "always_tie",
        _graded(share.value, NEARLY_ALL),
        f"calls {share.value:.0%} of {len(person.tied)} items ties; usual is {usual:.0%}",
        "Ties teach a reward model next to nothing.",
        "ask for the better response also where the difference is small, or let others judge these items",
    )


def _fast(person: Person) -> Finding | None:
    share = share_interval(person.fast, confidence=CERTAIN)
    if share.low <= OFTEN_FAST or names_judge(person.name):  # a judge over an API reads faster than people
        return None
    return _found(
        person,
        "faster_than_reading",
        _graded(share.value, NEARLY_ALL),
        f"{share.value:.0%} of {len(person.fast)} answers came faster than at {FASTEST_READING[person.unit]} "
        f"{person.unit} per minute; the median is {person.pace:,.0f}",
        "Most adults read at less than 80% of this pace: these answers cannot rest on the whole text.",
        "let others judge some of these items; if they disagree, withdraw the answers",
    )


def _reliability(person: Person) -> Finding | None:
    if person.num_others < 2:  # of two people who disagree, either may be wrong
        return None
    model = person.model
    agrees = f"agrees with others in {fmean(person.others):.0%} of the comparisons"
    if model.log_reversed > UNLIKE_OTHERS and model.log_reversed > model.log_coin:
        return _found(
            person,
            "reversed",
            _graded(model.log_reversed, SURELY_UNLIKE),
            f"{agrees}; such answers are {_times(model.log_reversed)} likely on a reversed scale as on the right one",
            "The person may take the scale the other way round: 1 for the worst.",
            "ask how they read the scale; do not reverse the answers yourself",
        )
    if model.log_coin <= UNLIKE_OTHERS:
        return None
    return _found(
        person,
        "agrees_with_nobody",
        _graded(model.log_coin, SURELY_UNLIKE),
        f"{agrees}; such answers are {_times(model.log_coin)} likely from a coin as from a typical person",
        "The person does not tell the responses apart as the others do, or judges something else.",
        "go through some disagreements together, and share more items",
    )


def _found(person: Person, rule: str, severity: Severity, seen: str, means: str, advice: str) -> Finding:
    return Finding(rule, severity, f"{person.name}: {seen}", means, "", "switch", advice, DOCS)


def _graded(value: float, limit: float) -> Severity:
    return "serious" if value >= limit else "warning"


def _times(log_ratio: float) -> str:
    ratio = math.exp(min(log_ratio, 7.0))
    return "over 1,000 times as" if ratio > 1000 else f"{format_figure(ratio)} times as"

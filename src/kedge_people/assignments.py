"""Assigns questions to people: overlapping shares, repeated questions, and responses in random order.

All of it follows from a seed in the folder, so that a reload or a new server asks the same questions.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from getpass import getuser
from pathlib import Path
from typing import NamedTuple

from kedge_base.errors import ConfigError, DataError
from kedge_base.run_folder.output import replace_file
from kedge_base.texts import names_judge
from kedge_people.labels import Answer, Item, Labels

ASSIGNMENTS_FILE = "assignments.json"

AXES = {"stiennon": ("overall", "accuracy", "coverage", "coherence")}
"""Named sets of axes. Source: Stiennon et al. 2020, appendix C.5."""

_NAME = re.compile(r"[\w.@+-][\w .@+-]{0,63}")


class Question(NamedTuple):
    """An item as it is shown to a person.

    Attributes:
        item: The item's id.
        order: The responses in the order shown.
    """

    item: str
    order: tuple[int, ...]


@dataclass(frozen=True)
class Assignments:
    """The questions for each person.

    Attributes:
        people: Names, in the order of joining.
        seed: Seed of every draw.
        overlap: Share of the items that everybody gets.
        repeats: Share of a person's items that are asked again, at most ½.
        axes: Names of the axes that responses are graded on.
        owners: The person who gets an item; None for everybody.
    """

    people: tuple[str, ...] = ()
    seed: int = 0
    overlap: float = 0.2
    repeats: float = 0.05
    axes: tuple[str, ...] = ()
    owners: Mapping[str, str | None] = field(default_factory=dict[str, "str | None"])

    def questions(self, person: str, items: Mapping[str, Item]) -> list[Question]:
        """All questions for a person. An item is asked again after half as many others as the person has."""
        own = [name for name in items if name in self.owners and self.owners[name] in (None, person)]
        early = [place for place, name in enumerate(own[: len(own) // 2]) if len(items[name].responses) > 1]
        early.sort(key=lambda place: self._draw("repeat", person, own[place]).random())
        again = early[: round(self.repeats * len(own))]
        asked = [(float(place), self.question(person, items[name])) for place, name in enumerate(own)]
        asked += [(place + len(own) / 2, self.question(person, items[own[place]], again=True)) for place in again]
        return [question for _, question in sorted(asked)]

    def left(self, person: str, items: Mapping[str, Item], own: Sequence[Answer]) -> list[Question]:
        """The questions that a person has not answered; a skipped item is not asked again.

        Args:
            person: The person.
            items: All items.
            own: The person's answers that count.
        """
        counts = Counter(answer.item for answer in own)
        counts.update({answer.item for answer in own if answer.verdict == "skipped"})
        asked = self.questions(person, items)
        answered = {(answer.item, answer.order) for answer in own}
        done = set[Question]()
        # Match answers to questions with the same order first: an undone answer may be older than that to the repeat.
        for question in sorted(asked, key=lambda each: each not in answered):
            if counts[question.item] > 0:
                counts[question.item] -= 1
                done.add(question)
        return [question for question in asked if question not in done]

    def question(self, person: str, item: Item, *, again: bool = False) -> Question:
        """An item with its responses in random order; a repeat has another order."""
        count = len(item.responses)
        draw = self._draw("order", person, item.id)
        order = draw.sample(range(count), count)
        first = order
        while again and count > 1 and order == first:
            order = draw.sample(range(count), count)
        return Question(item.id, tuple(order))

    def dealt(self, labels: Labels, people: Sequence[str]) -> Assignments:
        """Deal new items, and once further people join, deal all unanswered ones again.

        The next item of each person stays, since it may be on the screen.
        """
        joining = [name for name in people if name not in self.people]
        everybody = (*self.people, *joining)
        new = [name for name in labels.items if name not in self.owners]
        new.sort(key=lambda name: self._draw("overlap", name).random())
        shared = new[: round(self.overlap * len(new))]
        kept = {**self.owners, **dict.fromkeys(shared)}
        taken = {answer.item for answer in labels.answers}
        for person in self.people if joining else ():
            own = [name for name, owner in self.owners.items() if owner == person and name not in taken]
            taken.update(own[:1])
        open_ones = [
            name
            for name in labels.items
            if name not in kept or (joining and kept[name] is not None and name not in taken)
        ]
        owners = {**kept, **{name: everybody[place % len(everybody)] for place, name in enumerate(open_ones)}}
        return replace(self, people=everybody, owners={name: owners[name] for name in labels.items})

    def _draw(self, *names: str) -> random.Random:
        return random.Random(repr((self.seed, *names)))


def read_assignments(folder: Path) -> Assignments:
    """Read a folder's assignments; a new folder's have no people.

    Raises:
        DataError: The file is damaged.
    """
    path = folder / ASSIGNMENTS_FILE
    if not path.is_file():
        return Assignments()
    try:
        values = json.loads(path.read_bytes())
        return Assignments(**{**values, "people": tuple(values["people"]), "axes": tuple(values["axes"])})
    except (ValueError, TypeError, LookupError) as error:
        raise DataError(f"{path} is damaged ({error}); delete it to deal the items again") from error


def write_assignments(folder: Path, assignments: Assignments) -> None:
    """Write a folder's assignments, atomically."""
    replace_file(folder / ASSIGNMENTS_FILE, [json.dumps(asdict(assignments), indent=1).encode() + b"\n"])


def names_of(text: str, option: str) -> tuple[str, ...]:
    """Parse names that commas separate.

    Raises:
        ConfigError: A name is unusual or given twice.
    """
    names = tuple(checked_name(name.strip(), option) for name in text.split(","))
    if len(set(names)) < len(names):
        raise ConfigError(f"{option} {text}: a name is given twice")
    return names


def checked_name(name: str, option: str) -> str:
    """Check a name and return it.

    Raises:
        ConfigError: It is unusual.
    """
    if not _NAME.fullmatch(name) and not names_judge(name):
        raise ConfigError(f"{option}: {name!r} is not a name; expected letters and digits, as in ana")
    return name


def own_name() -> str:
    """The login name; `me` if it is missing or unusual."""
    with suppress(OSError, KeyError, ImportError, ConfigError):
        return checked_name(getuser(), "")
    return "me"

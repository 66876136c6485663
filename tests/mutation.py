"""A mutation of the source that kedge's tests must detect, and where it applies."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).resolve().parent.parent / "src"


@dataclass(frozen=True)
class Mutation:
    """One mistake.

    Attributes:
        name: The mistake, in kebab case.
        where: Qualified name of the function, class or constant, without the modules around it where the text below is
            in no other of this name: it is found wherever it moves.
        original: The text to be replaced; it occurs exactly once there.
        mutated: Its replacement.
        test: The pytest node id of the test that fails then.
    """

    name: str
    where: str
    original: str
    mutated: str
    test: str


class Place(NamedTuple):
    """A file under `src`, and the offset of a mutation's text in it."""

    file: str
    offset: int


class StaleMutationError(Exception):
    """A mutation's text is no longer in the source."""


def find(mutation: Mutation, source: Path = SOURCE) -> Place:
    """Where a mutation applies.

    Raises:
        StaleMutationError: The text does not occur exactly once in functions of the name.
    """
    places = {
        Place(file, offset)
        for file, text in _texts(source).items()
        if mutation.original in text
        for name, start, end in _definitions(file, text)
        if f".{name}".endswith(f".{mutation.where}")
        for offset in _occurrences(text, mutation.original, start, end)
    }
    if len(places) != 1:
        raise StaleMutationError(
            f"{mutation.name}: {mutation.where} holds {mutation.original!r} {len(places)} times, not once"
        )
    return places.pop()


@cache
def _texts(source: Path) -> dict[str, str]:
    return {str(path.relative_to(source)): path.read_text(encoding="utf-8") for path in sorted(source.rglob("*.py"))}


@cache
def _definitions(file: str, text: str) -> list[tuple[str, int, int]]:
    """Qualified names of a file's functions, classes and constants, each with the offsets of its lines."""
    offsets = [0]
    for line in text.split("\n"):
        offsets.append(offsets[-1] + len(line) + 1)
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def walk(body: list[ast.stmt], outer: str) -> Iterator[tuple[str, int, int]]:
        for node in body:
            assert node.end_lineno is not None
            names = []
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names = [node.name]
                yield from walk(node.body, f"{outer}.{node.name}")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            for name in names:
                yield f"{outer}.{name}", offsets[node.lineno - 1], offsets[node.end_lineno]

    return list(walk(ast.parse(text).body, module))


def _occurrences(text: str, part: str, start: int, end: int) -> Iterator[int]:
    while (found := text.find(part, start, end)) >= 0:
        yield found
        start = found + 1

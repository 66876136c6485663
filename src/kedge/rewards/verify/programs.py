"""Programs that pass the tests of their row.

    assert f(2) == 4        in the sandbox: f(2) ─▶ plain data ─▶ here: equal to 4?

The program never sees the expected values, and its own objects take part in no comparison: nothing passes but what is
right.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from kedge.errors import RewardError
from kedge.rewards.source import Verdict
from kedge.rewards.verify.assertions import Tests, read_tests
from kedge.rewards.verify.checking import CUT_OFF, RIGHT, WRONG_VALUE, decoded, read_rows, reads, without_thoughts
from kedge.rewards.worker.confined import decode
from kedge.rewards.worker.sandbox import ARBITRARY, RAISED, TOO_SLOW, Sandbox, open_sandbox

_Reference = TypeVar("_Reference")

NO_CODE = "no code"

_PYTHON = re.compile(
    r"^[ \t]*(?:def |class |import |from [\w.]+ import|@|print\(|return\b|(?:for|while|if) .*:|[\w.]+ *=)", re.MULTILINE
)

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([^`\s]*)[^`]*$")
_DEFINED = re.compile(r"^[ \t]*(?:(?:async +)?def +|class +)(\w+)|^(\w+) *=(?!=)", re.MULTILINE)

Pairs: TypeAlias = "list[tuple[str, str]]"
"""Texts that a program reads, and those that it is to print."""


# Rows


def check_code(
    test_list: Sequence[Any],
    test_imports: Sequence[Any] | None = None,
    test_setup_code: Sequence[Any] | None = None,
    sandbox: str = "auto",
    seconds: int = 2,
    memory: int = 512,
) -> list[Tests]:
    """Read the columns of MBPP, look for a sandbox, and try the tests' imports in it.

    Raises:
        RewardError: A row or a setting cannot be used, or no sandbox works here.
    """
    place = _opened(sandbox, seconds, memory)
    found = read_tests(test_list, test_imports, test_setup_code)
    for text in sorted({text for tests in found for text in tests.imports}):
        if ending := place.run([text], []).ending:
            raise RewardError(f"the tests need {text!r}, but programs have the standard library alone ({ending})")
    return found


def _opened(sandbox: str, seconds: int, memory: int) -> Sandbox:
    for name, value, least in (("seconds", seconds, 1), ("memory", memory, 64)):
        if not isinstance(value, int) or value < least:
            raise RewardError(f"{name}={value!r}: expected a whole number, at least {least}")
    place = open_sandbox(sandbox)
    print(f"programs run with sandbox={place.name}", file=sys.stderr)
    return place


def check_stdio(input_output: Sequence[Any], sandbox: str = "auto", seconds: int = 2, memory: int = 512) -> list[Pairs]:
    """Read the column of APPS, and look for a sandbox.

    Raises:
        RewardError: A row or a setting cannot be used, or no sandbox works here.
    """
    _opened(sandbox, seconds, memory)
    return read_rows("input_output", input_output, _read_pairs)


def _read_pairs(entry: object) -> Pairs:
    match decoded(entry):
        case {"fn_name": str()}:
            pass
        case {"inputs": [*inputs], "outputs": [*outputs]} if inputs and len(inputs) == len(outputs):
            if all(isinstance(text, str) for text in (*inputs, *outputs)):
                return list(zip(inputs, outputs, strict=True))
    raise ValueError('{"inputs": […], "outputs": […]}, with as many texts each, and no "fn_name"')


# Responses


def program(text: str, is_whole: bool, *, names: Collection[str] = ()) -> str | None:
    """The program in a response: its last block in Python, else its last block, else all of it, else None.

    Args:
        text: The response.
        is_whole: It ended with a stop token, so that a last block without its closing fence is complete.
        names: What the tests use: a block that defines one of them comes first, since models show its use in another.
    """
    blocks: dict[bool, list[str]] = {True: [], False: []}  # by whether it says that it is in Python
    is_python = False
    fence = ""
    lines: list[str] | None = None
    for line in text.split("\n"):
        mark = _FENCE.match(line)
        if mark and (lines is None or (mark[2] and mark[1] == fence)):
            fence = mark[1]
            is_python = mark[2].lower() in ("python", "py", "python3")
            lines = []
        elif lines is not None and mark and not mark[2] and mark[1].startswith(fence):
            blocks[is_python].append("\n".join(lines))
            lines = None
        elif lines is not None:
            lines.append(line)
    if lines is not None and is_whole:
        blocks[is_python].append("\n".join(lines))
    if found := blocks[True] or blocks[False]:
        tested = [block for block in found if any({*each} & {*names} for each in _DEFINED.findall(block))]
        return textwrap.dedent((tested or found)[-1])
    return text if is_whole and lines is None and _PYTHON.search(text) else None


@reads(check_code)
def code(
    completions: list[str],
    test_list: list[Any],
    test_imports: list[Any] | None = None,
    test_setup_code: list[Any] | None = None,
    stopped: list[bool] | None = None,
    *,
    sandbox: str = "auto",
    seconds: int = 2,
    memory: int = 512,
    partial: bool = False,
) -> list[Verdict]:
    """Check whether a response's program passes the tests of an MBPP row, in a sandbox.

    Args:
        completions: Responses as text; of the fenced blocks in Python that define what the tests use, the last one is
            the program.
        test_list: Assertions that call the program.
        test_imports: Imports for them.
        test_setup_code: Code that runs between the program and them.
        stopped: Whether each response ended with a stop token.
        sandbox: `bubblewrap`, `landlock`, the first of both that works (`auto`), or `none`.
        seconds: Processor time of a program, whole seconds.
        memory: Address space of a program, MiB.
        partial: Score the share of assertions that hold, instead of 1 or 0.

    Raises:
        RewardError: A row cannot be used, or no sandbox works here.
    """
    place = open_sandbox(sandbox)

    def judge(text: str, tests: Tests) -> tuple[int, int, str]:
        return _passed(text, tests, place, seconds, memory << 20)

    return _verdicts(completions, stopped, read_tests(test_list, test_imports, test_setup_code), judge, partial)


@reads(check_stdio)
def code_stdio(
    completions: list[str],
    input_output: list[Any],
    stopped: list[bool] | None = None,
    *,
    sandbox: str = "auto",
    seconds: int = 2,
    memory: int = 512,
    partial: bool = False,
) -> list[Verdict]:
    """`code` for rows with inputs and outputs, as in APPS: the program reads the one and prints the other.

    Args:
        completions: Responses as text.
        input_output: `{"inputs": […], "outputs": […]}`, texts, as a mapping or as JSON. Spaces at the end of a line,
            and empty lines around the output, do not count.
        stopped: Whether each response ended with a stop token.
        sandbox: As in `code`, like the other settings.
        seconds: For each input.
        memory: For each input, MiB.
        partial: Score the share of right outputs, instead of 1 or 0.
    """
    place = open_sandbox(sandbox)

    def judge(text: str, pairs: Pairs) -> tuple[int, int, str]:
        right = 0
        reason = RIGHT
        for typed, expected in pairs:
            ran = place.run([text], [], name="__main__", typed=typed, seconds=seconds, memory=memory << 20)
            has_ended = ran.ending in ("", f"{RAISED} SystemExit")
            is_right = has_ended and _lines(ran.printed) == _lines(expected)
            right += is_right
            if not is_right:
                reason = reason if reason != RIGHT else WRONG_VALUE if has_ended else ran.ending
                if not partial or ran.ending == TOO_SLOW:
                    break
        return right, len(pairs), reason

    return _verdicts(completions, stopped, read_rows("input_output", input_output, _read_pairs), judge, partial)


def _verdicts(
    completions: Sequence[str],
    stopped: Sequence[bool] | None,
    references: Sequence[_Reference],
    judge: Callable[[str, _Reference], tuple[int, int, str]],
    is_partial: bool,
) -> list[Verdict]:
    """The verdicts of several processes at a time."""
    ended = [True] * len(completions) if stopped is None else stopped

    def verdict(text: str, is_whole: bool, reference: _Reference) -> Verdict:
        found = program(without_thoughts(text), is_whole, names=reference.names if isinstance(reference, Tests) else ())
        if found is None:
            return Verdict(0.0, NO_CODE if is_whole else CUT_OFF)
        right, count, reason = judge(found, reference)
        return Verdict(right / count if is_partial else float(reason == RIGHT), reason)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2) as pool:
        return list(pool.map(verdict, completions, ended, references))


def _lines(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n").split("\n")


def _passed(text: str, tests: Tests, sandbox: Sandbox, seconds: int, memory: int) -> tuple[int, int, str]:
    """How many assertions hold, of how many, and why the first one fails that does not hold."""
    ran = sandbox.run(
        [text, *tests.setup],
        [expression for each in tests.assertions for expression in each.computed],
        seconds=seconds,
        memory=memory,
    )
    names = [name for each in tests.assertions for name in each.names]
    values = {names[place]: value for place, value in ran.values.items()}
    computed = [each for each in tests.assertions if set(each.names) <= set(values)]
    others = [each.remainder for each in computed if each.expected is ...]
    found: dict[int, Any] = {}
    if others:
        # The values may be hostile, and the remainder is the row's code: this comparison also takes place in a sandbox.
        remainders = [f"bool({each})" for each in others]
        with suppress(ValueError):  # of values that are nested too deeply to be passed on
            found = sandbox.run(tests.imports, remainders, values=values, seconds=seconds, memory=memory).values
    compared = iter([found.get(place) is True for place in range(len(others))])
    held = [
        next(compared) if each.expected is ... else _equal(values[each.names[0]], each.expected) for each in computed
    ]
    return sum(held), len(tests.assertions), WRONG_VALUE if not all(held) else ran.ending or RIGHT


def _equal(item: Any, expected: Any) -> bool:
    try:
        return bool(decode(item) == expected)
    except ARBITRARY:
        return False

"""Programs that pass the tests of their row.

    assert f(2) == 4        in the sandbox: f(2) ─▶ plain data ─▶ here: equal to 4?
    assert check(f(2))      in the sandbox: f(2) ─▶ plain data ─▶ in a second one, which asked for it: check(…)

The program never sees the expected values, and its objects are not used in comparisons, so only right results pass.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from typing import Any, TypeAlias, TypeVar

from kedge_base.errors import RewardError
from kedge_base.machine.control_groups import available_cores
from kedge_base.thoughts import answer_of
from kedge_base.verdict import Verdict
from kedge_tasks.confined import PROGRAM, decode
from kedge_tasks.sandbox import ARBITRARY, ENDED, RAISED, TOO_SLOW, Ran, Sandbox, judge, longest_run, open_sandbox
from kedge_tasks.verify.assertions import Assertion, Tests, read_tests
from kedge_tasks.verify.checking import CUT_OFF, RIGHT, WRONG_VALUE, decoded, read_rows, verifier

_Reference = TypeVar("_Reference")

NO_CODE = "no code"

_PYTHON = re.compile(
    r"^[ \t]*(?:(?:async +)?def |class |import |from [\w.]+ import|@|print\(|return\b|(?:for|while|if) .*:|[\w.]+ *=)",
    re.MULTILINE,
)
_LANGUAGE = re.compile(r"(?:python3?|py)\b[ \t]*", re.IGNORECASE)
_DEFINED = re.compile(r"^[ \t]*(?:(?:async +)?def +|class +)(\w+)|^(\w+) *=(?!=)", re.MULTILINE)

DEFINES = ("async ", "class ", "def ", "from ", "import ", "@")

BEGIN = "[BEGIN]"
DONE = "[DONE]"
"""The marks around a program in the original MBPP prompts, which end with BEGIN."""

COMPARISONS = ("exact", "tokens", "numbers")
TOLERANCE = Decimal("1e-6")
_TOKEN = re.compile(r"[^ \t\r\n]+")
_NUMBER = re.compile(r"[+-]?(?:\d+(\.\d*)?|(\.\d+))([eE][+-]?\d{1,4})?", re.ASCII)
"""A group matches only if the number is not written as an integer."""

Outcome: TypeAlias = "tuple[int, int, str]"
"""Number of tests that a program passes, number of all tests, and the reason."""

Run: TypeAlias = Callable[..., Ran]
"""`Sandbox.run`, with its limits."""

Pairs: TypeAlias = "list[tuple[str, str]]"
"""Inputs of a program, each with the output that it must print."""

EXPECTED = (
    '{"inputs": […], "outputs": […]} with as many of both, texts or lists of lines, or with "fn_name" lists of '
    'arguments and results; or [{"input": …, "output": …}, …], if "functional" with "func_name" in the column metadata'
)


# Rows


def check_code(
    test_list: Sequence[Any],
    test_imports: Sequence[Any] | None = None,
    test_setup_code: Sequence[Any] | None = None,
    sandbox: str = "auto",
    seconds: int = 2,
    memory: int = 512,
) -> tuple[float, int]:
    """Read the columns of MBPP, look for a sandbox, and try the tests' imports in it.

    Returns:
        The maximum seconds that a response takes, and how many are judged at a time.

    Raises:
        RewardError: A row or a setting cannot be used, or no sandbox works here.
    """
    place = _opened(sandbox, seconds, memory)
    found = read_tests(test_list, test_imports, test_setup_code)
    for text in sorted({text for tests in found for text in tests.imports}):
        if ending := place.run([text], []).ending:
            raise RewardError(f"the tests need {text!r}, but programs have the standard library alone ({ending})")
    return 2 * longest_run(seconds), available_cores()  # a program, and the comparison of its values


def _opened(sandbox: str, seconds: int, memory: int) -> Sandbox:
    for name, value, least in (("seconds", seconds, 1), ("memory", memory, 64)):
        if not isinstance(value, int) or value < least:
            raise RewardError(f"{name}={value!r}: expected a whole number, at least {least}")
    place = open_sandbox(sandbox)
    print(f"programs run with sandbox={place.name}", file=sys.stderr)
    return place


def check_stdio(
    input_output: Sequence[Any],
    metadata: Sequence[Any] | None = None,
    sandbox: str = "auto",
    seconds: int = 2,
    memory: int = 512,
    compare: str = "exact",
) -> tuple[float, int]:
    """Read the columns of APPS, TACO or LiveCodeBench, and look for a sandbox.

    Returns:
        The maximum seconds that a response takes, and how many are judged at a time.

    Raises:
        RewardError: A row or a setting cannot be used, or no sandbox works here.
    """
    _opened(sandbox, seconds, memory)
    if compare not in COMPARISONS:
        raise RewardError(f"compare={compare!r} is not one of {', '.join(COMPARISONS)}")
    rows = read_rows("input_output", input_output, _read_row, metadata)
    most = max((len(row) for row in rows if isinstance(row, list)), default=1)
    return most * longest_run(seconds), available_cores()


def _read_row(entry: object, metadata: object = None) -> Pairs | Tests:
    try:
        row: Any = decoded(entry)
        if isinstance(row, list):  # LiveCodeBench lists each test with its input and output
            inputs, outputs = zip(*((each["input"], each["output"]) for each in row), strict=True)
            if row[0].get("testtype") == "functional":
                about: Any = decoded(metadata)
                inputs = [[json.loads(line) for line in text.strip().split("\n")] for text in inputs]
                return _calls(about["func_name"], inputs, list(map(json.loads, outputs)))
            row = {"inputs": inputs, "outputs": outputs}
        if name := row.get("fn_name"):
            return _calls(name, row["inputs"], row["outputs"])
        if pairs := list(zip(map(_text, row["inputs"]), map(_text, row["outputs"]), strict=True)):
            return pairs
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(EXPECTED) from error
    raise ValueError(EXPECTED)


def _text(entry: object) -> str:
    """Convert a text, a number, or a list of them, one per line, to text."""
    if isinstance(entry, list):
        return "\n".join(map(_text, entry))
    if isinstance(entry, bool) or not isinstance(entry, (str, int, float)):
        raise ValueError(EXPECTED)
    return str(entry)


def _calls(name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> Tests:
    """Make tests of a function, or a method of `Solution`, with JSON types; APPS may wrap a result in a list."""
    if not (inputs and name.isidentifier() and all(isinstance(each, list) for each in inputs)):
        raise ValueError(EXPECTED)
    assertions = []
    for given, result in zip(inputs, outputs, strict=True):
        allowed = [result, *(result if isinstance(result, list) and len(result) == 1 else [])]
        call = f"json.loads(json.dumps({name}(*{given!r})))"
        assertions.append(Assertion(f"{PROGRAM}(0, 'eval', {call!r}) in {allowed!r}"))
    setup = f"import json\nif {name!r} not in globals():\n    {name} = Solution().{name}"
    return Tests(setup, "", (), tuple(assertions), frozenset([name]))


# Responses


def program(text: str, is_whole: bool, *, names: Collection[str] = ()) -> str | None:
    """Extract the program from a response: its last Python block, else its last block, else all of it, else None.

    Blocks that define what the tests use go before others. Earlier blocks that only import are prepended.

    Args:
        text: The response.
        is_whole: It ended with a stop token, so that a last block without its closing fence is complete.
        names: Names that the tests use; models show their use in another block.
    """
    begun = re.split(r"\[DONE\][ \t\r]*$", text, maxsplit=1, flags=re.MULTILINE)
    if begun[1:] and BEGIN not in begun[0]:
        text, is_whole = begun[0], True  # the prompt ends with [BEGIN]
    blocks: list[tuple[bool, list[str]]] = []  # True for blocks marked as Python
    fence = ""
    is_closed = True
    for line in text.split("\n"):
        mark, rest = _fence(line)
        if mark and (is_closed or fence == DONE or (rest and mark == fence)):
            fence = mark
            is_closed = False
            language = _LANGUAGE.match(rest)
            blocks.append((bool(language) or fence == DONE, []))
            line = rest[language.end() :] if language else rest
            if not line.startswith(DEFINES) and not line.endswith(fence):
                continue  # a language's name, or parameters
        elif mark.startswith(fence) and not rest:
            line = fence
        if not is_closed:
            before, closing, after = line.rpartition(fence)
            is_closed = bool(closing) and not after.strip() and fence not in before
            blocks[-1][1].append(before if is_closed else line)
    if not (is_closed or is_whole):
        del blocks[-1]
    if not blocks:
        return text if is_whole and _PYTHON.search(text) else None
    texts = [(is_python, textwrap.dedent("\n".join(lines)).removesuffix("\n")) for is_python, lines in blocks]

    def is_tested(block: str) -> bool:
        return any({*each} & {*names} for each in _DEFINED.findall(block))

    kinds = [[block for is_marked, block in texts if block and is_marked == is_python] for is_python in (True, False)]
    found = next((blocks for blocks in kinds if any(map(is_tested, blocks))), kinds[0] or kinds[1] or [""])
    chosen = next(filter(is_tested, reversed(found)), found[-1])
    imports = [
        block
        for block in found[: found.index(chosen)]
        if all(line.startswith(("import ", "from ", "#")) for line in block.split("\n") if line.strip())
    ]
    return "\n".join([*imports, chosen])


def _fence(line: str) -> tuple[str, str]:
    """Return the mark that will close the block opened by a line, and the rest of the line; no mark if none opens."""
    line = line.strip()
    if line.startswith(BEGIN):
        return DONE, line.removeprefix(BEGIN)
    rest = line.lstrip(line[:1]) if line.startswith(("```", "~~~")) else line
    mark = line[: len(line) - len(rest)]
    return (mark, rest.strip()) if mark and "`" not in rest.removesuffix(mark) else ("", line)


@verifier(check_code)
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
        completions: Responses as text; see `program` for where the program is in them.
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
    rows = read_tests(test_list, test_imports, test_setup_code)
    return _verdicts(completions, stopped, rows, _passed, partial, sandbox, seconds, memory)


@verifier(check_stdio)
def code_stdio(
    completions: list[str],
    input_output: list[Any],
    stopped: list[bool] | None = None,
    metadata: list[Any] | None = None,
    *,
    sandbox: str = "auto",
    seconds: int = 2,
    memory: int = 512,
    partial: bool = False,
    compare: str = "exact",
) -> list[Verdict]:
    """`code` for rows with inputs and outputs, as in APPS: the program reads the input and prints the output.

    Args:
        completions: Responses as text.
        input_output: `{"inputs": […], "outputs": […]}`, texts or lists of lines, as a mapping or as JSON; with
            `fn_name`, arguments and results of a function. Or `[{"input": …, "output": …}, …]` as in LiveCodeBench.
        stopped: Whether each response ended with a stop token.
        metadata: The `func_name` of LiveCodeBench's functional tests.
        sandbox: As in `code`.
        seconds: CPU seconds for each input, or for all calls.
        memory: MiB for each input, or for all calls.
        partial: Score the share of right outputs, instead of 1 or 0.
        compare: `exact`: compares lines, ignoring trailing blanks and empty lines around the output. `tokens`: compares
            the parts between blanks and line breaks. `numbers`: likewise, and numbers other than integers may
            differ by 1e-6, relative or absolute.
    """

    def printed(text: str, row: Pairs | Tests, run: Run) -> Outcome:
        if isinstance(row, Tests):
            return _passed(text, row, run)
        right = 0
        reason = RIGHT
        for typed, expected in row:
            room = len(expected.encode("utf-8", "replace"))
            ran = run([text], [], name="__main__", typed=typed, room=room)
            has_ended = ran.ending in ("", f"{RAISED} SystemExit")
            # The output counts even if the program then reads beyond its input, or exits immediately.
            is_right = has_ended or ran.ending in (ENDED, f"{RAISED} EOFError")
            is_right = is_right and _is_same(ran.printed, expected, compare)
            right += is_right
            if not is_right:
                reason = reason if reason != RIGHT else WRONG_VALUE if has_ended else ran.ending
                if not partial or ran.ending == TOO_SLOW:
                    break
        return right, len(row), reason

    rows = read_rows("input_output", input_output, _read_row, metadata)
    return _verdicts(completions, stopped, rows, printed, partial, sandbox, seconds, memory)


def _verdicts(
    completions: Sequence[str],
    stopped: Sequence[bool] | None,
    references: Sequence[_Reference],
    outcome: Callable[[str, _Reference, Run], Outcome],
    is_partial: bool,
    sandbox: str,
    seconds: int,
    memory: int,
) -> list[Verdict]:
    """Judge the responses, several at a time."""
    run = open_sandbox(sandbox).run
    ended = [True] * len(completions) if stopped is None else stopped

    def verdict(text: str, is_whole: bool, reference: _Reference) -> Verdict:
        answer = (answer_of(text) or "").replace("\ufeff", "")
        found = program(answer, is_whole, names=reference.names if isinstance(reference, Tests) else ())
        if found is None:
            return Verdict(0.0, NO_CODE if is_whole else CUT_OFF)
        # Without a fence, there may be prose around the program.
        limits = {"seconds": seconds, "memory": memory << 20, "has_prose": found == answer}
        right, count, reason = outcome(found, reference, partial(run, **limits))
        return Verdict(right / count if is_partial else float(reason == RIGHT), reason)

    with ThreadPoolExecutor(available_cores()) as pool:
        return list(pool.map(verdict, completions, ended, references))


def _is_same(printed: str, expected: str, compare: str) -> bool:
    if compare == "exact":
        return _lines(printed) == _lines(expected)
    found, wanted = map(_TOKEN.findall, (printed, expected))
    are_equal = _are_close if compare == "numbers" else str.__eq__
    return len(found) == len(wanted) and all(map(are_equal, found, wanted))


def _lines(text: str) -> str:
    return "\n".join(line.rstrip(" \t") for line in text.replace("\r\n", "\n").split("\n")).strip("\n")


def _are_close(found: str, wanted: str) -> bool:
    """True for equal tokens, and for numbers within the tolerance, which is absolute for integers, such as counts."""
    number = _NUMBER.fullmatch(wanted)
    if number is None or not _NUMBER.fullmatch(found):
        return found == wanted
    exact = Decimal(wanted)
    return abs(Decimal(found) - exact) <= TOLERANCE * (max(1, abs(exact)) if number.lastindex else 1)


def _passed(text: str, tests: Tests, run: Run) -> Outcome:
    """Count the passing assertions, and all; the reason is a wrong value, if any, else how the program ended."""
    parts = [text, tests.setup]
    calls = [each.call for each in tests.assertions]
    if all(calls):
        ran = judged = run(parts, calls)
        held = [_equal(item, tests.assertions[index].expected) for index, item in ran.values.items()]
    else:
        ran, judged = judge(run, parts, tests.ours, [each.test for each in tests.assertions])
        held = [item is True for item in judged.values.values()]
    return sum(held), len(calls), WRONG_VALUE if not all(held) else ran.ending or judged.ending or RIGHT


def _equal(item: Any, expected: Any) -> bool:
    try:
        return bool(decode(item) == expected)
    except ARBITRARY:
        return False

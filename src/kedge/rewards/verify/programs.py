"""Programs that pass the tests of their row.

    assert f(2) == 4        in the sandbox: f(2) ─▶ plain data ─▶ here: equal to 4?

The program never sees the expected values, and its own objects take part in no comparison: nothing passes but what is
right.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kedge.errors import RewardError
from kedge.rewards.source import Verdict
from kedge.rewards.verify.checking import CUT_OFF, RIGHT, read_rows, reads
from kedge.rewards.worker.confined import decode
from kedge.rewards.worker.sandbox import ARBITRARY, Sandbox, open_sandbox

__all__ = ["code"]

NO_CODE = "no code"
WRONG_VALUE = "wrong value"

EXPECTED = 'a list of assertions such as "assert f(2) == 4"'

_PYTHON = re.compile(
    r"^[ \t]*(?:def |class |import |from [\w.]+ import|@|print\(|return\b|(?:for|while|if) .*:|[\w.]+ *=)", re.MULTILINE
)
_BINDING = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.NamedExpr)
_CONVERSIONS = {"abs", "all", "any", "bool", "dict", "float", "frozenset", "int", "len", "list", "max", "min", "set"}
_CONVERSIONS |= {"sorted", "str", "sum", "tuple"}


# Rows


@dataclass(frozen=True)
class _Row:
    tests: Any
    imports: Any
    setup: Any

    def __repr__(self) -> str:
        return repr(self.tests)


@dataclass(frozen=True)
class Assertion:
    """An assertion, taken apart.

    Attributes:
        computed: The expressions for the program's process.
        expected: What the only one must be equal to; `...` if the assertion is not of this form.
        remainder: The assertion with the names in `names` instead of them.
    """

    computed: tuple[str, ...]
    names: tuple[str, ...]
    expected: Any
    remainder: str


@dataclass(frozen=True)
class Tests:
    """The tests of a row: the texts that run after the program, the imports among them, and the assertions."""

    setup: tuple[str, ...]
    imports: tuple[str, ...]
    assertions: tuple[Assertion, ...]


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
    for name, value, least in (("seconds", seconds, 1), ("memory", memory, 64)):
        if not isinstance(value, int) or value < least:
            raise RewardError(f"{name}={value!r}: expected a whole number, at least {least}")
    place = open_sandbox(sandbox)
    print(f"code runs programs with sandbox={place.name}", file=sys.stderr)
    found = _read(test_list, test_imports, test_setup_code)
    for text in sorted({text for tests in found for text in tests.imports}):
        if ending := place.run([text], []).ending:
            raise RewardError(f"the tests need {text!r}, but programs have the standard library alone ({ending})")
    return found


def _read(tests: Sequence[Any], imports: Sequence[Any] | None, setups: Sequence[Any] | None) -> list[Tests]:
    nothing = [None] * len(tests)
    rows = [_Row(*each) for each in zip(tests, imports or nothing, setups or nothing, strict=True)]
    return read_rows("test_list", rows, _read_tests)


def _read_tests(row: _Row) -> Tests:
    setup = (*_texts(row.imports), *_texts(row.setup))
    tests = _texts(row.tests)
    try:
        imports = [
            node
            for text in setup
            for node in ast.walk(ast.parse(text))
            if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        statements = [statement for text in tests for statement in ast.parse(text.strip()).body]
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"Python ({error})") from error
    asserted = [statement.test for statement in statements if isinstance(statement, ast.Assert)]
    if not asserted or len(asserted) < len(statements):
        raise ValueError(EXPECTED)
    trusted = {(name.asname or name.name).partition(".")[0] for node in imports for name in node.names}
    assertions = [_Reader(trusted, index).read(test) for index, test in enumerate(asserted)]
    return Tests(setup, tuple(map(ast.unparse, imports)), tuple(assertions))


def _texts(entry: object) -> list[str]:
    texts = [] if entry is None else [entry] if isinstance(entry, str) else entry
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(EXPECTED)
    return [text for text in texts if text.strip()]


class _Reader(ast.NodeTransformer):
    """Replaces the parts of an assertion that only the program's process can compute by names.

    Args:
        imported: The names that the row's imports bind.
        index: The assertion's place in its row.
    """

    def __init__(self, imported: set[str], index: int) -> None:
        self._trusted = imported | set(dir(builtins))
        self._imported = imported
        self._prefix = f"value_{index}_"
        self._computed: list[str] = []

    def read(self, test: ast.expr) -> Assertion:
        """Take an assertion apart."""
        if not self._strange(test):
            self._trusted = self._imported  # the program defines a function such as `sum`
        remainder = self.visit(test)
        if not self._computed:
            raise ValueError("assertions that call the program")
        names = tuple(f"{self._prefix}{number}" for number in range(len(self._computed)))
        return Assertion(tuple(self._computed), names, _expected(remainder), ast.unparse(remainder))

    def visit(self, node: ast.AST) -> Any:
        if not isinstance(node, ast.expr):
            return self.generic_visit(node)
        if not self._strange(node):
            return node
        if self._is_computed(node):
            self._computed.append(ast.unparse(node))
            return ast.Name(f"{self._prefix}{len(self._computed) - 1}", ast.Load())
        if isinstance(node, _BINDING):
            raise ValueError("assertions that call the program outside of comprehensions and lambdas")
        return self.generic_visit(node)

    def _strange(self, node: ast.AST) -> set[str]:
        """The names in an expression that neither Python nor the row's imports nor the expression itself defines."""
        names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
        bound = {name.id for name in names if isinstance(name.ctx, ast.Store)}
        bound |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
        return {name.id for name in names} - bound - self._trusted

    def _is_computed(self, node: ast.expr) -> bool:
        """True for `f(…)`, `f(…).g[0]` and conversions such as `list(f(…))`, which contain no expected values."""
        match node:
            case ast.Call(func=ast.Name(id=name), args=[inner], keywords=[]) if name in _CONVERSIONS & self._trusted:
                return self._is_computed(inner)
            case ast.Call(func=inner) | ast.Attribute(value=inner) | ast.Subscript(value=inner):
                return self._is_computed(inner)
            case ast.Name(id=name):
                return name not in self._trusted
        return False


def _expected(remainder: ast.expr) -> Any:
    match remainder:
        case ast.Compare(left=ast.Name(), ops=[ast.Eq()], comparators=[literal]):
            try:
                return ast.literal_eval(literal)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                return ...
    return ...


# Responses


def program(text: str, is_whole: bool) -> str | None:
    """The program in a response: its last block in Python, else its last block, else all of it, else None."""
    blocks: dict[bool, str] = {}  # by whether it says that it is in Python
    is_python = False
    lines: list[str] | None = None
    for line in text.split("\n"):
        mark = line.strip()
        if mark.startswith("```") and (lines is None or mark != "```"):
            is_python = mark.strip("`").strip().lower() in ("python", "py", "python3")
            lines = []
        elif mark == "```" and lines is not None:
            blocks[is_python] = "\n".join(lines)
            lines = None
        elif lines is not None:
            lines.append(line)
    if lines is not None and is_whole:
        blocks[is_python] = "\n".join(lines)
    if blocks:
        return textwrap.dedent(blocks.get(True, blocks.get(False, "")))
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
        completions: Responses as text; the program is the last fenced block in Python.
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
    ended = [True] * len(completions) if stopped is None else stopped

    def judge(text: str, is_whole: bool, tests: Tests) -> Verdict:
        found = program(text, is_whole)
        if found is None:
            return Verdict(0.0, NO_CODE if is_whole else CUT_OFF)
        right, reason = _passed(found, tests, place, seconds, memory << 20)
        return Verdict(right / len(tests.assertions) if partial else float(reason == RIGHT), reason)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2) as pool:
        return list(pool.map(judge, completions, ended, _read(test_list, test_imports, test_setup_code)))


def _passed(text: str, tests: Tests, sandbox: Sandbox, seconds: int, memory: int) -> tuple[int, str]:
    """How many assertions hold, and the reason why the first one that does not hold fails."""
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
        found = sandbox.run(tests.imports, remainders, values=values, seconds=seconds, memory=memory).values
    compared = iter([found.get(place) is True for place in range(len(others))])
    held = [
        next(compared) if each.expected is ... else _equal(values[each.names[0]], each.expected) for each in computed
    ]
    return sum(held), WRONG_VALUE if not all(held) else ran.ending or RIGHT


def _equal(item: Any, expected: Any) -> bool:
    try:
        return bool(decode(item) == expected)
    except ARBITRARY:
        return False

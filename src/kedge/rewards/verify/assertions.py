"""Reads assertions such as `assert f(2) == 4`, and separates the program's part from the expected values."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kedge.rewards.verify.checking import decoded, read_rows

EXPECTED = 'a list of assertions such as "assert f(2) == 4"'


_BINDING = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.NamedExpr)
_CONVERSIONS = {"abs", "all", "any", "bool", "dict", "float", "frozenset", "int", "len", "list", "max", "min", "set"}
_CONVERSIONS |= {"sorted", "str", "sum", "tuple"}


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

    @property
    def names(self) -> set[str]:
        """The names that the assertions look up in the program."""
        trees = [ast.parse(text, mode="eval") for each in self.assertions for text in each.computed]
        return {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}


def read_tests(tests: Sequence[Any], imports: Sequence[Any] | None, setups: Sequence[Any] | None) -> list[Tests]:
    """Read columns of assertions, of imports for them, and of code that runs between the program and them.

    Raises:
        RewardError: A row cannot be used.
    """
    return read_rows("test_list", tests, _read_tests, imports, setups)


def _read_tests(tests: Any, imported_by: Any, setup_code: Any) -> Tests:
    setup = (*_texts(imported_by), *_texts(setup_code))
    imports = [
        node for text in setup for node in ast.walk(_parsed(text)) if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    imported = {(name.asname or name.name).partition(".")[0] for node in imports for name in node.names}
    assertions: list[Assertion] = []
    for text in _texts(tests):
        for statement in _parsed(text.strip()).body:
            try:
                if not isinstance(statement, ast.Assert):
                    raise ValueError(EXPECTED)
                assertions.append(_Reader(imported, len(assertions)).read(statement.test))
            except ValueError as error:
                raise ValueError(f"{error}, not {text.strip()!r}") from error
    if not assertions:
        raise ValueError(EXPECTED)
    return Tests(setup, tuple(map(ast.unparse, imports)), tuple(assertions))


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"Python, not {text!r} ({error})") from error


def _texts(entry: object) -> list[str]:
    entry = decoded(entry)
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

"""Reads assertions such as `assert f(2) == 4`, and separates the program's part from the expected values."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from symtable import symtable
from typing import Any

from kedge_tasks.confined import PROGRAM
from kedge_tasks.verify.checking import decoded, read_rows

EXPECTED = 'a list of assertions such as "assert f(2) == 4"'

_BUILTINS = frozenset(dir(builtins))
_IMPORTS = (ast.Import, ast.ImportFrom)
_PLAIN = (str, bytes, list, tuple, dict, set, int, float, complex)
_NAMES = "abs all any bool dict float frozenset int isinstance len list max min next set sorted str sum tuple"
_CONVERSIONS = frozenset(_NAMES.split())

_MODULES = (
    "collections copy datetime decimal fractions functools itertools json math np numpy operator pandas pd pytest"
)
MODULES = frozenset([*_MODULES.split(), "random", "re", "statistics", "string"])
"""Modules that assertions may use without importing them; a missing module is reported when the rows are checked."""


@dataclass(frozen=True)
class Assertion:
    """A parsed assertion.

    Attributes:
        test: The condition, as an expression for the judge's process.
        call: The call in an assertion such as `f(2) == 4`, else empty.
        expected: What the call must return.
    """

    test: str
    call: str = ""
    expected: Any = None


@dataclass(frozen=True)
class Tests:
    """The tests of a row.

    Attributes:
        setup: Code that the program's process runs after the program: imports and classes.
        ours: Code that the judge's process runs before the assertions: everything except classes.
        imports: The imports of both.
        assertions: The assertions.
        names: Names that the tests look up in the program.
    """

    setup: str
    ours: str
    imports: tuple[str, ...]
    assertions: tuple[Assertion, ...]
    names: frozenset[str]


def read_tests(tests: Sequence[Any], imports: Sequence[Any] | None, setups: Sequence[Any] | None) -> list[Tests]:
    """Parse the columns of assertions, their imports, and code that runs between the program and the assertions.

    Raises:
        RewardError: A row cannot be used.
    """
    return read_rows("test_list", tests, _read_tests, imports, setups)


def _read_tests(tests: Any, imported_by: Any, setup_code: Any) -> Tests:
    parsed = [(text.strip(), each) for text in _texts(tests) for each in _parsed(text.strip()).body]
    setup = [each for text in (*_texts(imported_by), *_texts(setup_code)) for each in _parsed(text).body]
    nodes = [node for _, each in parsed for node in ast.walk(each)]
    used = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    unbound = (used & MODULES).difference(*map(_bound, setup))
    setup += _parsed("\n".join(f"import {name}" for name in sorted(unbound))).body
    imports = [each for tree in setup for each in ast.walk(tree) if isinstance(each, _IMPORTS)]
    if any("*" in _bound(each) for each in imports):
        raise ValueError("imports that name what they import")  # else the names would count as the program's
    ours = [
        each for each in setup if not isinstance(each, ast.ClassDef) and getattr(each, "module", "") != "__future__"
    ]
    symbols = symtable("\n".join(map(ast.unparse, ours)), "setup", "exec").get_symbols()
    defined = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    reader = _Reader({name for each in imports for name in _bound(each)}, defined)
    theirs = [each for each in setup if isinstance(each, (ast.ClassDef, *_IMPORTS))]
    # Any other statement may call the program, so it has to run before the assertions, and they cannot be reduced to a
    # call and its expected value.
    is_simple = all(isinstance(each, (ast.FunctionDef, *_IMPORTS)) for each in ours)
    read = [ast.unparse(reader.read(each)) for each in ours]
    assertions: list[Assertion] = []
    for text, statement in parsed:
        try:
            if not isinstance(statement, ast.Assert):
                raise ValueError(EXPECTED)
            call, expected = _comparison(statement.test, defined) if is_simple else ("", None)
            assertions.append(Assertion(ast.unparse(reader.read(statement.test, must_call=True)), call, expected))
        except ValueError as error:
            raise ValueError(f"{error}, not {text!r}") from error
    if not assertions:
        raise ValueError(EXPECTED)
    return Tests(
        "\n".join(map(ast.unparse, theirs)),
        "\n".join(["from __future__ import annotations", *read]),
        tuple(map(ast.unparse, imports)),
        tuple(assertions),
        frozenset(reader.found),
    )


def _comparison(test: ast.expr, defined: set[str]) -> tuple[str, Any]:
    """Split `f(2) == 4` into the call and the value, if the call names only the program's function; else empty."""
    match test:
        case ast.Compare(left=ast.Call(func=ast.Name(id=name)) as left, ops=[ast.Eq()], comparators=[literal]):
            if _used(left) == {name} - defined:
                with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    return ast.unparse(left), ast.literal_eval(literal)
        case _:
            pass
    return "", None


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


def _is_class(name: str) -> bool:
    """True if a name looks like a class: `Stack`, but not `Check_Solution`, which is how MBPP names functions."""
    return name[:1].isupper() and "_" not in name


def _used(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _bound(node: ast.AST) -> set[str]:
    """The names that a piece of code defines."""
    found: set[str] = set()
    for each in ast.walk(node):
        if not isinstance(each, ast.keyword) and not isinstance(getattr(each, "ctx", None), ast.Load):
            found |= {str(getattr(each, key, "")).partition(".")[0] for key in ("id", "arg", "name", "asname")}
    return found


class _Reader(ast.NodeTransformer):
    """Replaces uses of the program's definitions with requests to its process.

    Args:
        imported: The names that the row's imports bind.
        own: All names that its setup code binds in the judge's process.
    """

    def __init__(self, imported: set[str], own: set[str]) -> None:
        self._imported = imported
        self._own = own
        self.found: set[str] = set()
        self._methods: list[ast.AST] = []

    def read(self, node: Any, *, must_call: bool = False) -> Any:
        """Return code with these replacements.

        Raises:
            ValueError: `must_call` is set, and the code does not call the program.
        """
        used = _used(node)
        names = used - _bound(node) - self._own
        self._theirs = names - _BUILTINS
        if must_call and not (self._theirs or used & self._own - self._imported):
            self._theirs = names  # the program defines a function such as `sum`
            if not names:
                raise ValueError("assertions that call the program")
        self.found |= self._theirs
        return self.visit(node)

    def visit(self, node: ast.AST) -> Any:
        # Inputs of any type are evaluated in the program's process; code with local variables must stay here.
        known = self._theirs | self._imported | _BUILTINS
        if node not in self._methods and self._is_programs(node) and _used(node) - _bound(node) <= known:
            match node:
                case ast.Name(id=name):
                    steps = 2 + _is_class(name)
                case ast.Call(func=ast.Name(id=name)) | ast.Attribute(value=ast.Name(id=name)):
                    steps = 1 + _is_class(name)
                case _:
                    steps = 0
            return ast.parse(f"{PROGRAM}({steps}, 'eval', {ast.unparse(node)!r})", mode="eval").body
        if isinstance(node, ast.Call) and isinstance(method := node.func, ast.Attribute):
            self._methods.append(method)
            value = method.value
            is_result = isinstance(value, ast.Call) and self._is_programs(value) and not self._makes_object(value)
            if is_result and not any(hasattr(kind, method.attr) for kind in _PLAIN):
                raise ValueError("assertions that call no methods of results but those of plain data")
        return self.generic_visit(node)

    def _is_programs(self, node: ast.AST) -> bool:
        """True for code that can run in the program's process without revealing a value that may be the expected one.

        That is `f(…)`, `C(…).g(…)`, their attributes, their methods called without arguments, and conversions of them.
        """
        match node:
            case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)) if name in self._theirs:
                return True
            case ast.Call(func=func, args=[_, *_] as given, keywords=[]) if (
                _used(func) <= _CONVERSIONS | self._imported
            ):
                return all(map(self._is_programs, given))
            case ast.Call(func=ast.Attribute(value=inner), args=[], keywords=[]) | ast.Attribute(value=inner):
                return self._is_programs(inner)
            case ast.Call(func=ast.Attribute(value=inner)):
                return self._makes_object(inner)
            case _:
                return False

    def _makes_object(self, node: ast.AST) -> bool:
        """True for `C(…)`: the tests may call methods of such an object with arguments."""
        name = getattr(getattr(node, "func", None), "id", "")
        return name in self._theirs and _is_class(name)

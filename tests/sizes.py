"""The size of kedge's packages in tokens of code: `python -m tests.sizes` prints it beside the budget.

Comments and docstrings do not count, and how code is laid out changes nothing. An f-string is one token on every
interpreter: from Python 3.12 on, `tokenize` splits it.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET = ROOT / "budget.tsv"

LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
OPENING = {getattr(tokenize, name) for name in ("FSTRING_START", "TSTRING_START") if hasattr(tokenize, name)}
CLOSING = {getattr(tokenize, name) for name in ("FSTRING_END", "TSTRING_END") if hasattr(tokenize, name)}


def count_tokens(source: str) -> int:
    """The tokens of a module's code."""
    silent = set(_docstrings(ast.parse(source)))
    return sum(token.start not in silent for token in _whole_strings(source))


def _whole_strings(source: str) -> Iterator[tokenize.TokenInfo]:
    """The tokens that are code, each f-string as its first one."""
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and not depth:
            yield token
        depth += (token.type in OPENING) - (token.type in CLOSING)


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """Where strings start that are statements: docstrings, also below a constant or a field."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.col_offset


def packages() -> dict[str, list[Path]]:
    """The files of each package, by its name."""
    folders = [path.parent for path in sorted((ROOT / "src").glob("*/__init__.py"))]
    return {folder.name: sorted(folder.rglob("*.py")) for folder in folders}


def sizes() -> dict[str, int]:
    """The tokens of each package."""
    return {name: sum(count_tokens(path.read_text("utf-8")) for path in files) for name, files in packages().items()}


def budget() -> dict[str, int]:
    """The lines of `budget.tsv`."""
    lines = BUDGET.read_text("utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return {name: int(limit) for name, limit, *_ in rows}


def main() -> None:
    """Print a line for each package."""
    found, limits = sizes(), budget()
    print(f"{'package':<16}{'tokens':>9}{'budget':>9}{'files':>7}")
    for name, files in packages().items():
        print(f"{name:<16}{found[name]:>9,}{limits.get(name, 0):>9,}{len(files):>7}")
    print(f"{'all':<16}{sum(found.values()):>9,}{sum(limits[name] for name in found):>9,}")


if __name__ == "__main__":
    sys.exit(main())

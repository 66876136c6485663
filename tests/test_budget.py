"""Each package keeps to its line in `budget.tsv`; a commit that raises one says there what it bought."""

from __future__ import annotations

import pytest

from tests.sizes import BUDGET, ROOT, budget, count_tokens, packages, sizes

ROOM = 0.02
"""Share of a line that may be left: a package that has become smaller lowers it."""


@pytest.mark.parametrize(
    ("source", "tokens"),
    [
        ("x = 1\n", 3),
        ("x = f'{y:>{width}} and {z!r}' f'{a}'\n", 4),
        ("def f(x):\n    '''Doc.'''\n    return x  # why\n", 8),
        ("class C:\n    x: int = 0\n    '''Its meaning.'''\n", 8),
        ("x = (\n    'a'\n    'b'\n)\n", 6),
        ("x = f'''{\n    {1: f\"{y}\"}\n}'''\n", 3),
    ],
)
def test_tokens_are_counted_as_by_hand(source, tokens):
    assert count_tokens(source) == tokens


def test_no_package_is_above_its_budget():
    found, limits = sizes(), budget()
    assert found.keys() == limits.keys() & found.keys()
    above = {name: (size, limits[name]) for name, size in found.items() if size > limits[name]}
    assert above == {}, f"shorten the package, or raise its line in {BUDGET.name} and say what that bought"
    below = {name: (size, limits[name]) for name, size in found.items() if size < limits[name] * (1 - ROOM)}
    assert below == {}, f"lower its line in {BUDGET.name}"


@pytest.mark.parametrize("name", packages())
def test_each_package_introduces_itself_on_one_screen(name):
    lines = (ROOT / "src" / name / "README.md").read_text("utf-8").splitlines()
    assert lines[0] == f"# {name}"
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120

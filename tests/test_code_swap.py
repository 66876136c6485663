"""Functions get the code of a changed source wherever they have been imported; other changes are refused."""

import importlib
import sys

import pytest

from tests.code_swap import live_functions, swap_code

SOURCE = """
import functools

LIMIT = 1
SQUARES = [n * n for n in (1, 2)]

def add(x, step=1):
    return x + step

@functools.lru_cache
def cached(x):
    return x + 1

class Adder:
    step = 1

    @property
    def one(self):
        return 1

    def add(self, x):
        return (lambda y: y + self.one)(x)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "swapped.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("swapped")
    del sys.modules["swapped"]


@pytest.mark.parametrize(
    ("old", "new", "figures"),
    [
        ("return x + step", "return x - step", (1, 3, 3)),
        ("return x + 1", "# two lines\n    return x * 10", (3, 20, 3)),
        ("        return 1\n", "        return 5\n", (3, 3, 7)),
        ("y + self.one", "y * 10", (3, 3, 20)),
    ],
    ids=["function", "decorated", "property", "nested"],
)
def test_what_is_imported_runs_the_new_code(module, tmp_path, old, new, figures):
    add, cached, adder = module.add, module.cached, module.Adder()  # imported before
    assert swap_code("swapped", SOURCE.replace(old, new), live_functions(tmp_path))
    assert (add(2), cached(2), adder.add(2)) == figures


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 1", "LIMIT = 2"),
        ("step=1)", "step=2)"),
        ("step = 1", "step = 2"),
        ("n * n", "n"),
        ("def add(self", "def plus(self"),
        ("@functools.lru_cache\n", ""),
    ],
    ids=["constant", "default", "attribute", "comprehension that ran", "name", "decorator"],
)
def test_what_is_not_in_a_function_is_refused(module, tmp_path, old, new):
    assert not swap_code("swapped", SOURCE.replace(old, new), live_functions(tmp_path))
    assert (module.add(2), module.Adder().add(2), module.SQUARES) == (3, 3, [1, 4])


def test_a_module_that_is_not_imported_is_refused(tmp_path):
    assert not swap_code("nowhere", SOURCE, live_functions(tmp_path))

"""Programs against tests: what is right, and that a program cannot pass for it."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace

import pytest

from kedge.rewards import CallLimits, FunctionReward, Responses
from kedge.rewards.worker.client import RemoteFunction
from kedge_base.errors import RewardError
from kedge_tasks.confined import decode
from kedge_tasks.sandbox import open_sandbox
from kedge_tasks.verify import code, code_stdio, programs
from kedge_tasks.verify.programs import program
from tests.processes import all_end


def has_sandbox() -> str:
    """Why there is no sandbox here; empty if there is one."""
    try:
        open_sandbox("auto")
    except RewardError as error:
        return str(error)
    return ""


NONE_HERE = has_sandbox()
needs_sandbox = pytest.mark.skipif(bool(NONE_HERE), reason=NONE_HERE or "there is one")

DOUBLE = ["assert double(2) == 4", "assert double('a') == 'aa'"]


def reasons(texts, tests, **more):
    found = code(texts, [tests] * len(texts), **more)
    assert all(float(each) == (each.reason == "right") for each in found)
    return [each.reason for each in found]


def reason(text, *tests, **more):
    return reasons([text], list(tests), **{name: [value] for name, value in more.items()})[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(): pass", "def f(): pass"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("```python\nx = 1\n```\nor\n```python\nx = 2\n```", "x = 2"),
        ("```python\nx = 1\n```\nIt prints\n```\n1\n```", "x = 1"),
        ("```py\nx = 1", "x = 1"),
        ("- so:\n  ```python\n  def f():\n      pass\n  ```", "def f():\n    pass"),
        ("```python\nx = 1\n```python\ny = 2\n```", "y = 2"),
        ("I do not know.", None),
        ("It is f(x) = x + 1, of course", None),
        ("", None),
        ("```python\n```", ""),
        ("```python\nx = 1```", "x = 1"),
        ("```python\nx = 1\ny = 2```\nDone.", "x = 1\ny = 2"),
        ("```python x = 1```", "x = 1"),
        ("```x = 1```", "x = 1"),
        ("```python def f():\n    pass\n```", "def f():\n    pass"),
        ("```def f():\n    pass\n```", "def f():\n    pass"),
        ("So ```f(1)``` and ```f(2)```:\n```f(3)```\n```python\nx = 1\n```", "x = 1"),
        ("```python title=\"a b\"\nx = '```'\n```", "x = '```'"),
        ("```Python3\nx = 1\n```", "x = 1"),
        ("```text\nx\n```\n```json\n1\n```", "1"),
        ("[BEGIN]\nx = 1\n[DONE]\nThat is it.", "x = 1"),
        ("[BEGIN] x = 1 [DONE]", "x = 1 "),
        ("[BEGIN]\n```python\nx = 1\n```\n[DONE]", "x = 1"),
        ("[BEGIN]\n```\nx = 1\n```\n[DONE]", "x = 1"),
        ("x = 1\n[DONE]\nYou are an expert.\n[BEGIN]\nx = 2\n[DONE]", "x = 1\n"),
        ("```python\nx = 1\n```\n[DONE]\n[BEGIN]\nx = 2\n[DONE]", "x = 1"),
        ("print('[DONE]')", "print('[DONE]')"),
        ("async def f(): pass", "async def f(): pass"),
        ("```python\nimport math\n```\nThen:\n```python\ny = math.pi\n```", "import math\ny = math.pi"),
        (
            "```python\nfrom math import pi\n\n# more\nimport os\n```\n```python\ny = pi\n```\n```\n3\n```",
            "from math import pi\n\n# more\nimport os\ny = pi",
        ),
        ("```python\nimport math\nz = 1\n```\n```python\ny = 2\n```", "y = 2"),
    ],
)
def test_the_program_of_a_response_is_found(text, expected):
    assert program(text, True) == expected


def test_a_response_that_was_cut_off_has_a_program_only_if_that_is_complete():
    assert program("```python\nx = 1\n```\nThis w", False) == "x = 1"
    assert program("```python\nx = 1", False) is None
    assert program("x = 1", False) is None
    assert program("```python\nx = 1\n```\n```python\ny", False) == "x = 1"
    assert program("x = 1\n[DONE]\n", False) == "x = 1\n"
    assert program("[BEGIN]\nx = 1", False) is None


def test_a_block_that_shows_the_use_is_not_the_program():
    text = "```python\ndef f(x):\n    return 2 * x\n```\nExample usage:\n```python\nprint(f(2))\n```"
    assert program(text, True) == "print(f(2))"
    assert program(text, True, names=["f"]) == "def f(x):\n    return 2 * x"
    more = text + "\n```python\ndef test_f():\n    print(f(3))\n```"  # defines something else, and only calls f
    assert program(more, True, names=["f"]) == "def f(x):\n    return 2 * x"
    assert program(text.replace("def f(x):\n    return", "f = lambda x:"), True, names=["f"]) == "f = lambda x: 2 * x"
    [verdict] = code([text], [["assert f(2) == 4"]])
    assert verdict.reason == "right"
    assert program("```python\nprint(1)\n```", True, names=["f"]) == "print(1)"
    assert (
        program("```\ndef f(x): return 1\n```\n```python\nprint(f(2))\n```", True, names=["f"]) == "def f(x): return 1"
    )


@pytest.mark.parametrize("fence", ["~~~", "````"])
def test_fences_of_any_kind_end_where_they_are_closed(fence):
    text = f"{fence}python\r\nx = 1\r\n{fence[1:]}\r\n{fence}\r\nDone."
    assert program(text, True) == f"x = 1\r\n{fence[1:]}\r"


@needs_sandbox
def test_a_draft_in_the_thoughts_is_not_the_program():
    draft = "<think>A draft:\n```python\ndef f(x):\n    return 0\n```\n</think>\n"
    program = "def f(x):\n    return x + 1\n"
    assert reason(f"{draft}```\n{program}```", "assert f(1) == 2") == "right"
    assert reason(f"<think>Easy.</think>\n{program}", "assert f(1) == 2") == "right"


def test_each_program_gets_its_reason():
    texts = {
        "def double(x): return 2 * x": "right",
        "```python\nimport functools\ndouble = functools.partial(lambda n, x: n * x, 2)\n```": "right",
        "def double(x): return x + 2 if x == 2 else 'a'": "wrong value",
        "def double(x): return [2 * x]": "wrong value",
        "def double(x): pass": "wrong value",
        "def double(x): yield 2 * x": "wrong value",
        "def double(x): return 2 * int(x)": "raised ValueError",
        "def triple(x): return 3 * x": "raised NameError",
        "def double(x) return": "syntax error",
        "```\nraise KeyError\n```": "raised KeyError",
        "while True: pass": "took too long",
        "def double(x): return [0] * 10**10": "out of memory",
        "def double(x):\n    while True: print('x' * 1000)": "output too long",
        "I cannot help with that.": "no code",
    }
    assert dict(zip(texts, reasons(list(texts), DOUBLE), strict=True)) == texts
    assert code(["def double(x)"], [DOUBLE], stopped=[False])[0].reason == "cut off"


HERE = "Here is the function that adds one:\n\n"
THERE = "\n\nIt's simple (see above; the loop isn't needed.\n- It adds 1.\n\nDone!"
ADDS = "def f(x):\n    return x + 1"


@needs_sandbox
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HERE + ADDS, "right"),
        (ADDS + THERE, "right"),
        (HERE + ADDS + THERE, "right"),
        (HERE + "n = 1\n\nSo we write:\n" + ADDS.replace("1", "n") + "\n\nFor example:\nprint(f(1))" + THERE, "right"),
        ("For this we import math:\nimport math\n" + ADDS, "right"),
        ("\ufeff" + ADDS, "right"),
        ("\ufeff```python\n\ufeff" + ADDS + "\n```", "right"),
        (HERE + "def f(x):\n    retrun x + 1" + THERE, "syntax error"),
        (HERE + "def f(x)\n    return x + 1", "syntax error"),
        ("```python\n" + HERE + ADDS + "\n```", "syntax error"),
        ('data = """\nHello world\n"""\ndef f(x): return x + len(data) - 12', "right"),
        (HERE + "I do not know. (x = 1)", "no code"),
        ("word word word\n" * 3000 + ADDS, "syntax error"),
        (f"<think>\n```python\n{ADDS}\n```\n", "no code"),
        (f"<think>\n```python\n{ADDS}\n```\n</think>\nNo.", "no code"),
        (f"[THINK]{ADDS}", "no code"),
        (f"<think>Hm.</think>\n{ADDS}", "right"),
    ],
)
def test_programs_among_prose_and_thoughts(text, expected):
    assert reason(text, "assert f(1) == 2") == expected


def test_a_draft_in_an_unfinished_thought_was_cut_off():
    draft = f"<think>\n```python\n{ADDS}\n```\n"
    assert [each.reason for each in code([draft], [["assert f(1) == 2"]], stopped=[False])] == ["cut off"]
    assert [each.reason for each in code_stdio([draft], [TWICE])] == ["no code"]


@pytest.mark.parametrize(
    "text",
    [
        "`" * 100_000,
        "~" * 100_000,
        "```" + " " * 100_000 + "`",
        "```" * 33_000 + "x",
        "~~~ ~" * 20_000 + "`",
        " " * 100_000 + "x",
        ("```" + " " * 999 + "`\n") * 100,
        "```python\n" + " " * 100_000 + "x\n```",
        "```python\n" + "```python\n" * 10_000,
        "x" * 100_000,
        "x." * 50_000,
        "def " + " " * 100_000,
        "from " + "x" * 100_000,
        "[BEGIN]" * 14_000 + "[DONE]" + " " * 10_000 + "x",
        "[DONE]" + " " * 100_000 + "x",
        ("[DONE]" + "\t" * 10) * 6_000 + "x",
        "\n" * 100_000,
        ("`" * 50 + "\n") * 2_000,
        "```python\nimport x\n```\n" * 4_000,
        "\x00\ud800" * 50_000,
    ],
)
def test_programs_are_found_in_linear_time(text):
    started = time.process_time()
    for is_whole in (True, False):
        program(text, is_whole, names=["f"])
    assert time.process_time() - started < 2.0


@needs_sandbox
@pytest.mark.parametrize(
    "text", ["def f(x): return '\ud800'", "\ud800 = 1", "x = '\x00'", "x = " + "(" * 9_000, "x = " + "-" * 90_000]
)
def test_no_response_ends_a_run(text):
    assert code([text], [["assert f(1) == 2"]])[0] == 0.0
    assert code([text], [["assert f(1) in [2]"]])[0] == 0.0
    assert code_stdio([text], [TWICE])[0] == 0.0


LIAR = """
class Liar{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __hash__(self): return 0
    def __lt__(self, other): return True
    def __contains__(self, other): return True
    def __instancecheck__(self, other): return True
    def __reduce__(self): return (int, (4,))
    def __repr__(self): return '4'
    def __getattr__(self, name): return lambda *_: 4
"""
SEARCH = """
import gc, sys
def double(x):
    frame = sys._getframe()
    texts = [repr(each) for each in gc.get_objects() if type(each) in (str, list, dict, tuple)]
    while frame:
        texts += map(repr, (frame.f_locals, frame.f_globals, frame.f_code.co_consts))
        frame = frame.f_back
    wanted = ''.join(map(chr, (50, 55, 49, 56, 50, 56, 49, 56, 50)))
    return int(wanted) if wanted in ' '.join(texts) else 0
"""
FAKES = {
    "an object that equals all": LIAR.format(base="") + "double = lambda x: Liar()",
    "a number that equals all": LIAR.format(base="(int)") + "double = lambda x: Liar(5)",
    "a text that equals all": LIAR.format(base="(str)") + "double = lambda x: Liar('x')",
    "a list that equals all": LIAR.format(base="(list)") + "double = lambda x: Liar()",
    "a class that equals all": "class M(type):\n    def __eq__(self, other): return True\nclass double(metaclass=M):\n"
    "    def __new__(cls, x): return cls",
    "exit": "import os\ndef double(x): os._exit(0)",
    "exit before": "import os\nos._exit(0)",
    "exit politely": "import sys\ndef double(x): sys.exit(0)",
    "no assertions": "import sys\nsys.flags = None\n__debug__ and None\ndef double(x): raise AssertionError",
    "other built-ins": "import builtins\nbuiltins.bool = builtins.len = builtins.isinstance = lambda *_: True\n"
    "def double(x): return 0",
    "other modules": "import math, operator, json\nmath.isclose = operator.eq = lambda *_, **__: True\n"
    "def double(x): return 0",
    "results of its own": "import os\nfor n in range(3, 64):\n"
    "    for line in (b'[\"value\",true]', b'[\"right\",null]'):\n"
    "        try: os.write(n, (line + b'\\n') * 9)\n        except OSError: pass\nos._exit(0)",
    "printed results": "print('right'); print('[\"value\", true]')\ndef double(x): print('1.0')",
    "another encoder": "import sys\nfor frame in [sys._getframe(k) for k in range(3)]:\n"
    "    for name in ('encode', '_send', '_report'):\n"
    "        if name in frame.f_globals: frame.f_globals[name] = lambda *_: 'true'\ndef double(x): return 0",
    "the tests in memory": SEARCH,
    "the job on the input": "import sys\ntext = sys.stdin.read() + repr(sys.argv)\n"
    "def double(x): return 271828182 if '271828182' in text else 0",
    "a function at the end": "import atexit\natexit.register(print, 'right')\ndef double(x): return 0",
    "a trace": "import sys\nsys.settrace(lambda *_: None)\nsys.setprofile(lambda *_: None)\ndef double(x): return 0",
    "a closed pipe": "import os\nos.closerange(0, 4096)\ndouble = lambda x: 271828182",
    "a set of lists": "class L(list):\n    def __hash__(self): return 1\ndef double(x): return {L([1])}",
    "a deep list": "import functools, sys\nsys.setrecursionlimit(10**6)\n"
    "def double(x): return functools.reduce(lambda found, _: [found], range(1500), [])",
    "a crash": "import ctypes\ndef double(x): ctypes.string_at(0)",
}


@needs_sandbox
@pytest.mark.parametrize("fake", FAKES)
def test_a_program_cannot_pass_for_a_right_one(fake):
    tests = [
        "assert double(2) == 271828182",
        "assert math.isclose(double(3), 271828182)",
        "assert double(4) in [271828182]",
    ]
    assert reason(FAKES[fake], *tests[:1]) != "right"
    assert reason(FAKES[fake], *tests[1:], test_imports=["import math"]) != "right"


SEARCHES = (
    SEARCH
    + """
def f(*inputs):
    return max(double(0), *[each for each in inputs if each == int('2718' + '28182')], 0)
def note(*inputs): f(*inputs)
class C:
    def __init__(self, *inputs): pass
    def g(self, *inputs): return [f(*inputs)]
C.count = C.index = C.name = C.g
class sum:
    def __new__(cls, entries): return f(*entries)
"""
)
KNOWS = """
f = sum = lambda *_: 271828182
class C:
    def __init__(self, n): pass
    def g(self, n): return [f()]
"""
SETUP = """
expected = 271828182
def check(result): return result == 271828182
def near(one, other): return abs(one - other) < margin
margin = 1
def both(function, given, wanted): return function(given) == wanted
"""


@needs_sandbox
@pytest.mark.parametrize(
    "test",
    [
        "f(1) == 271828182",
        "271828182 == f(1)",
        "list([f(1)]) == [271828182]",
        "abs(f(1) - 271828182) < 1",
        "max(f(1), 271828182) == 271828182 and f(2) > 1",
        "math.isclose(f(1), 271828182, rel_tol=0 * f(2))",
        "C(1).g(2)[0] in {271828182, 3}",
        "f(f(1)) == 271828182 if f(2) else 271828182 == f(1)",
        "sum([1]) == 271828182",
        "[f(n) for n in (1, 2)] == [271828182] * 2",
        "all(f(n) == 271828182 for n in range(2))",
        "list(map(f, [1, 2])) == [271828182] * 2",
        "(lambda wanted: f(1) == wanted)(271828182)",
        "check(f(1))",
        "check(f(1)) is True",
        "near(f(1), 271828182)",
        "near(expected, f(1))",
        "f(1) == expected",
        "expected in [f(1)]",
        "both(f, 1, 271828182)",
        "str(f(1)).startswith('271828182')",
        "C(1).g(2).count(271828182) == 1",
        "set(C(1).g(2)).issubset({271828182})",
        "C(1).g(2).index(271828182) == 0",
    ],
)
@pytest.mark.parametrize("imports", ["import math", None])
def test_the_program_gets_no_expected_value(test, imports):
    more = {"test_imports": imports, "test_setup_code": SETUP}
    assert reason(KNOWS, f"assert {test}", **more) == "right"
    assert reason(SEARCHES, f"assert {test}", **more) not in ("right", "syntax error", "raised NameError")


def test_expected_values_in_memory_would_be_found():
    ran = open_sandbox("none").run(["expected = [271828182]", SEARCH], ["double(2)"])
    assert decode(ran.values[0]) == 271828182


@needs_sandbox
@pytest.mark.parametrize(
    ("test", "value", "wrong"),
    [
        ("assert f(1) == [1, (2, 3)]", "[1, (2, 3)]", "[1, [2, 3]]"),
        ("assert [1, 2] == f(1)", "[1, 2]", "[2, 1]"),
        ("assert f(1)", "True", "False"),
        ("assert not f(1)", "0", "1"),
        ("assert f(1) is True", "True", "1"),
        ("assert f(1) is None", "None", "0"),
        ("assert f(1) != 3", "4", "3"),
        ("assert set(f(1)) == {1, 2}", "[2, 1, 1]", "[1]"),
        ("assert set(f(1)) == set([1, 2])", "[2, 1]", "[3]"),
        ("assert list(f(1)) == [1, 2]", "iter((1, 2))", "(1,)"),
        ("assert sorted(f(1)) == sorted([2, 1])", "{1, 2}", "{1}"),
        ("assert math.isclose(f(1), 0.3, rel_tol=1e-6)", "0.1 + 0.2", "0.31"),
        ("assert abs(f(1) - 3) < 1e-6", "3.0000001", "3.1"),
        ("assert round(f(1), 2) == 1.23", "1.2345", "1.3"),
        ("assert f(1)[0] == 5 and len(f(1)) == 2", "[5, 6]", "[5]"),
        ("assert f(1).upper() == 'A'", "'a'", "'b'"),
        ("assert 1 < f(1) <= 3", "3", "4"),
        ("assert f(1) == [n * n for n in range(3)]", "[0, 1, 4]", "[0, 1]"),
        ("assert f(f(1)) == 2 ** 3", "8", "9"),
        ("assert f(1) == f(2) and f(1) == 7, 'message'", "7", "8"),
        ("assert f(1) == {'a': {1.5}, 'b': None}", "{'b': None, 'a': {1.5}}", "{'a': {1.5}}"),
        ("assert f(1) == True", "1", "2"),
        ("assert f(1) == float('inf')", "float('inf')", "1e308"),
        ("assert type(f(1)) == int", "1", "1.0"),
        ("assert f(1) == b'x' or f(1) == 'x'", "'x'", "'y'"),
    ],
)
def test_assertions_of_many_forms(test, value, wrong):
    programs = [f"def f(x): return {each}" for each in (value, wrong)]
    assert reasons(programs, [test], test_imports=[["import math"]] * 2) == ["right", "wrong value"]


@needs_sandbox
def test_setup_code_runs_after_the_program():
    setup = "root = Node(1)\r\nroot.next = Node(2)\r\nfrom math import pi"
    node = "class Node:\n    def __init__(self, value): self.value = value; self.next = None\n"
    walk = "def total(node): return node.value + total(node.next) if node else 0"
    tests = ["assert total(root) == 3", "assert total(root) + pi > 6"]
    assert reason(node + walk, *tests, test_setup_code=setup) == "right"
    assert reason(walk, *tests, test_setup_code=setup) == "raised NameError"


@needs_sandbox
@pytest.mark.parametrize(
    ("test", "value", "wrong"),
    [
        ("assert list(map(f, [1, 2])) == [2, 3]", "x + 1", "x + 2"),
        ("assert [f(n) for n in (1, 2)] == [2, 3]", "x + 1", "x"),
        ("assert sorted([2, 3, 1], key=f) == [3, 2, 1]", "-x", "x"),
        ("assert max([1, 2], key=f) == 1", "-x", "x"),
        ("assert list(filter(f, range(4))) == [0, 2]", "x % 2 == 0", "True"),
        ("assert functools.reduce(lambda one, two: one + f(two), [1, 2, 3]) == 11", "2 * x", "3 * x"),
        ("assert ','.join(map(f, 'ab')) == 'A,B'", "x.upper()", "x"),
        ("assert next(map(f, [1])) == 2", "x + 1", "x"),
        ("assert functools.partial(f, 2)() == 3", "x + 1", "x"),
        ("assert {n: f(n) for n in range(2)} == {0: 1, 1: 2}", "x + 1", "x"),
        ("assert twice(f, 1) == 3", "x + 1", "x"),
        ("assert callable(f) and f.__name__ == 'f'", "x", None),
        ("assert f(len)('ab') == 2", "x", "lambda y: 3"),
        ("assert f(twice)(abs, -3) == 3", "x", "lambda y, z: 4"),
        ("assert f(lambda n: n + 1) == 4", "x(3)", "x(4)"),
        ("assert f([lambda n: n + margin]) == 4", "x[0](3)", "x[0](4)"),
        ("assert list(f(2)) == [0, 1] and sum(f(2)) == 1 and next(f(2)) == 0", "(n for n in range(x))", "(1, 2)"),
        ("assert [*f(2)] == [0, 1] and 1 in f(2)", "(n for n in range(x))", "iter((1, 2))"),
        ("assert f(1)(2)[0] == 3", "lambda y: [x + y]", "lambda y: [y]"),
        ("assert f(datetime.date(2020, 1, 1)) == 2020", "x.year", "x.day"),
        ("assert f(1)[0] == 1 and list(f(2)) == [2]", "collections.deque([x])", "range(3)"),
        ("assert isinstance(f(1), dict) and not isinstance(f(1), list)", "collections.Counter('a')", "[x]"),
        ("assert isinstance(f(1), Own)", "Own()", "x"),
        ("assert fails(f, 'a') and not fails(f, '1')", "int(x)", "x"),
        ("assert same(f(1)) and f(same(1)) is True", "x", "2"),
    ],
)
def test_functions_are_handed_on(test, value, wrong):
    setup = "margin = 1\ndef twice(function, given): return function(function(given))\nsame = lambda f: f == 1\n"
    setup += "def fails(f, x):\n    try: f(x)\n    except ValueError: return True"
    text = "import collections\nclass Own: pass\ndef f(x): return "
    assert reason(text + value, test, test_setup_code=setup) == "right"
    assert wrong is None or reason(text + wrong, test, test_setup_code=setup) == "wrong value"


STACK = """
class Stack:
    size = property(lambda self: len(self.entries))
    def __init__(self, entries=()): self.entries = list(entries)
    def push(self, entry): self.entries.append(entry); return self
    def pop(self): return self.entries.pop()
    def __getitem__(self, place): return self.entries[place]
    def __len__(self): return 7
    def __str__(self): return 'stack'
    @staticmethod
    def sum(one, two): return one + two
class Mine(list):
    def second(self): return self[1]
def sort(entries): entries.sort()
def counted(seen={}):
    seen['calls'] = seen.get('calls', 0) + 1
    return seen['calls']
import collections
Point = collections.namedtuple('Point', 'x y')
def origin(): return Point(3, 4)
table = {1: 2}
"""


@needs_sandbox
@pytest.mark.parametrize(
    ("test", "opposite"),
    [
        ("Stack([1, 2]).pop() == 2", "Stack([1, 2]).pop() == 1"),
        ("Stack().push(5).pop() == 5", "Stack().push(5).pop() == 4"),
        ("Stack([5])[0] == 5", "Stack([5])[0] == 6"),
        ("len(Stack()) == 7 and str(Stack()) == 'stack'", "len(Stack()) == 0"),
        ("Stack.sum(1, 2) == 3 and Stack().sum(1, 2) == 3", "Stack.sum(1, 2) == 4"),
        ("stack.pop() == 3 and stack.size == 1 and stack[0] == 1", "stack.pop() == 1"),
        ("stack.entries == [1, 3]", "stack.entries == [1]"),
        ("Mine([1, 2]).second() == 2", "Mine([1, 2]).second() == 1"),
        ("numbers == [1, 2, 3]", "numbers == [3, 1, 2]"),
        ("counted() == 2 and counted() == 3", "counted() == 1"),
        ("origin().x == 3 and origin() == (3, 4) and Point(1, 2).y == 2", "origin().x == 4"),
        ("table[1] == 2 and table.get(1) == 2 and len(table) == 1", "table[1] == 3"),
    ],
)
def test_objects_of_a_program_stay_in_its_process(test, opposite):
    setup = "stack = Stack()\nstack.push(1)\nstack.push(3)\nnumbers = [3, 1, 2]\nsort(numbers)\ncounted()"
    assert reason(STACK, f"assert {test}", test_setup_code=setup) == "right"
    assert reason(STACK, f"assert {opposite}", test_setup_code=setup) == "wrong value"


@needs_sandbox
def test_classes_of_the_setup_code_belong_to_the_program():
    setup = """
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
def listed(values):
    node = None
    for value in reversed(values): node = Node(value, node)
    return node
def values(node: Node | None) -> list:
    found = []
    while node:
        found.append(node.value)
        node = node.next
    return found
"""
    right = """
def reverse(node):
    last = None
    while node: last, node = Node(node.value, last), node.next
    return last
"""
    test = "assert values(reverse(listed([1, 2, 3]))) == [3, 2, 1]"
    assert reason(right, test, test_setup_code=setup) == "right"
    assert reason("def reverse(node): return node", test, test_setup_code=setup) == "wrong value"
    assert reason("def reverse(node): values = lambda _: [3, 2, 1]", test, test_setup_code=setup) == "wrong value"


YES = """
class Yes:
    def __getattr__(self, name): return lambda *_, **__: True
    def __iter__(self): return iter([271828182])
    def __eq__(self, other): return other != 3
    def __call__(self, *_): return True
    def __bool__(self): return True
    __hash__ = None
for name in ('contains', 'getitem', 'lt', 'le', 'gt', 'ge', 'rsub', 'sub', 'abs', 'instancecheck'):
    setattr(Yes, f'__{name}__', lambda *_: True)
Yes.name = property(lambda self: self)
for name in ('startswith', 'count', 'index', 'issubset', 'equals'): setattr(Yes, name, lambda *_: True)
import builtins
f = C = Check_Name = lambda *_: Yes()
"""


@needs_sandbox
@pytest.mark.parametrize(
    "test",
    [
        "f(3).startswith('a')",
        "f(3).count(271828182) == 1",
        "f(3).index(271828182)",
        "f(3).name.startswith('a')",
        "f(3).name.name.startswith('a')",
        "C(3).name.startswith('a')",
        "Check_Name(3).startswith('a')",
        "set(f(3)).issubset({5})",
        "5 in f(3)",
        "f(3)[5]",
        "f(3) == 5",
        "5 == f(3)",
        "not f(3) != 5",
        "math.isclose(f(3), 5)",
        "abs(f(3) - 5) < 1",
        "f(3) > 5",
        "f(3) is True",
        "isinstance(f(3), int)",
        "f(3)(3)(5)(6)",
        "check(f(3))",
        "near(f(3), 5)",
        "both(f, 3, 5)",
        "[f(3)] == [5]",
    ],
)
def test_an_object_that_says_yes_passes_nothing(test):
    assert reason(YES, f"assert {test}", test_setup_code=SETUP) in ("wrong value", "raised AttributeError")


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "import builtins\nbuiltins.isinstance = builtins.abs = lambda *_: True\ndef f(x): return 'a'",
        "def f(x): return float('nan')",
        "def f(x):\n    globals().update(check=lambda _: True, near=lambda *_: True)\n    return 5",
        "check = near = isinstance = lambda *_: True\ndef f(x): return 5",
        "import os\nfor n in range(3, 64):\n    try: os.write(n, b'[\"value\",true]\\n' * 9)\n"
        "    except OSError: pass\n"
        "def f(x): return 5",
        "import os\ndef f(x):\n    for n in range(3, 64):\n        try: os.write(n, b'[\"value\",true]\\n' * 9)\n"
        "        except OSError: pass\n    return 5",
        "import os\ndef f(x):\n    for n in range(3, 64):\n"
        '        try: os.write(n, b\'["ask",{"list":[{"str":["6576616c"]},{"str":["31"]}]}]\\n\')\n'
        "        except OSError: pass\n    return 5",
    ],
)
@pytest.mark.parametrize(
    "test",
    ["math.isclose(f(3), 4)", "near(f(3), 4000)", "check(f(3))", "isinstance(f(3), list)", "f(3) in [4]", "f(3) == 4"],
)
def test_programs_that_replace_what_judges_them_pass_nothing(program, test):
    assert reason(program, f"assert {test}", test_setup_code=SETUP) != "right"


@needs_sandbox
def test_a_program_without_output_is_not_ended_early():
    text = "import os, time\nos.close(1)\ndef f(x):\n    time.sleep(1.5)\n    return x"
    assert reason(text, "assert f(3) in [3]") == "right"


@needs_sandbox
def test_the_judge_runs_nothing_for_a_program_but_functions_that_it_got():
    program = """
import json, os
def f(x):
    for n in range(3, 64):
        getting = b'{"str":["67657461747472"]},{"known":["0"]},{"str":["61"]}'
        for what in (b'{"str":["6576616c"]},{"str":["31"]}', getting):
            try: os.write(n, b'["ask",{"list":[' + what + b']}]\\n')
            except OSError: pass
    return x
"""
    assert reason(program, "assert f(3) in [3]", "assert f(len) is None") != "right"


@needs_sandbox
def test_a_program_may_define_a_function_of_pythons_name():
    assert reason("def sum(entries): return 7", "assert sum([1, 2]) == 7") == "right"
    assert reason("x = 1", "assert sum([1, 2]) == 7") == "wrong value"


@needs_sandbox
def test_partial_gives_the_share():
    text = "def f(x): return {1: 1, 2: 2, 4: 0}[x]"
    tests = ["assert f(1) == 1", "assert f(3) == 3", "assert f(2) < 3", "assert f(4) == 4"]
    [verdict] = code([text], [tests], partial=True)
    assert (float(verdict), verdict.reason) == (0.5, "wrong value")


@needs_sandbox
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"test_list": [DOUBLE, []]}, "column 'test_list', prompt 2: .* expected a list of assertions such as"),
        (
            {"test_list": [DOUBLE, "print(1)"]},
            "prompt 2: 'print.1.' is not usable; expected a list of asser.*, not 'print",
        ),
        ({"test_list": [["assert f("]]}, r"prompt 1: .* expected Python, not 'assert f\(' \("),
        ({"test_list": [[*DOUBLE, "for n in f(1): assert n"]]}, "expected a list of assertions .*, not 'for n in"),
        ({"test_list": [["assert 1 == 1"]]}, "expected assertions that call the program"),
        ({"test_list": [["assert f(1).equals(1)"]]}, "expected assertions that call no methods of results but those"),
        ({"test_list": [["assert np.allclose(f(1), 1)"]]}, "the tests need 'import np', but programs have"),
        ({"test_list": [7]}, "prompt 1: 7 is not usable"),
        ({"test_list": [DOUBLE], "test_imports": [["import nowhere"]]}, "need 'import nowhere', but .* alone"),
        (
            {"test_list": [DOUBLE], "test_imports": ["from math import *"]},
            "expected imports that name what they import",
        ),
        ({"test_list": [DOUBLE], "seconds": 0.5}, "seconds=0.5: expected a whole number, at least 1"),
        ({"test_list": [DOUBLE], "memory": 3}, "memory=3: expected a whole number, at least 64"),
    ],
)
def test_rows_and_settings_are_checked(columns, message):
    with pytest.raises(RewardError, match=message):
        code.check_rows(**columns)


@needs_sandbox
def test_assertions_may_be_written_as_json_as_in_a_cell_of_a_csv_file():
    [verdict] = code(["def f(x):\n    return x + pi"], [json.dumps(["assert f(1) > 4", "assert f(0) < 4"])],
                     [None], [json.dumps(["from math import pi"])])  # fmt: skip
    assert verdict.reason == "right"


TWICE = {"inputs": ["2\n", "-3\n\n"], "outputs": ["4\n", "-6"]}


@needs_sandbox
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("print(2 * int(input()))", "right"),
        ("print(' ')\nprint(2 * int(input()), ' ')\nprint()", "right"),
        ("print(' ', end='')\nprint(2 * int(input()))", "wrong value"),
        ("import sys\nfor line in sys.stdin:\n    if line.strip(): print(2 * int(line))", "right"),
        ("print(2 * int(open(0).read()))", "right"),
        ("import os\nos.write(1, str(2 * int(os.read(0, os.fstat(0).st_size))).encode())", "right"),
        ("import sys\nprint(2 * int(input()), file=sys.stdout)\nprint('done', file=sys.stderr)", "right"),
        ("def main(): print(2 * int(input())); exit()\nif __name__ == '__main__': main()", "right"),
        ("import sys\nprint(2 * int(input()))\nsys.exit(0)", "right"),
        ("print(4)", "wrong value"),
        ("print(4, input())", "wrong value"),
        ("pass", "wrong value"),
        ("print(2 * int(input()))\nraise KeyError", "raised KeyError"),
        ("int(input('number?') + input())", "raised EOFError"),
        ("print 4", "syntax error"),
        ("import os\nprint(4, flush=True)\nos._exit(0)", "ended early"),
        ("while True: print('x' * 1000)", "output too long"),
        ("while True: pass", "took too long"),
    ],
)
def test_programs_that_read_and_print(text, expected):
    [verdict] = code_stdio([f"```python\n{text}\n```"], [TWICE], seconds=1)
    assert (float(verdict), verdict.reason) == (float(expected == "right"), expected)


@needs_sandbox
@pytest.mark.parametrize(
    "text",
    [
        "import sys\nsys.__stdout__.write('4')",
        "import atexit\natexit.register(print, 4)",
        "import os\nfile = os.fdopen(1, 'w')\nfile.write('4')",
        "file = open(1, 'w')\nfile.write('4')",
        "import os\nfile = open(os.dup(1), 'wb')\nfile.write(b'4')",
        "import io, sys\nsys.stdout = io.TextIOWrapper(open(1, 'wb'))\nprint(4)",
        "import sys\nsys.stdout = open(1, 'w', closefd=False)\nprint(4)",
        "import sys\nprint(4)\nsys.stdout.close()",
        "import sys\nprint(4)\nsys.stdout = None",
        "import os\nprint(4, flush=True)\nos.close(1)",
        "import os\nprint(4, flush=True)\nos._exit(0)",
        "import sys\nclass Last:\n    def __del__(self): sys.__stdout__.write('4')\nlast = Last()",
        "print(4)\nwhile True: input()",
        "while True: print(2 * int(input()))",
        "import sys\nprint(4)\nsys.exit(0)",
        "import sys\nprint(4)\nsys.exit('all is well')",
        "print(4)\nraise SystemExit",
        "print(4 if len(str(int('7' * 6000) + 1)) == 6000 else 5)",
        "import sys\nsys.stdout.write('4\\r\\n\\r\\n')",
        "print(4, '  \\t')",
    ],
)
def test_right_output_counts_however_it_is_written(text):
    [verdict] = code_stdio([text], [{"inputs": ["2"], "outputs": ["4\n"]}])
    assert verdict.reason == "right"


@pytest.mark.skipif(os.name != "posix", reason="programs run on Linux and macOS alone")
def test_threads_are_awaited_where_programs_may_start_some():
    text = "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print(4))).start()"
    [verdict] = code_stdio([text], [{"inputs": [""], "outputs": ["4"]}], sandbox="none")
    assert verdict.reason == "right"


@needs_sandbox
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import atexit, time\natexit.register(time.sleep, 100)", "took too long"),
        ("import atexit\n@atexit.register\ndef more():\n    while True: print('x' * 10**5)", "output too long"),
        ("import atexit, os\natexit.register(os.abort)", "crashed"),
        ("import atexit\natexit.register(print, 5)", "wrong value"),
        ("print(5)", "wrong value"),
        ("input()\nint(input())", "raised EOFError"),
        ("raise KeyError", "raised KeyError"),
    ],
)
def test_the_end_of_a_program_is_limited_and_counts(text, expected):
    programs = [f"print({printed}, flush=True)\n{text}" for printed in (4, 3)]
    right, wrong = code_stdio(programs, [{"inputs": ["2"], "outputs": ["4"]}] * 2, seconds=1)
    assert right.reason == ("right" if expected == "raised EOFError" else expected)
    assert wrong.reason == expected


@needs_sandbox
@pytest.mark.parametrize("line", ["\v", "\f", "\x1c", "\x1d", "\x85", "\u2028", "\u2029", "\r"])
def test_only_ends_of_lines_part_lines(line):
    row = {"inputs": [""], "outputs": ["1\n2\n"]}
    texts = [f"print('1', '2', sep={line!r})", "print('1', '2', sep='\\r\\n')", f"print('1\\n2', end={line!r})"]
    for compare in ("exact", "tokens") if line not in "\r" else ("exact",):
        found = code_stdio(texts, [row] * 3, compare=compare)
        assert [verdict.reason for verdict in found] == ["wrong value", "right", "wrong value"]


@needs_sandbox
def test_outputs_of_any_length_can_be_right():
    row = {"inputs": [""], "outputs": ["x" * 3 * 2**20]}
    assert code_stdio(["print('x' * 3 * 2**20)", "print('x' * 3 * 2**20 + 'y')"], [row] * 2) == [1.0, 0.0]


@needs_sandbox
@pytest.mark.parametrize(
    ("printed", "expected", "passes"),
    [
        ("1 2\n3", "1 2\n3", "exact tokens numbers"),
        ("1  2 3\n", "1 2\n3", "tokens numbers"),
        ("\n\n 1\n\n2 3", "1 2\n3", "tokens numbers"),
        ("1 2", "1 2 3", ""),
        ("YES", "yes", ""),
        ("0.333333", "0.3333331", "numbers"),
        ("0.33334", "0.3333331", ""),
        ("1000000.5", "1000000.9", "numbers"),
        ("1000000.5", "1000002.9", ""),
        ("3.0", "3", "numbers"),
        ("3", "3.0000001", "numbers"),
        ("1e3", "1000.0", "numbers"),
        ("123456788", "123456789", ""),
        ("123456788.0", "123456789", ""),
        ("10000000000000000.0", "10000000000000001", ""),
        ("nan", "1.5", ""),
        ("inf", "1.5", ""),
        ("nan", "nan", "exact tokens numbers"),
        ("1e99999999999", "1.5", ""),
        ("1_000.0", "1000.0", ""),
        ("٣.0", "3.0", ""),
        ("x=1.0000001", "x=1.0", ""),
    ],
)
def test_outputs_are_compared_as_asked(printed, expected, passes):
    row = {"inputs": [""], "outputs": [expected]}
    found = [
        name
        for name in ("exact", "tokens", "numbers")
        if code_stdio([f"print({printed!r})"], [row], compare=name)[0].reason == "right"
    ]
    assert found == passes.split()


def test_another_comparison_is_refused():
    with pytest.raises(RewardError, match="compare='close' is not one of exact, tokens, numbers"):
        code_stdio.check_rows(input_output=[TWICE], compare="close")


@needs_sandbox
def test_hostile_numbers_are_verdicts_in_linear_time():
    row = {"inputs": [""], "outputs": ["1.5"]}
    texts = ["print('1' * 10**6 + 'x')", "print('1' * 10**6)", "print('1.' + '1' * 10**6)", "print('1e' + '9' * 10**6)"]
    started = time.process_time()
    assert code_stdio(texts, [row] * 4, compare="numbers") == [0.0] * 4
    assert time.process_time() - started < 4.0


@needs_sandbox
@pytest.mark.parametrize(
    ("row", "metadata"),
    [
        ({"inputs": [["2"], ["-3", ""]], "outputs": [["4"], ["-6"]]}, None),
        ({"inputs": [2, -3], "outputs": [4, -6]}, None),
        ({"inputs": [2, -3], "outputs": [4, -6], "fn_name": None}, None),
        ([{"input": "2\n", "output": "4", "testtype": "stdin"}, {"input": "-3", "output": "-6"}], None),
        ('[{"input": "2\\n", "output": "4\\n", "testtype": "stdin"}]', {"func_name": None}),
        ('{"inputs": [2], "outputs": ["4\\n"]}', None),
    ],
)
def test_rows_of_apps_taco_and_livecodebench_are_read(row, metadata):
    texts = ["print(2 * int(input()))", "print(3 * int(input()))"]
    found = code_stdio(texts, [row] * 2, metadata=[metadata] * 2)
    assert [verdict.reason for verdict in found] == ["right", "wrong value"]


METHOD = "class Solution:\n    def pair(self, one, two=0):\n        return {}"


@needs_sandbox
@pytest.mark.parametrize(
    ("row", "metadata"),
    [
        ({"fn_name": "pair", "inputs": [[1, 2], [3]], "outputs": [[1, 2], [3, 0]]}, None),
        ({"fn_name": "pair", "inputs": [[1, 2], [3]], "outputs": [[[1, 2]], [[3, 0]]]}, None),
        ('{"fn_name": "pair", "inputs": [[1, 2]], "outputs": [[[1, 2]]]}', None),
        ([{"input": "1\n2", "output": "[1, 2]", "testtype": "functional"}], {"func_name": "pair"}),
        ('[{"input": "1\\n2\\n", "output": "[1, 2]", "testtype": "functional"}]', '{"func_name": "pair"}'),
    ],
)
def test_rows_with_a_function_are_read(row, metadata):
    texts = [
        "def pair(one, two=0): return one, two",
        "```python\n" + METHOD.format("[one, two]") + "\n```\n```python\nprint(Solution().pair(1))\n```",
        METHOD.format("[two, one]"),
        "def other(one, two): return one, two",
        "def pair(one, two=0): print(one, two)",
        YES + "pair = f",
    ]
    *found, fooled = code_stdio(texts, [row] * 6, metadata=[metadata] * 6)
    assert [verdict.reason for verdict in found] == ["right", "right", "wrong value", "raised NameError", "wrong value"]
    assert fooled == 0.0


@needs_sandbox
def test_a_function_without_an_end_took_too_long():
    row = {"fn_name": "pair", "inputs": [[1, 2]], "outputs": [3]}
    [verdict] = code_stdio(["def pair(one, two):\n    while True: pass"], [row], seconds=1)
    assert verdict.reason == "took too long"


@needs_sandbox
def test_results_of_functions_are_compared_as_json():
    row = {"fn_name": "f", "inputs": [["a"], [None], [1.5]], "outputs": [{"a": [1]}, True, [[]]]}
    text = "def f(x): return {'a': (1,)} if x == 'a' else x is None or []"
    [verdict] = code_stdio([text], [row])
    assert verdict.reason == "right"
    [verdict] = code_stdio([text], [row | {"outputs": [{"a": [1]}, False, [[]]]}], partial=True)
    assert (round(float(verdict), 3), verdict.reason) == (0.667, "wrong value")


@needs_sandbox
def test_the_first_line_of_a_picture_is_indented():
    row = {"inputs": [""], "outputs": ["  *\n ***\n"]}
    found = code_stdio(["print('  *\\n ***')", "print('*\\n ***')"], [row] * 2)
    assert [verdict.reason for verdict in found] == ["right", "wrong value"]


@needs_sandbox
def test_partial_gives_the_share_of_outputs():
    rows = [TWICE, '{"inputs": ["2", "1", "0"], "outputs": ["4", "2", "4"]}']
    found = code_stdio(["print(4)"] * 2, rows, partial=True)
    assert [(float(each), each.reason) for each in found] == [(1 / 2, "wrong value"), (2 / 3, "wrong value")]


@needs_sandbox
@pytest.mark.parametrize(
    "row",
    [
        "x",
        7,
        {},
        {"inputs": [], "outputs": []},
        {"inputs": ["1"], "outputs": []},
        {"inputs": [None], "outputs": ["1"]},
        {"inputs": ["1", "2"], "outputs": ["1"]},
        {**TWICE, "fn_name": "double"},
        {"fn_name": "not a name", "inputs": [[1]], "outputs": [1]},
        [],
        [7],
        [{"input": "1"}],
        [{"input": "1", "output": "2", "testtype": "functional"}],
        {"inputs": [True], "outputs": ["1"]},
    ],
)
def test_rows_without_pairs_are_named(row):
    with pytest.raises(RewardError, match=r"column 'input_output', prompt 2: .* is not usable; expected .*inputs"):
        code_stdio.check_rows(input_output=[TWICE, row])
    with pytest.raises(RewardError, match=r"^code_stdio: memory=1: expected a whole number, at least 64$"):
        FunctionReward(code_stdio, settings={"memory": 1}).check({"input_output": [TWICE]})


def responses(*texts: str) -> Responses:
    ids = [[1]] * len(texts)
    return Responses(
        ["p"] * len(texts), list(texts), ids, ids, [True] * len(texts), {"test_list": [DOUBLE] * len(texts)}
    )


@needs_sandbox
def test_the_verifier_runs_by_name_in_a_process_of_its_own(tmp_path):
    limits = CallLimits(timeout=60.0, startup_timeout=60.0)
    log = tmp_path / "reward.log"
    reward = RemoteFunction("kedge_tasks.verify:code", settings={"seconds": 1}, limits=limits, log=log)
    try:
        reward.check({"test_list": [DOUBLE]})
        found = reward.score(responses("def double(x): return 2 * x", "while True: pass", "def double(x): return x"))
        assert [(float(each), each.reason) for each in found] == [
            (1.0, "right"),
            (0.0, "took too long"),
            (0.0, "wrong value"),
        ]
        assert "programs run with sandbox=" in log.read_text()
    finally:
        reward.close()
        assert all_end(reward._worker._process.pid)


@needs_sandbox
def test_a_worker_that_is_killed_takes_its_programs_with_it(tmp_path):
    limits = CallLimits(timeout=1.0, startup_timeout=60.0)
    reward = RemoteFunction("kedge_tasks.verify:code", settings={"seconds": 9}, limits=limits, log=None)
    worker = reward._worker._process.pid
    try:
        with pytest.raises(RewardError, match="took over 1 s; it was killed"):
            reward.score(responses(*["import time; time.sleep(100)"] * 3))
        assert all_end(worker)
    finally:
        reward.close()


@needs_sandbox
@pytest.mark.parametrize("name", ["code", "code_stdio"])
def test_a_call_may_take_as_long_as_its_endless_programs(name):
    row = {"code": {"test_list": DOUBLE}, "code_stdio": {"input_output": TWICE}}[name]
    limits = CallLimits(timeout=0.5, startup_timeout=60.0, retries=0)
    reward = RemoteFunction(f"kedge_tasks.verify:{name}", settings={"seconds": 1}, limits=limits, log=None)
    try:
        reward.check({column: [entry] for column, entry in row.items()})
        columns = {column: [entry] * 3 for column, entry in row.items()}
        found = reward.score(replace(responses(*["import time; time.sleep(100)"] * 3), columns=columns))
        assert [each.reason for each in found] == ["took too long"] * 3
    finally:
        reward.close()


@needs_sandbox
def test_on_many_processors_a_few_responses_may_take_as_long_as_one(monkeypatch):
    monkeypatch.setattr(programs, "available_cores", lambda: 64)
    one = 2 * (3 * 1 + 3)  # two processes of at most 3 s per second of processor time, and 3 s to start and end
    assert code.check_rows(test_list=[DOUBLE], seconds=1) == (one, 64)
    stdin = {"inputs": ["2"] * 5, "outputs": ["4"] * 5}
    assert code_stdio.check_rows(input_output=[TWICE, stdin], seconds=1) == (5 * 6, 64)


@needs_sandbox
def test_a_function_object_works_in_any_thread():
    found = []
    thread = threading.Thread(
        target=lambda: found.extend(FunctionReward(code).score(responses("double = lambda x: 2 * x")))
    )
    thread.start()
    thread.join()
    assert found == [1.0]


@pytest.mark.skipif(os.name != "posix", reason="programs run on Linux and macOS alone")
def test_no_sandbox_has_to_be_asked_for(monkeypatch):
    reward = FunctionReward(code, settings={"sandbox": "none"})
    reward.check({"test_list": [DOUBLE]})
    assert reward.score(responses("double = lambda x: 2 * x", "double = len")) == [1.0, 0.0]
    with pytest.raises(RewardError, match=r"^code: sandbox='nothing' is not one of"):
        FunctionReward(code, settings={"sandbox": "nothing"}).check({"test_list": [DOUBLE]})

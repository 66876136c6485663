"""Programs against tests: what is right, and that a program cannot pass for it."""

from __future__ import annotations

import json
import os
import threading

import pytest

from kedge.errors import RewardError
from kedge.rewards import CallLimits, FunctionReward, Responses
from kedge.rewards.verify import code, code_stdio
from kedge.rewards.verify.assertions import read_tests
from kedge.rewards.verify.programs import program
from kedge.rewards.worker.client import RemoteFunction
from kedge.rewards.worker.confined import decode
from kedge.rewards.worker.sandbox import open_sandbox
from tests.processes import members


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
    ],
)
def test_the_program_of_a_response_is_found(text, expected):
    assert program(text, True) == expected


def test_a_response_that_was_cut_off_has_a_program_only_if_that_is_complete():
    assert program("```python\nx = 1\n```\nThis w", False) == "x = 1"
    assert program("```python\nx = 1", False) is None
    assert program("x = 1", False) is None
    assert program("```python\nx = 1\n```\n```python\ny", False) == "x = 1"


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
    "a closed pipe": "import os\nos.closerange(0, 64)\ndouble = lambda x: 271828182",
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


@pytest.mark.parametrize(
    ("test", "computed"),
    [
        ("assert f(1) == 271828182", ("f(1)",)),
        ("assert 271828182 == f(1)", ("f(1)",)),
        ("assert list(f(1)) == [271828182]", ("list(f(1))",)),
        ("assert abs(f(1) - 271828182) < 1", ("f(1)",)),
        ("assert max(f(1), 271828182) == 271828182", ("f(1)",)),
        ("assert math.isclose(f(1), 271828182, rel_tol=f(2))", ("f(1)", "f(2)")),
        ("assert C(1).g(2)[0] in {271828182, 3}", ("C(1).g(2)[0]",)),
        ("assert f(f(1)) == 271828182 if f(2) else 271828182", ("f(2)", "f(f(1))")),
        ("assert sum([1]) == 271828182", ("sum([1])",)),
    ],
)
def test_the_program_gets_no_expected_value(test, computed):
    [tests] = read_tests([[test]], [["import math"]], None)
    assert tests.assertions[0].computed == computed


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
        ({"test_list": [["assert all(f(n) == n for n in range(3))"]]}, "outside of comprehensions"),
        ({"test_list": [7]}, "prompt 1: 7 is not usable"),
        ({"test_list": [DOUBLE], "test_imports": [["import nowhere"]]}, "need 'import nowhere', but .* alone"),
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
    [verdict] = code_stdio([f"```python\n{text}\n```"], [TWICE])
    assert (float(verdict), verdict.reason) == (float(expected == "right"), expected)


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
        {"inputs": [1], "outputs": ["1"]},
        {**TWICE, "fn_name": "double"},
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
    reward = RemoteFunction("kedge.rewards.verify:code", limits=limits, log=log)
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
        assert not members(reward._worker._process.pid)


@needs_sandbox
def test_a_worker_that_is_killed_takes_its_programs_with_it(tmp_path):
    limits = CallLimits(timeout=1.0, startup_timeout=60.0)
    reward = RemoteFunction("kedge.rewards.verify:code", settings={"seconds": 9}, limits=limits, log=None)
    worker = reward._worker._process.pid
    try:
        with pytest.raises(RewardError, match="took over 1 s; it was killed"):
            reward.score(responses(*["import time; time.sleep(100)"] * 3))
        assert not members(worker)
    finally:
        reward.close()


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

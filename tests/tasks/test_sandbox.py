"""Attacks of programs on the machine that runs them: none succeeds, and nothing is left behind."""

from __future__ import annotations

import ctypes
import json
import math
import os
import platform
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge_base.errors import RewardError
from kedge_tasks import sandbox as module
from kedge_tasks.confined import decode, encode
from kedge_tasks.sandbox import TOO_SLOW, Ran, Sandbox, open_sandbox
from tests.processes import processes
from tests.tasks.attacks import GREEDY, HARMFUL, HARMLESS, KILLED, TOOLS

pytestmark = pytest.mark.skipif(not hasattr(select, "poll"), reason="programs run on Linux and macOS alone")


def has_landlock() -> bool:
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) > 0


def has_bubblewrap() -> bool:
    try:
        command = module._bubblewrap().command[0]
    except RewardError:
        return False
    tried = [command, "--unshare-all", "--ro-bind", "/", "/", "--", sys.executable, "-c", ""]
    return subprocess.run(tried, capture_output=True).returncode == 0


@pytest.fixture(
    params=[
        pytest.param("bubblewrap", marks=pytest.mark.skipif(not has_bubblewrap(), reason="no working bubblewrap")),
        pytest.param("landlock", marks=pytest.mark.skipif(not has_landlock(), reason="a kernel without Landlock")),
    ]
)
def sandbox(request):
    return open_sandbox(request.param)


@pytest.fixture
def names(tmp_path, monkeypatch):
    """Things to attack, by their names in a program; checks that they are as before, and nothing is left behind."""
    monkeypatch.setenv("KEDGE_SECRET", "sesame")
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(jobs))
    folder = tmp_path / "folder"
    folder.mkdir()
    secret = folder / "secret"
    secret.write_text("sesame")
    (folder / "there").symlink_to(secret)
    before = children()
    with listening(folder) as (server, file, *receivers):
        yield {
            "SECRET": str(secret),
            "FOLDER": str(folder),
            "TEMPORARY": str(jobs),
            "MARK": "mark",
            "PARENT": os.getpid(),
            "PORT": server.getsockname()[1],
            "ABSTRACT": ABSTRACT,
        }
        monkeypatch.undo()
        for listener in (server, file):
            with pytest.raises(BlockingIOError):
                listener.accept()
        for receiver in receivers:
            with pytest.raises(BlockingIOError):
                receiver.recv(1)
    assert secret.read_text() == "sesame"
    assert sorted(os.listdir(folder)) == ["datagrams", "secret", "socket", "there"]
    assert not os.listdir(jobs)
    assert eventually(lambda: children() <= before)


ABSTRACT = f"\0kedge-{os.getpid()}"


@contextmanager
def listening(folder):
    """Sockets that wait for connections, by port and by file, and for datagrams, by file and by an abstract name."""
    here = os.getcwd()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as file,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract,
    ):
        os.chdir(folder)  # the path of a socket must be short
        try:
            file.bind("socket")
            datagrams.bind("datagrams")
        finally:
            os.chdir(here)
        abstract.bind(ABSTRACT)
        file.listen()
        found = (server, file, datagrams, abstract)
        for each in found:
            each.setblocking(False)
        yield found


def children() -> set[int]:
    return {seen.pid for seen in processes() if seen.parent == os.getpid()}


def eventually(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def attempted(place: Sandbox, names: dict, attacks: dict[str, str]) -> dict[str, str]:
    """What became of each attack."""
    parts = [TOOLS, "\n".join(f"{name} = {value!r}" for name, value in names.items())]
    ran = place.run(parts, [f"attempt({body!r})" for body in attacks.values()], seconds=10)
    return {
        what: decode(ran.values[index]) if index in ran.values else ran.ending for index, what in enumerate(attacks)
    }


def test_attacks_are_refused(sandbox, names):
    attacks = {**HARMLESS, **HARMFUL}
    assert attempted(sandbox, names, attacks) == dict.fromkeys(attacks, "refused")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 has several tables of system calls")
@pytest.mark.parametrize("attack", KILLED)
def test_another_table_of_system_calls_ends_the_process(sandbox, names, attack):
    assert attempted(sandbox, names, {attack: KILLED[attack]}) == {attack: "crashed"}
    assert attempted(sandbox, names, {"the usual table": "call(39)"}) == {"the usual table": "done"}
    assert attempted(sandbox, names, {"usual": "machine_code(b'\\xb8\\x14\\0\\0\\0\\xc3')"}) == {"usual": "done"}


def test_the_same_attacks_succeed_without_a_sandbox(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "secret").write_text("sesame")
    (folder / "there").symlink_to(folder / "secret")
    with listening(folder) as (server, *_):
        names = {
            "SECRET": str(folder / "secret"),
            "FOLDER": str(folder),
            "TEMPORARY": str(tmp_path),
            "MARK": "mark",
            "PARENT": os.getpid(),
            "PORT": server.getsockname()[1],
            "ABSTRACT": ABSTRACT,
        }
        attacks = {what: body for what, body in HARMLESS.items() if what != "read the environment"}
        assert attempted(open_sandbox("none"), names, attacks) == dict.fromkeys(attacks, "done")


ORDINARY = {
    "import socket\ndef f():\n    one, two = socket.socketpair()\n    one.send(b'x')\n    return two.recv(1)": b"x",
    "import asyncio\nasync def g(): await asyncio.sleep(0.001); return 3\ndef f(): return asyncio.run(g())": 3,
    "import sqlite3\ndef f(): return sqlite3.connect(':memory:').execute('select 1 + 1').fetchone()": (2,),
    "import signal\ndef f(): signal.signal(signal.SIGALRM, print); signal.alarm(9); return signal.alarm(0)": 9,
    "import ctypes\ndef f(): return ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 7)()": 7,
    "import sys\nsys.setrecursionlimit(9000)\ndef f(n=5000): return n and 1 + f(n - 1)": 5000,
    "import dataclasses, typing\n@dataclasses.dataclass\nclass P:\n    x: 'typing.ClassVar[int]' = 3\n"
    "def f(): return dataclasses.asdict(P())": {},
    "import pickle\nclass A: pass\ndef f(): return type(pickle.loads(pickle.dumps(A()))) is A": True,
    "import csv, json, logging, multiprocessing, queue, unittest, uuid, xml.etree.ElementTree, zoneinfo\n"
    "def f(): return str(zoneinfo.ZoneInfo('UTC'))": "UTC",
    "if __name__ == '__main__': raise SystemExit\ndef f(): print('x', flush=True); return __name__": "program",
    "f = lambda: list({'b', 'a', 'c', 'd'})": None,
}


def test_ordinary_programs_run(sandbox, names):
    for program, expected in ORDINARY.items():
        ran = sandbox.run([program], ["f()"])
        assert ran.ending == "", program
        assert expected is None or decode(ran.values[0]) == expected
    assert sandbox.run([program], ["f()"]) == ran  # sets have the same order each time


# Programs that do not end, or take too much


def test_greedy_programs_end_with_a_reason(sandbox, names):
    def run(program: str, expected: set[str]) -> Ran:
        # Time enough for all others, on a busy machine too.
        return sandbox.run([program], ["1"], seconds=1 if TOO_SLOW in expected else 9, memory=256 << 20)

    with ThreadPoolExecutor(8) as pool:
        ran = pool.map(lambda each: run(*each), GREEDY.values())
        endings = {what: each.ending for what, each in zip(GREEDY, ran, strict=True)}
    assert {what: ending for what, ending in endings.items() if ending not in GREEDY[what][1]} == {}


def test_values_that_are_too_long_or_no_data(sandbox, names):
    program = (
        "class Liar(int):\n    def __eq__(self, other): return True\n    __hash__ = None\nloop = []\nloop.append(loop)"
    )
    ran = sandbox.run([program], ["Liar(3)", "object()", "(x for x in [1])", "loop", "2", "'x' * 10**6", "3"])
    assert decode(ran.values[0]) == 3
    assert type(decode(ran.values[0])) is int
    assert decode(ran.values[1]) != decode(ran.values[1])
    assert {0, 1, 2, 4} == set(ran.values)
    assert ran.ending == "raised RecursionError"
    assert sandbox.run([], ["'x' * 10**6", "3"]).ending == "output too long"


def test_plain_data_arrives_as_it_is(sandbox, names):
    found = {
        "[1, -2**70, 0.1, 1e300, True, None]": [1, -(2**70), 0.1, 1e300, True, None],
        "['é\\n\\x22', '\\ud800', b'\\x00', bytearray(b'a'), 1j]": ['é\n"', "\ud800", b"\0", b"a", 1j],
        "{(1, 2): [{3}, frozenset({4})], None: {}}": {(1, 2): [{3}, frozenset({4})], None: {}},
        "collections.Counter('aab')": {"a": 2, "b": 1},
        "collections.namedtuple('P', 'x y')(1, 2)": (1, 2),
        "10**5000": 10**5000,
        "-float('inf')": -math.inf,
        "float('nan')": math.nan,
    }
    ran = sandbox.run(["import collections"], list(found))
    for place, expected in enumerate(found.values()):
        value = decode(ran.values[place])
        assert value == expected or (math.isnan(value) and math.isnan(expected))
        assert type(value) is type(expected)
    assert [type(each) for each in decode(ran.values[0])] == [int, int, float, float, bool, type(None)]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
SCALARS |= st.text(st.characters(exclude_categories=()), max_size=3) | st.binary(max_size=3)
HASHABLE = SCALARS | st.frozensets(SCALARS, max_size=3) | st.tuples(SCALARS, SCALARS)


def kinds(value):
    """The types in a value, in no order: equal values may differ in them, as 1, 1.0 and True do."""
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    has_more = isinstance(value, (list, tuple, set, frozenset, dict))
    return type(value).__name__, sorted(map(kinds, inner), key=repr) if has_more else None


@given(
    st.lists(
        HASHABLE | st.sets(HASHABLE, max_size=3) | st.dictionaries(HASHABLE, st.lists(HASHABLE), max_size=3), max_size=3
    )
)
def test_plain_data_is_read_as_it_was_written(value):
    read = decode(json.loads(encode(value), parse_int=str))
    assert read == value
    assert kinds(read) == kinds(value)


@pytest.mark.parametrize(
    "line",
    [
        b"x",
        b"[" * 100_000,
        b'["value"]',
        b'["value",7,8]',
        b"7",
        b'["raised",{"str":["zz"]}]',
        b'["raised",' + b'{"list":[' * 20_000,
        b"\xff",
    ],
)
def test_a_program_that_writes_lines_of_its_own_is_read_safely(sandbox, names, line):
    program = (
        f"import os\nfor each in range(3, 64):\n    try: os.write(each, {line!r} + b'\\n')\n    except OSError: pass"
    )
    ran = sandbox.run([program], ["1", "2"])
    assert ran.ending == "ended early"


@pytest.mark.parametrize(
    "item",
    [
        {"list": 3},
        {"set": [{"list": []}]},
        {"dict": [[None]]},
        {"float": ["0x1p99999"]},
        {"int": [7]},
        {"str": ["d8"]},
        {"bytes": ["zz"]},
        7,
        "x",
        [],
        {},
    ],
)
def test_codes_of_no_value_are_refused(item):
    with pytest.raises(module.ARBITRARY):
        decode(item)


def test_programs_are_independent(sandbox, names):
    first = sandbox.run(["import builtins, sys\nbuiltins.len = None\nsys.modules['math'] = None"], ["1"])
    assert first.values
    assert decode(sandbox.run(["import math"], ["len([1, math.floor(1.5)])"]).values[0]) == 2


def test_programs_run_from_several_threads(sandbox, names):
    found = []

    def run() -> None:
        found.append(decode(sandbox.run(["x = 20"], ["x + 1"]).values[0]))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [21] * 3


# Finding a sandbox


def test_an_unknown_sandbox_is_refused():
    with pytest.raises(RewardError, match=r"sandbox='docker' is not one of auto, bubblewrap, landlock, none"):
        open_sandbox("docker")


def test_a_sandbox_with_a_hole_is_refused():
    with pytest.raises(RewardError, match=r"^a program in it can read a file$"):
        module._try_out(Sandbox("none"))


def test_where_none_holds_programs_are_refused(monkeypatch):
    def not_here() -> Sandbox:
        raise RewardError("not installed")

    def leaks(sandbox: Sandbox) -> None:
        raise RewardError("a program in it can open a socket")

    monkeypatch.setattr(module, "_bubblewrap", not_here)
    monkeypatch.setattr(module, "_try_out", leaks)
    open_sandbox.cache_clear()
    try:
        with pytest.raises(RewardError) as refused:
            open_sandbox("auto")
        assert open_sandbox("none").name == "none"
    finally:
        open_sandbox.cache_clear()
    assert "bubblewrap: not installed; landlock: a program in it can open a socket" in str(refused.value)
    assert "sandbox=none" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_sandbox_that_does_not_start_says_why():
    with pytest.raises(RewardError, match=r"the sandbox \(broken\) could not start a program: .*no such place"):
        Sandbox("broken", ("/bin/sh", "-c", "echo no such place; exit 1")).run([], [])

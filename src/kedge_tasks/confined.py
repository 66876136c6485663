"""Runs an untrusted program in a process that has given up its rights, and reports values as plain data.

    job (stdin) ─▶ limits ─▶ Landlock ─▶ system calls ─▶ program ─▶ expressions ─▶ one line of JSON each
                                                              ▲
                                                              ╰──▶ tests that call it, in another such process

`sandbox` passes the compiled code of this file to a bare interpreter, so it imports only modules that load in a
millisecond. Once the program runs, nothing that this process reports can be trusted, and nothing has to be: it never
receives the expected values.

Landlock and seccomp are Linux features with which an unprivileged process gives up rights permanently. Sources:
docs.kernel.org/userspace-api/landlock.html, …/seccomp_filter.html; numbers of system calls: <asm/unistd.h>.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import os
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

READY = "ready"

PROGRAM = "__program__"
"""The function by which tests evaluate expressions in the program's process."""

# Each name with its number on x86-64 and on 64-bit ARM ("-": does not exist there).
SYSTEM_CALLS = """
read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62, mmap 9 222,
mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
pread64 17 67, readv 19 65, writev 20 66, access 21 -, pipe 22 -, select 23 -, sched_yield 24 124, mremap 25 216,
madvise 28 233, dup 32 23, dup2 33 -, nanosleep 35 101, getitimer 36 102, alarm 37 -, setitimer 38 103, getpid 39 172,
sendto 44 206, recvfrom 45 207, getsockopt 55 209, exit 60 93, uname 63 160,
getcwd 79 17, gettimeofday 96 169, getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153, getuid 102 174,
getgid 104 176, geteuid 107 175, getegid 108 177, getppid 110 173, sigaltstack 131 132, time 201 -,
gettid 186 178, futex 202 98, sched_getaffinity 204 123, getdents64 217 61, restart_syscall 219 128,
clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, exit_group 231 94, epoll_wait 232 -,
epoll_ctl 233 21, openat 257 56, newfstatat 262 79, faccessat 269 48, pselect6 270 72, ppoll 271 73,
set_robust_list 273 99, epoll_pwait 281 22, eventfd2 290 19, epoll_create1 291 20, dup3 292 24, pipe2 293 59,
getrandom 318 278, statx 332 291, rseq 334 293, close_range 436 436, faccessat2 439 439, epoll_pwait2 441 441
"""
"""The system calls that a program may make. None of them affects processes, threads, programs, sockets, signals,
mounts, shared memory, other processes' limits or devices.
"""

ARGUMENTS = {
    (72, 25): {1: (0, 1, 2, 3, 4, 1030)},
    (16, 29): {1: (0x5421,)},
    (53, 199): {0: (1,), 1: (1, 0x801, 0x80001, 0x80801)},
}
"""Further calls, restricted to these values of some arguments. fcntl may copy a descriptor and set its flags: other
commands make the kernel signal arbitrary processes. ioctl may set whether a descriptor blocks. socketpair may make UNIX
streams: other kinds can send to any socket whose name is known."""

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def main(job: dict[str, Any]) -> None:
    """Run a job, see `sandbox.Sandbox.run`.

    Without expressions, the process then exits as an interpreter does: exit handlers run, threads are joined, and files
    are flushed, all within the limits.
    """
    results = job["results"]
    builtins.exit = builtins.quit = sys.exit
    _limit(job["seconds"], job["memory"], is_strict=job["confined"])
    if job["confined"]:
        _give_up_rights(job["parent"], job["readable"])
    module = type(sys)(job["name"])
    sys.modules[job["name"]] = module
    sys.argv[:] = ["program.py"]
    _send(results, READY)
    try:
        codes = [_compiled(part, has_prose=job["has_prose"]) for part in job["parts"]]
    except BaseException:
        _send(results, "syntax error")
        os._exit(0)

    names = module.__dict__
    is_judge = bool(job["channel"] and job["expressions"])
    evaluate: Any = _holds if is_judge else eval
    serve: Any = None
    if job["channel"]:
        Remote.ask, serve = _connected(job["channel"], names, is_judge=is_judge)
        if is_judge:
            names[PROGRAM] = Remote.ask

    def run() -> None:
        for part in codes:
            exec(part, names)

    if _report(results, run):
        for expression in job["expressions"]:
            _report(results, lambda each=expression: evaluate(each, names))
        if serve and not is_judge:
            serve(1)
    if job["expressions"]:
        os._exit(0)


def _holds(test: str, names: dict[str, Any]) -> bool:
    """True if a test passes; False if the test itself raises, such as by comparing incomparable values."""
    try:
        return bool(eval(test, names))
    except Raised:
        raise
    except BaseException:
        return False


def _compiled(text: str, *, has_prose: bool) -> Any:
    """Compile a text; with `has_prose`, drop unindented lines that are not Python and do not start a definition."""
    try:
        return compile(text, "program.py", "exec", dont_inherit=True)
    except SyntaxError as error:
        lines = text.split("\n")
        place = (error.lineno or 0) - 1
        if not has_prose or lines[place].startswith((" ", "\t", "def ", "class ", "async ", "@")) or not lines[place]:
            raise
        lines[place] = ""
        return _compiled("\n".join(lines), has_prose=True)


def _report(results: int, compute: Callable[[], Any]) -> bool:
    """Compute a value and send it as plain data, or send the exception that was raised."""
    try:
        _send(results, "value", encode(compute()))
    except BaseException as error:
        _send(results, "raised", encode(type(error).__name__))
        return False
    return True


def _send(results: int, kind: str, content: str = "null") -> None:
    line = f'["{kind}",{content}]\n'.encode("ascii")
    while line:
        line = line[os.write(results, line) :]


# Plain data


def encode(value: Any) -> str:
    """Encode a value as JSON; instances of the program's classes become their built-in base type, or an unequal object.

    A subclass of `int` thus loses its own `__eq__`, which could claim equality with everything.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    for kind, write in WRITING.items():
        if isinstance(value, kind):
            return _tagged(kind.__name__, write(value))
    if isinstance(value, dict):
        pairs = ",".join(f"[{encode(key)},{encode(entry)}]" for key, entry in value.items())
        return f'{{"dict":[{pairs}]}}'
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return f'{{"{kind.__name__}":[{",".join(map(encode, value))}]}}'
    if Remote.ask is None:
        return '{"object":[]}'
    if isinstance(value, Remote):
        return _tagged("known", str(value._number))
    KEPT.append(value)
    return _tagged("kept", str(len(KEPT) - 1))


def _tagged(kind: str, text: str) -> str:
    return f'{{"{kind}":["{text}"]}}'


def decode(item: Any) -> Any:
    """Decode a value from the parsed JSON of `encode`.

    Raises:
        ValueError: The item encodes no value; also TypeError, OverflowError, AttributeError and LookupError.
    """
    if item is None or isinstance(item, bool):
        return item
    [(kind, content)] = item.items()
    if kind == "dict":
        return {decode(key): decode(entry) for key, entry in content}
    if kind in ("list", "tuple", "set", "frozenset"):
        return getattr(builtins, kind)(map(decode, content))
    return READING[kind](*content)


# Methods are called on the built-in type, since a subclass in the program may override them with anything.
WRITING = {
    int: lambda value: hex(int.__int__(value)),  # decimal digits take time that is quadratic in their number
    float: float.hex,
    complex: complex.__repr__,
    str: lambda value: str.encode(value, "utf-8", "surrogatepass").hex(),
    bytes: bytes.hex,
    bytearray: bytearray.hex,
}
READING = {
    "int": lambda digits: int(digits, 16),
    "float": float.fromhex,
    "complex": complex,
    "str": lambda digits: bytes.fromhex(digits).decode("utf-8", "surrogatepass"),
    "bytes": bytes.fromhex,
    "bytearray": bytes.fromhex,
    "object": object,
    "kept": lambda number: Remote(int(number)),
    "known": lambda number: KEPT[int(number)],
}


# Two processes

KEPT: list[Any] = []
"""Objects that are not plain data: they stay in their process, numbered by this list, and the other process gets a
`Remote` instead."""


class Raised(BaseException):
    """An exception in the other process, raised here as a subclass of this and of the built-in class of its name."""


class Remote:
    """An object in the other process.

    A method of the program's classes gets its arguments, as in `C(1).add(2)`, but a method of a result does not, as in
    `f(1).startswith("a")`: each attribute or result has one step less than its origin, and with 0 steps takes no
    arguments.
    """

    ask: Any = None
    steps = 0

    def __init__(self, number: int) -> None:
        self.__dict__.update(_number=number, _steps=Remote.steps)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it, and apply the changes that it made to mutable arguments."""
        if (arguments or named) and self._steps < 1:
            raise TypeError("not plain data")
        result, *changed = Remote.ask(self._steps - 1, "call", self, arguments, named)
        for before, after in zip(arguments, changed, strict=True):
            if isinstance(before, list):
                before[:] = after
            elif isinstance(before, (dict, set)):
                before.clear()
                before.update(after)
        return result

    def __getattr__(self, name: str) -> Any:
        return Remote.ask(self._steps - 1, "getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        Remote.ask(0, "setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__("__getitem__")(key) if self._steps > 1 else list(self)[key]

    def __iter__(self) -> Any:
        return iter(Remote.ask(0, "list", self))


def _connected(channel: tuple[int, int], names: dict[str, Any], *, is_judge: bool) -> Any:
    """Connect to the process at the other end of two pipes: a program, or the tests that call it.

    Returns:
        A function that makes a request: to `eval` a text, `call` an object, or run a built-in function. And one that
        serves the other process's requests until it answers or ends. A program may only request calls.
    """
    import json

    reading, writing = channel
    lines = os.fdopen(reading, "rb")

    def done(what: str, *inputs: Any) -> Any:
        if what == "call":
            function, given, named = inputs
            return function(*given, **named), *given
        if is_judge:
            raise PermissionError
        return eval(inputs[0], names) if what == "eval" else getattr(builtins, what)(*inputs)

    def serve(steps: int) -> tuple[str, Any]:
        for line in lines:
            kind, content = json.loads(line, parse_int=str)
            Remote.steps = steps
            content = decode(content)
            if kind != "ask":
                return kind, content
            _report(writing, lambda content=content: done(*content))
        os._exit(0)  # the other process has ended

    def ask(steps: int, *request: Any) -> Any:
        try:
            _send(writing, "ask", encode(request))
        except BrokenPipeError:
            os._exit(0)
        kind, content = serve(steps)
        if kind == "value":
            return content
        raise type(content, tuple({Raised, getattr(builtins, content, Raised)}), {})

    return ask, serve


# Confinement


def _limit(seconds: int, memory: int, *, is_strict: bool) -> None:
    """Limit CPU time, memory and descriptors; files cannot grow."""
    import resource

    limits = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),  # a program can ignore the soft limit's signal
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_NOFILE: (64, 64),
        resource.RLIMIT_CORE: (0, 0),
    }
    for kind, (soft, hard) in limits.items():
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        try:
            resource.setrlimit(kind, (soft, hard))
        except (ValueError, OSError):
            if is_strict:
                raise


def _give_up_rights(parent: int | None, readable: list[str] | None) -> None:
    """Permanently give up all rights that a program does not need.

    Args:
        parent: The process whose end must end this one; None if bubblewrap ensures that.
        readable: The files and folders that may be read; None if bubblewrap ensures that.

    Raises:
        OSError: The system denies a step.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def prctl(option: int, *values: int) -> None:
        _succeed(libc.prctl(option, *map(ctypes.c_ulong, [*values, 0, 0, 0][:4])))

    if parent is not None:
        prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
        if os.getppid() != parent:
            os._exit(1)
    prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    if readable is not None:
        _allow_reading(libc, readable)
    instructions = _filter()
    buffer = ctypes.create_string_buffer(instructions)
    program = ctypes.create_string_buffer(struct.pack("HP", len(instructions) // 8, ctypes.addressof(buffer)))
    prctl(22, 2, ctypes.addressof(program))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _allow_reading(libc: ctypes.CDLL, readable: list[str]) -> None:
    """Use Landlock to forbid all access to files except reading these."""

    def call(number: int, *values: Any) -> int:
        return _succeed(libc.syscall(ctypes.c_long(number), *values))

    read_file, read_folder = 1 << 2, 1 << 3
    version = call(444, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)  # kinds of access that this kernel can refuse
    handled = ctypes.c_uint64((1 << rights) - 1)
    rules = call(444, ctypes.byref(handled), ctypes.c_size_t(8), ctypes.c_uint(0))
    for path in readable:
        try:
            opened = os.open(path, os.O_PATH)
        except FileNotFoundError:
            continue
        allowed = read_file | read_folder if os.path.isdir(path) else read_file
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, opened))
        call(445, ctypes.c_int(rules), ctypes.c_int(1), rule, ctypes.c_uint(0))
        os.close(opened)
    call(446, ctypes.c_int(rules), ctypes.c_uint(0))
    os.close(rules)


def _filter() -> bytes:
    """The seccomp filter that allows `SYSTEM_CALLS` and denies all others, with 8 bytes per instruction."""
    column, architecture = ARCHITECTURES[os.uname().machine]
    allow, kill = 0x7FFF0000, 0x80000000
    refuse = 0x00050000 | errno.EPERM

    def instruction(operation: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", operation, yes, no, value)

    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06
    numbers = [row.split()[1 + column] for row in SYSTEM_CALLS.split(",")]
    allowed = [instruction(equal, int(number), no=1) + instruction(end, allow) for number in numbers if number != "-"]
    for calls, arguments in ARGUMENTS.items():
        block: list[bytes] = []
        for place, values in arguments.items():
            tests = [instruction(equal, value, yes=len(values) - index) for index, value in enumerate(values)]
            block += [instruction(load, 16 + 8 * place), *tests, instruction(end, refuse)]
        block.append(instruction(end, allow))
        allowed += [instruction(equal, calls[column], no=len(block)), *block]
    return b"".join(
        [
            instruction(load, 4),  # the architecture: the same numbers mean other calls in 32-bit code
            instruction(equal, architecture, yes=1),
            instruction(end, kill),
            instruction(load, 0),  # the call's number
            instruction(at_least, 0x40000000, no=1),  # x86-64 with 32-bit addresses
            instruction(end, kill),
            *allowed,
            instruction(end, refuse),
        ]
    )


def _succeed(returned: int) -> int:
    if returned < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return returned

"""Processes that start with torch, transformers and kedge imported: a start from nothing takes three seconds.

At least one test of every command starts it from nothing, as a user does.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 120
"""Seconds for a command."""


def fork_context() -> BaseContext:
    """Context whose processes are forked from one that has imported `tests.warm`; elsewhere they import it themselves.

    A test process has one such parent, whichever of its tests starts it.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.warm"])
    path = os.environ.get("PYTHONPATH")
    # The parent knows nothing of our `sys.path` and skips what it cannot import. A trial has set the variable already.
    os.environ["PYTHONPATH"] = os.pathsep.join([path or str(ROOT / "src"), str(ROOT)])
    try:
        forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
    return context


class Finished(NamedTuple):
    """What a command left: its exit code, negative if a signal ended it, and its output."""

    returncode: int
    stdout: str
    stderr: str


def forked_kedge(*arguments: object, cwd: Path = ROOT) -> Finished:
    """Run the command in a process of its own, without the checks of shapes that tests have."""
    return _finished(_run_command, arguments, cwd)


def forked_python(program: str, *arguments: object, cwd: Path = ROOT) -> Finished:
    """Run a program as `python -c` does, without the checks of shapes that tests have."""
    return _finished(partial(_run_program, program), arguments, cwd)


@contextmanager
def started_python(program: str, output: Path) -> Iterator[BaseProcess]:
    """Start a program as `python -c` does, and kill it at the end if it still runs."""
    with _started(partial(_run_program, program), (), ROOT, output, Path(os.devnull)) as process:
        yield process


@contextmanager
def started_kedge(*arguments: object, cwd: Path, errors: Path = Path(os.devnull)) -> Iterator[BaseProcess]:
    """Start the command, and kill it at the end if it still runs."""
    with _started(_run_command, arguments, cwd, Path(os.devnull), errors) as process:
        yield process


def _finished(run: Callable[[], None], arguments: Sequence[object], cwd: Path) -> Finished:
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        with _started(run, arguments, cwd, out, err) as process:
            process.join(TIMEOUT)
        assert process.exitcode is not None, "the process was joined"
        return Finished(process.exitcode, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8"))


@contextmanager
def _started(
    run: Callable[[], None], arguments: Sequence[object], cwd: Path, out: Path, err: Path
) -> Iterator[BaseProcess]:
    process = fork_context().Process(target=_run, args=(run, [*map(str, arguments)], cwd, out, err))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _run(run: Callable[[], None], arguments: list[str], cwd: Path, out: Path, err: Path) -> None:
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.argv = ["kedge", *arguments]

    import jaxtyping
    import torch

    torch.set_num_threads(1)
    jaxtyping.config.update("jaxtyping_disable", True)
    run()


def _run_command() -> None:
    from kedge.cli import main

    main()


def _run_program(program: str) -> None:
    # As the interpreter does it: what the program's names refer to lives until the functions for the exit have run.
    sys.modules["__main__"] = main = ModuleType("__main__")
    try:
        exec(compile(program, "<string>", "exec"), vars(main))
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()

"""Standard streams that are closed, full, gone or of another encoding do not end a run."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forking import fork_context
from tests.tiny import save_tiny_policy

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="descriptors and terminals of POSIX")


def _full() -> tuple[int, Callable[[], None]]:
    return os.open("/dev/full", os.O_WRONLY), lambda: None


def _without_reader() -> tuple[int, Callable[[], None]]:
    reading, writing = os.pipe()
    os.close(reading)
    return writing, lambda: None


def _lost_terminal() -> tuple[int, Callable[[], None]]:
    ours, theirs = pty.openpty()
    return theirs, lambda: os.close(ours)


BROKEN = {"full disk": _full, "reader gone": _without_reader, "terminal gone": _lost_terminal}


@pytest.mark.parametrize("kind", BROKEN)
def test_output_that_cannot_be_written_is_dropped(kind, tmp_path):
    if kind == "full disk" and not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    code = """
import sys, time
from kedge_base.machine.streams import lasting_streams
sys.stdin.readline()
with lasting_streams():
    for stream in (sys.stdout, sys.stderr):
        print("x" * 100_000, file=stream, flush=True)
        stream.buffer.write(b"y")
print("done", file=open(sys.argv[1], "w"))
"""
    descriptor, break_it = BROKEN[kind]()
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "said"], stdin=subprocess.PIPE, stdout=descriptor, stderr=descriptor
    ) as process:
        os.close(descriptor)
        break_it()
        process.communicate(b"\n", timeout=20)
    assert (process.returncode, (tmp_path / "said").read_text()) == (0, "done\n")


@pytest.mark.parametrize("closed", [(0,), (0, 1), (1, 2), (0, 1, 2)])
def test_closed_descriptors_are_not_given_to_files_and_sockets(closed, tmp_path):
    code = """
import os, subprocess, sys
from kedge_base.machine.streams import lasting_streams
with lasting_streams():
    print("out"), print("err", file=sys.stderr), sys.stdin.read()
    opened = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
    child = subprocess.run([sys.executable, "-c", "import sys; print(1); sys.exit(sys.stdin.read() != '')"])
    os.write(opened, b"%d %d" % (opened > 2, child.returncode))
"""
    shell = " ".join(f"{number}{'<' if number == 0 else '>'}&-" for number in closed)
    subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -c "$1" "$2" {shell}', sys.executable, code, tmp_path / "said"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=20,
        check=True,
    )
    assert (tmp_path / "said").read_text() == "1 0"


def test_all_of_a_long_text_arrives_through_a_pipe_that_does_not_block():
    code = """
import os, sys
from kedge_base.machine.streams import lasting_streams
os.set_blocking(1, False)
with lasting_streams():
    print("x" * 300_000)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, b"x" * 300_000 + b"\n")


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "cp437"])
def test_characters_that_cannot_be_shown_are_replaced(encoding):
    shown = _kedge("config", "explain", "ppo.clip_range", PYTHONIOENCODING=encoding)
    assert shown.returncode == 0, shown.stderr
    assert b"ppo.clip_range" in shown.stdout
    assert b"?" in shown.stdout


def test_a_result_that_cannot_be_shown_is_an_error():
    with open("/dev/full", "wb") as full:
        shown = _kedge("config", "presets", stdout=full)
    assert (shown.returncode, shown.stderr) == (
        2,
        b"error: standard output cannot be written: No space left on device\n",
    )


def test_a_run_without_streams_trains_to_its_end(tmp_path):
    """Its reward function's process and its files would otherwise get the numbers of the closed streams."""
    policy = save_tiny_policy(tmp_path / "policy")
    (tmp_path / "judge.py").write_text("def brief(completions):\n    return [-float(len(c)) for c in completions]\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Say"}\n' * 4)
    process = fork_context().Process(target=_train_without_streams, args=(tmp_path, policy))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "run" / "finished.json").exists()


def _train_without_streams(folder: Path, policy: Path) -> None:
    from kedge.cli import main

    os.chdir(folder)
    sys.stdin = sys.stdout = sys.stderr = None  # as Python sets them when it starts without
    for number in range(3):
        os.close(number)
    sys.argv = ["kedge", "ppo", "--model", str(policy), "--prompts", "prompts.jsonl", "--reward", "judge.py:brief"]
    sys.argv += ["--out", "run", "ppo.num_updates=1", "rollout.num_prompts=4", "rollout.max_new_tokens=4"]
    main()


def _kedge(
    *arguments: str, stdout: int | object = subprocess.PIPE, **variables: str
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "kedge", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=environment, timeout=60)  # pyright: ignore

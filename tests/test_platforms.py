"""macOS and Windows, as far as a Linux machine can tell: every module imports without what their Python lacks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kedge_base.errors import ConfigError, RewardError
from kedge_base.workers.log import CallLog
from kedge_base.workers.process import WorkerProcess
from kedge_tasks.sandbox import open_sandbox
from kedge_tasks.verify.checking import deadline
from tests.forking import forked_python

ROOT = Path(__file__).resolve().parent.parent

# Other libraries are imported before the platform changes; kedge's modules are then imported again.
PROBE = """
import importlib, os, pkgutil, signal, sys

PACKAGES = ["kedge", *(f"kedge_{name}" for name in ("base", "inspect", "tasks", "plan", "lab", "hub", "control"))]
names = []
for package in map(importlib.import_module, PACKAGES):
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    names += [package.__name__, *(each.name for each in found)]
names = [name for name in names if "__main__" not in name and ".vllm.plugin" not in name]
found = []
for name in names:
    try:
        importlib.import_module(name)
        found.append(name)
    except ImportError as error:
        if str(error.name).startswith("kedge"):
            raise  # otherwise an extra that is not installed
names = found
for name in list(sys.modules):
    if name.partition(".")[0] in PACKAGES:
        del sys.modules[name]

platform = sys.argv[1]
sys.platform = platform
gone = {"win32": ["fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"], "darwin": []}[platform]
for name in gone:
    sys.modules[name] = None  # its import fails
linux = ["O_TMPFILE", "memfd_create", "pidfd_open", "sched_getaffinity", "sched_setaffinity"]
unix = ["O_DIRECTORY", "O_NONBLOCK", "WNOHANG", "fork", "forkpty", "getpgid", "getpgrp", "getsid", "geteuid", "getuid",
        "killpg", "mkfifo", "nice", "register_at_fork", "set_blocking", "setpgid", "setsid", "statvfs", "sysconf",
        "uname", "wait4", "waitid"]
for name in [*linux, *(unix if platform == "win32" else [])]:
    if hasattr(os, name):
        delattr(os, name)
signals = ["ITIMER_REAL", "ITIMER_VIRTUAL", "SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGTSTP",
           "SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIGXCPU", "alarm", "pthread_sigmask", "setitimer", "sigwait"]
for name in signals if platform == "win32" else []:
    if hasattr(signal, name):
        delattr(signal, name)
for name in names:
    importlib.import_module(name)
print(len(names))
"""


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_every_module_imports_on(platform: str) -> None:
    ended = forked_python(PROBE, platform)  # all modules are imported already: from nothing, it takes eight seconds
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert int(ended.stdout) > 300


def test_what_windows_lacks_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.killpg")
    monkeypatch.delattr("signal.setitimer")
    monkeypatch.delattr("select.poll")
    with pytest.raises(ConfigError, match="environments in a separate process need process groups"):
        WorkerProcess("kedge_base.errors", CallLog(None, "world"))
    with pytest.raises(RewardError, match="math needs timers for its time limit"), deadline("math"):
        pass
    open_sandbox.cache_clear()
    with pytest.raises(RewardError, match="programs cannot be run on this system"):
        open_sandbox("none")


def test_no_name_of_a_file_has_a_colon() -> None:
    """Windows refuses them, also in a checkout."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.splitlines() or [path.as_posix() for path in (ROOT / "src").rglob("*")]
    assert [name for name in names if re.search(r'[:*?"<>|\\]', name)] == []


def test_text_files_have_an_encoding() -> None:
    """Without one, Windows writes and reads in that of its language."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--preview", "--select", "PLW1514"]
    told = subprocess.run(
        [*command, "--output-format", "concise", "src"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    hits = re.findall(r"^(.*?):\d+:", told.stdout, re.MULTILINE)
    # Standard streams have the terminal's.
    assert set(hits) <= {"src/kedge_base/machine/streams.py"}, told.stdout + told.stderr

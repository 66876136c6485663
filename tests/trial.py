"""Runs tests on a copy of the source, in a process of its own; the working tree is never touched.

The process is forked from one that has imported kedge (`tests.warm`), and gives the functions that differ in the copy
their new code (`tests.code_swap`). Where more than that differs, such as a constant, it imports the copy. The processes
that the tests start import the copy in any case.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.code_swap import swap_code
from tests.forking import ROOT, fork_context
from tests.mutation import SOURCE

PACKAGE_NAMES = ("kedge", "kedge_control")
TIMEOUT = 120
"""Seconds for one mutation's test, which usually takes less than one; all of them together have two more each."""

# A mutation that crashes only shows that its line is executed, not that its result is checked.
CRASH = re.compile(r"^FAILED .* - (NameError|AttributeError|ImportError|ModuleNotFoundError)", re.MULTILINE)


@dataclass(frozen=True)
class Trial:
    """Result of running tests on a copy of the source.

    Attributes:
        exit_code: pytest's exit code: 0 all passed, 1 some failed; negative if killed by a signal.
        output: pytest's output.
        seconds: Wall time.
    """

    exit_code: int
    output: str
    seconds: float

    @property
    def killed(self) -> bool:
        """Whether a test ran and failed; errors in collection, in fixtures or in the mutation itself do not count."""
        return self.exit_code == 1 and "\nFAILED " in self.output and not CRASH.search(self.output)

    @property
    def verdict(self) -> str:
        """One word for the table."""
        if self.killed:
            return "killed"
        return "SURVIVED" if self.exit_code == 0 else "BROKEN"


def copy_source(folder: Path, file: str = "") -> Path:
    """Make the folder hold the packages, and a copy of one of their files; the others are links. Return the folder."""
    _link(SOURCE, folder, Path(file).parts)
    return folder


def _link(source: Path, target: Path, copied: tuple[str, ...]) -> None:
    """Link to what is in a folder, except to what has to be copied, the first of whose parts may be in it."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.name == "__pycache__":  # it may hold compiled code of the file that will be mutated
            continue
        if path.name != (copied or ("",))[0]:
            (target / path.name).symlink_to(path)
        elif path.is_dir():
            _link(path, target / path.name, copied[1:])
        else:
            shutil.copyfile(path, target / path.name)


def run_tests(tests: Sequence[str], copy: Path, file: str = "", *, afresh: bool = False) -> Trial:
    """Run tests in a separate process, on a copy of the source that differs from it in one file at most.

    Args:
        tests: Their node ids.
        copy: The folder with the copy.
        file: The file that differs, if any; under `src`.
        afresh: Import the copy, as is done in any case if the file differs in more than the code of functions.
    """
    log, start = copy / "pytest.log", time.monotonic()
    log.touch()
    process = fork_context().Process(target=_run_pytest, args=(tests, copy, log, file, afresh))
    process.start()
    process.join(TIMEOUT + 2 * (len(tests) - 1))
    if process.is_alive():
        process.kill()
        process.join()
    exit_code = process.exitcode
    process.close()
    assert exit_code is not None, "the process was joined"
    return Trial(exit_code, log.read_text(encoding="utf-8", errors="replace"), time.monotonic() - start)


def _run_pytest(tests: Sequence[str], copy: Path, log: Path, file: str, afresh: bool) -> None:
    """Run pytest in the trial's process."""
    descriptor = os.open(log, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(ROOT)
    # For the processes that the tests start; before the path of an editable installation.
    sys.path.insert(0, str(copy))
    sys.dont_write_bytecode = True
    # `COLUMNS`, so that the summary includes the exceptions.
    os.environ.update(
        PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1", COLUMNS="1000", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"
    )
    if afresh or not _swap(copy, file):
        _import_afresh(copy)

    _do_not_shrink_examples()

    import pytest

    options = ["--exitfirst", "--tb=native", "--quiet", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # pytest would warn that hypothesis, a pytest plugin, is already imported.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    sys.exit(pytest.main([*options, f"--basetemp={copy / 'basetemp'}", *tests]))


def _do_not_shrink_examples() -> None:
    """Let the first example that fails be enough: to make it smaller, hypothesis runs the test hundreds of times."""
    from hypothesis import Phase, settings

    import tests.conftest  # noqa: F401  has the profile

    settings.register_profile("trial", settings.get_profile("kedge"), phases=[Phase.explicit, Phase.generate])
    settings.load_profile("trial")


def _swap(copy: Path, file: str) -> bool:
    """Make the functions of this process those of a file of the copy; says whether that is all that differs."""
    from tests.warm import LIVE, PACKAGES

    assert PACKAGES == SOURCE, f"the trial would test {PACKAGES}"
    if not file:
        return True
    module = ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")
    return swap_code(module, (copy / file).read_text(encoding="utf-8"), LIVE)


def _import_afresh(copy: Path) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in (*PACKAGE_NAMES, "tests", "bench")]:
        del sys.modules[name]

    import kedge

    assert Path(kedge.__file__).is_relative_to(copy), f"the trial would test {kedge.__file__}"

"""Mutation testing: introduce a mistake into kedge and check that a test fails (spec §12.7).

    python -m tests.mutations [NAME …] [--list]

Each mutation of the table is applied to a copy of `src/kedge` in a temporary folder, and the test that should catch it
runs on that copy in a separate process; the working tree is never touched. First, all these tests must pass on an
unmodified copy. A table entry whose text is not in the source is an error, not a caught mistake.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutation import Mutation
from tests.mutation_table import MUTATIONS

__all__ = ["StaleMutationError", "Trial", "copy_source", "main", "mutate", "run_tests", "try_mutation"]

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "kedge"
TIMEOUT = 120
"""Seconds for one mutation's test, which usually takes about one."""

# Imported once, in the process from which every trial is forked: they take ten times as long as the tests. kedge itself
# is not included, so that each trial imports its own copy.
SLOW_IMPORTS = [
    "pytest",
    "hypothesis",
    "beartype",
    "jaxtyping",
    "numpy",
    "pydantic",
    "rich.console",
    "torch",
    "typer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.gpt_neox.modeling_gpt_neox",
]

# A mutation that crashes only shows that its line is executed, not that its result is checked.
CRASH = re.compile(r"^FAILED .* - (NameError|AttributeError|ImportError|ModuleNotFoundError)", re.MULTILINE)


class StaleMutationError(Exception):
    """A mutation's text is no longer in the source."""


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


def copy_source(folder: Path) -> Path:
    """Copy the package, and what Python has compiled of it, into the folder; return the folder."""
    shutil.copytree(SOURCE, folder / "kedge")
    return folder


def mutate(mutation: Mutation, copy: Path) -> None:
    """Apply a mutation to a copy of the source.

    Raises:
        StaleMutationError: The original text does not occur exactly once.
    """
    path = copy / "kedge" / mutation.file
    source = path.read_text(encoding="utf-8")
    if (count := source.count(mutation.original)) != 1:
        raise StaleMutationError(
            f"{mutation.name}: {mutation.file} holds {mutation.original!r} {count} times, not once"
        )
    mutated = source.replace(mutation.original, mutation.mutated)
    compile(mutated, str(path), "exec")
    path.write_text(mutated, encoding="utf-8")


def run_tests(tests: Sequence[str], copy: Path) -> Trial:
    """Run tests on a copy of the source, in a separate process."""
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload(SLOW_IMPORTS)
    log, start = copy / "pytest.log", time.monotonic()
    log.touch()
    process = context.Process(target=_run_pytest, args=(tests, copy, log))
    process.start()
    process.join(TIMEOUT)
    if process.is_alive():
        process.kill()
        process.join()
    exit_code = process.exitcode
    process.close()
    assert exit_code is not None, "the process was joined"
    return Trial(exit_code, log.read_text(encoding="utf-8", errors="replace"), time.monotonic() - start)


def _run_pytest(tests: Sequence[str], copy: Path, log: Path) -> None:
    """Run pytest in the trial's process."""
    descriptor = os.open(log, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(ROOT)
    # Before the path of an editable installation; `COLUMNS`, so that the summary includes the exceptions.
    sys.path.insert(0, str(copy))
    sys.dont_write_bytecode = True
    os.environ.update(
        PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1", COLUMNS="1000", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"
    )
    # The fork server is one for all tests of a process: another test may have made it import the package first.
    for name in [name for name in sys.modules if name.partition(".")[0] in ("kedge", "tests", "bench")]:
        del sys.modules[name]
    gc.freeze()  # pytest collects garbage several times, and what was imported before the fork is none

    import pytest

    import kedge

    assert Path(kedge.__file__).is_relative_to(copy), f"the trial would test {kedge.__file__}"
    options = ["--exitfirst", "--tb=short", "--quiet", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # pytest would warn that hypothesis, a pytest plugin, is already imported.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    sys.exit(pytest.main([*options, f"--basetemp={copy / 'basetemp'}", *tests]))


def try_mutation(mutation: Mutation, folder: Path) -> Trial:
    """Apply a mutation to a new copy in the folder, and run the test that should catch it."""
    copy = copy_source(folder)
    mutate(mutation, copy)
    return run_tests([mutation.test], copy)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the named mutations, or all of them; returns 1 if any survives."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations", description="Check that a test catches each mutation."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutations to try; default: all")
    parser.add_argument("--list", action="store_true", help="list the mutations without trying them")
    options = parser.parse_args(arguments)
    known = {mutation.name: mutation for mutation in MUTATIONS}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; --list shows all mutations")
    chosen = [known[name] for name in options.names] or list(MUTATIONS)
    if options.list:
        for mutation in chosen:
            print(f"{mutation.name}  ({mutation.file})\n  - {mutation.original}\n  + {mutation.mutated}")
        return 0
    with tempfile.TemporaryDirectory(prefix="kedge-mutations-") as folder:
        return _try_all(chosen, Path(folder))


def _try_all(chosen: Sequence[Mutation], folder: Path) -> int:
    tests = sorted({mutation.test for mutation in chosen})
    baseline = run_tests(tests, copy_source(folder / "unmutated"))
    if baseline.exit_code != 0:
        print(f"{baseline.output}\nThe tests must pass on the unmodified source.")
        return 1
    print(f"{len(tests)} tests pass on the unmodified source, {baseline.seconds:.1f} s")
    survivors = 0
    for mutation in chosen:
        trial = try_mutation(mutation, folder / mutation.name)
        survivors += not trial.killed
        print(f"{trial.verdict:8}  {mutation.name:42} {trial.seconds:5.1f} s  {mutation.test}", flush=True)
        if trial.verdict == "BROKEN":
            print(trial.output)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutations killed")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())

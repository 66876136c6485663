"""Mutation testing: introduce a mistake into kedge and check that a test fails (spec §12.7).

    python -m tests.mutations [NAME …] [--list]

Each mutation of the table is applied to a copy of `src` in a temporary folder, and the test that should catch it
runs on that copy (`tests.trial`). First, all these tests must pass without a mutation. A table entry whose text is not
in the source is an error, not a caught mistake.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.code_swap import changed_functions
from tests.mutation import SOURCE, Mutation, find
from tests.mutation_table import MUTATIONS
from tests.trial import Trial, copy_source, run_tests


def mutate(mutation: Mutation, copy: Path) -> None:
    """Apply a mutation to a copy of the source.

    Raises:
        StaleMutationError: The original text does not occur exactly once.
    """
    file, mutated = find(mutation).file, _mutated(mutation)
    path = copy / file
    compile(mutated, str(path), "exec")
    assert not path.is_symlink(), "the working tree is never touched"
    path.write_text(mutated, encoding="utf-8")


def _mutated(mutation: Mutation) -> str:
    file, start = find(mutation)
    source = (SOURCE / file).read_text(encoding="utf-8")
    return source[:start] + mutation.mutated + source[start + len(mutation.original) :]


def try_mutation(mutation: Mutation, folder: Path) -> Trial:
    """Apply a mutation to a new copy in the folder, and run the test that should catch it."""
    file = find(mutation).file
    copy = copy_source(folder, file)
    mutate(mutation, copy)
    return run_tests([mutation.test], copy, file)


def try_without(mutations: Sequence[Mutation], folder: Path) -> Trial:
    """Run the tests of mutations without one, as they run with it; returns a run that failed, if one did."""
    afresh = sorted({mutation.test for mutation in mutations if not _is_in_functions(mutation)})
    copy = copy_source(folder / "unmutated")
    first = run_tests(sorted({mutation.test for mutation in mutations}), copy)
    return run_tests(afresh, copy, afresh=True) if afresh and first.exit_code == 0 else first


def _is_in_functions(mutation: Mutation) -> bool:
    file = find(mutation).file
    versions = ((SOURCE / file).read_text(encoding="utf-8"), _mutated(mutation))
    return changed_functions(*(compile(version, file, "exec") for version in versions)) is not None


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
            place = f"{find(mutation).file}, {mutation.where}"
            print(f"{mutation.name}  ({place})\n  - {mutation.original}\n  + {mutation.mutated}")
        return 0
    with tempfile.TemporaryDirectory(prefix="kedge-mutations-") as folder:
        return _try_all(chosen, Path(folder))


def _try_all(chosen: Sequence[Mutation], folder: Path) -> int:
    baseline = try_without(chosen, folder)
    if baseline.exit_code != 0:
        print(f"{baseline.output}\nThe tests must pass on the unmodified source.")
        return 1
    print(f"{len({mutation.test for mutation in chosen})} tests pass on the unmodified source")
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

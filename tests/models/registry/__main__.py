"""`python -m tests.models.registry [ARCHITECTURE …]`: tries architectures, and writes the table and its page.

Without names all of them, which takes some minutes. An architecture with a fault has no entry; the exit code is 1.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict

import transformers

from handbook.__main__ import write_pages
from tests.models.registry.outcome import Fault, read_table, write_table
from tests.models.registry.trials import ARCHITECTURES, outcome


def main(names: list[str]) -> int:
    """Try the architectures and commit their outcomes; return the number of faults."""
    table, faults = read_table(), 0
    for kind, architectures in ARCHITECTURES.items():
        known = {name: table[kind][name] for name in architectures if name in table[kind]}
        for name in names or architectures:
            if name not in architectures:
                continue
            start = time.perf_counter()
            try:
                known[name] = asdict(outcome(kind, name))
            except Fault as fault:
                known.pop(name, None)
                faults += 1
                print(f"FAULT {kind} {name}: {fault}", flush=True)
            else:
                print(f"{kind} {name}: {known[name]} ({time.perf_counter() - start:.1f} s)", flush=True)
        table[kind] = known
    write_table(transformers.__version__, table)
    write_pages()
    return faults


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))

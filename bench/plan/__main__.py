"""`python -m bench.plan`: predicted and measured memory and time of short runs, each in a separate process.

The results are in bench/results/plan.json; runs that are there already are not repeated. `--page` writes the table in
RESULTS.md, here, from them, `--pictures` draws the pictures in docs/pictures. `--sizes` writes the table of model sizes
and cards in docs/memory.md, which needs no measurements.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.plan.cases import CASES, Case
from bench.plan.page import summary, with_table
from bench.plan.pictures import draw_pictures
from bench.plan.sizes import with_sizes

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "bench" / "results" / "plan.json"
PAGE = ROOT / "bench" / "plan" / "RESULTS.md"
MEMORY = ROOT / "docs" / "memory.md"
PICTURES = ROOT / "docs" / "pictures"
HOW = ("live", "process")
STEP = 3
"""Every how many-th run is timed."""


def main() -> None:
    """Measure what is missing, and print medians and worst cases."""
    parser = argparse.ArgumentParser(prog="python -m bench.plan", description=__doc__)
    parser.add_argument("how", nargs="*", help=f"what to measure: {' or '.join(HOW)}; by default both")
    for name in ("--page", "--pictures", "--sizes"):
        parser.add_argument(name, action="store_true")
    options = parser.parse_args()
    if unknown := set(options.how) - {*HOW}:
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(HOW)}")
    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    if not (options.page or options.pictures or options.sizes):
        for how in options.how or HOW:
            for case in CASES[:: STEP if how != "live" else 1]:
                if (case.stage == "ppo" or how == "live") and how not in results.get(case.name, {}):
                    results.setdefault(case.name, {})[how] = measure(case, how)
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    if options.pictures:
        draw_pictures(results, PICTURES)
        return
    if options.sizes:
        MEMORY.write_text(with_sizes(MEMORY.read_text(encoding="utf-8")), encoding="utf-8")
        return
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    print(summary(results))


def measure(case: Case, how: str) -> dict[str, Any]:
    """Run one case; what the process printed."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.plan.child", json.dumps(asdict(case)), how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{case.name}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    print(case.name, how, json.dumps({name: found[name] for name in sorted(found) if "times" not in name}), flush=True)
    return found


if __name__ == "__main__":
    main()

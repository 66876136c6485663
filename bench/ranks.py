"""Several ranks, measured: `python -m bench.ranks` prints the table of bench/RESULTS.md (ten minutes on two cores).

Seconds per update of PPO on a policy that keeps a core busy, one thread per rank: one rank, two ranks with the same
batch, two ranks with twice the prompts, and two ranks with sharded weights. Rounds of all of them alternate.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bench.ahead import BUSY, save_letters

ROUNDS = 3
UPDATES = 5
UNTIMED = 2
PROMPTS = 32
CASES: Mapping[str, tuple[int, int, str]] = {
    "1 rank": (1, PROMPTS, "replicate"),
    "2 ranks, the same batch": (2, PROMPTS, "replicate"),
    "2 ranks, twice the prompts": (2, 2 * PROMPTS, "replicate"),
    "2 ranks, sharded, the same batch": (2, PROMPTS, "shard"),
}
REWARD = """
def vowels(completions, **_):
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]
"""


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        save_letters(place / "model", **BUSY)
        (place / "reward.py").write_text(REWARD, encoding="utf-8")
        rows = "".join(json.dumps({"prompt": "abcdefgh"[: 1 + number % 8]}) + "\n" for number in range(2 * PROMPTS))
        (place / "prompts.jsonl").write_text(rows, encoding="utf-8")
        seconds: dict[str, list[float]] = {case: [] for case in CASES}
        shares: dict[str, list[float]] = {case: [] for case in CASES}
        for number in range(ROUNDS):
            for case, (count, num_prompts, parallel) in CASES.items():
                out = place / f"{count}-{num_prompts}-{parallel}-{number}"
                figures, share = measure(place, out, count, num_prompts, parallel)
                seconds[case] += figures
                shares[case].append(share)
    alone = statistics.median(seconds["1 rank"])
    print("| | seconds per update, median | least to most | responses per second, relative to 1 rank | waiting |")
    print("|---|---|---|---|---|")
    for case, figures in seconds.items():
        median = statistics.median(figures)
        work = CASES[case][1] / PROMPTS
        cells = [f"{median:.2f}", f"{min(figures):.2f}–{max(figures):.2f}", f"{work * alone / median:.2f}"]
        print(f"| {case} | {' | '.join(cells)} | {statistics.median(shares[case]):.0%} |")


def measure(place: Path, out: Path, count: int, num_prompts: int, parallel: str) -> tuple[list[float], float]:
    """The seconds of a run's updates, without the first ones, and the share of all that the first rank waits."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)] if count > 1 else []
    settings = [f"num_prompts={num_prompts}", f"num_updates={UPDATES}", f"parallel={parallel}", "max_new_tokens=64"]
    waited = out.with_suffix(".waited")
    command = [sys.executable, *launch, "-m", "bench.timed_ranks", str(waited), "ppo", "--model", f"{place}/model"]
    given = ["--prompts", f"{place}/prompts.jsonl", "--reward", f"{place}/reward.py:vowels", "--out", str(out)]
    subprocess.run(
        [*command, *given, *settings, "precision=fp32", "device=cpu", "missing_eos_score=null", "report=false"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    seconds = [row["time/update"] for row in rows]
    return seconds[UNTIMED:], float(waited.read_text(encoding="utf-8")) / sum(seconds)


if __name__ == "__main__":
    main()

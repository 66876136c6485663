"""`python -m bench.sampling MODEL --peer PYTHON --vllm PYTHON`: `kedge generate` beside transformers and vLLM on a CPU.

Batches of 64 responses to the same prompts, at temperature 1, of at most 64 tokens, in one precision. Each run is a
process of its own, alone on the machine, and the systems take turns. Seconds of a batch are measured from outside; the
first batch is not counted. The record is `bench/results/sampling.json`; `python -m bench --page` writes its table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.machine import available_cores, describe_machine, describe_versions
from bench.peers import QUESTION, Result, documentation, measure, model_folder
from bench.processes import BenchError
from bench.tables import Table, with_spread

HERE = Path(__file__).parent
WORK = HERE / ".work" / "sampling"
RECORD = HERE / "results" / "sampling.json"
BATCH = 64
MAX_NEW_TOKENS = 64
BATCHES = 3
SYSTEMS = {"transformers": "generate", "transformers, continuous batching": "continuous", "vLLM": "vllm"}
OURS = "kedge"

INTRODUCTION = """\
### Sampling

`make bench-sampling`: `kedge generate` of the same model beside `generate` and `generate_batch` of transformers and
vLLM's build for CPUs, all in {precision}: batches of 64 responses of at most 64 tokens at temperature 1. Of kedge's
130 ms for a step of 64 rows, matrix products take 60, the attention 33, and the draw and about 1,300 small operations
the rest.
"""


@dataclass(frozen=True)
class Sampled:
    """One run: seconds of a batch, the median; tokens of a batch, the mean; peak memory, GiB."""

    seconds: float
    tokens: float
    memory: float


def compare(options: argparse.Namespace) -> dict[str, list[Sampled]]:
    """The runs of each system."""
    folder = WORK.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.jsonl"
    names = itertools.islice(itertools.cycle(sorted(documentation())), BATCHES * BATCH)
    rows = [{"prompt": [{"role": "user", "content": QUESTION.format(name)}]} for name in names]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    out = folder / "run"
    config = {
        "model": options.model,
        "out": str(out),
        "data": {"prompts": str(prompts)},
        "generate": {"batch_size": BATCH, "temperature": 1.0},
        "rollout": {"max_new_tokens": MAX_NEW_TOKENS},
        "runtime": {"precision": options.precision, "report": False},
    }
    (folder / "generate.json").write_text(json.dumps(config), encoding="utf-8")
    pythons = {"generate": options.peer, "continuous": options.peer, "vllm": options.vllm}
    commands = {OURS: [sys.executable, "-m", "kedge", "generate", "--config", str(folder / "generate.json")]}
    for system, how in SYSTEMS.items():
        if pythons[how] is not None:
            script = [
                str(pythons[how]),
                "-I",
                str(HERE / "peer_sampling.py"),
                how,
                options.model,
                str(prompts),
                str(out),
            ]
            sizes = [f"--batch={BATCH}", f"--max-new-tokens={MAX_NEW_TOKENS}", f"--precision={options.precision}"]
            commands[system] = [*script, *sizes]
    found: dict[str, list[Sampled]] = {system: [] for system in commands}
    for number in range(options.rounds):
        for system, command in commands.items():
            log = folder / "log.txt"
            result = measure(command, out / "progress.jsonl", log, threads=options.threads, num_steps=BATCHES + 1)
            sampled = _sampled(result, out, log.read_text(encoding="utf-8", errors="replace"))
            found[system].append(sampled)
            print(f"round {number + 1}, {system}: {sampled.seconds:.2f} s, {sampled.memory:.2f} GiB", flush=True)
    shutil.rmtree(out, ignore_errors=True)
    return found


def _sampled(result: Result, out: Path, printed: str) -> Sampled:
    summary = out / "summary.json"
    if summary.is_file():
        tokens = BATCH * float(json.loads(summary.read_bytes())["length"])
    else:
        tokens = fmean(map(int, re.findall(r"^(\d+) tokens$", printed, re.MULTILINE)))
    return Sampled(result.seconds, tokens, result.memory)


def sampling_table(found: dict[str, list[Sampled]]) -> Table:
    """Tokens a second and memory of each system, and how much faster kedge is, round by round."""
    rows = []
    for system, runs in found.items():
        rates = [run.tokens / run.seconds for run in runs]
        own = [run.tokens / run.seconds for run in found[OURS]]
        faster = [ours / theirs for ours, theirs in zip(own, rates, strict=True)]
        cells = [f"{fmean(rates):.0f}", "–" if system == OURS else with_spread(faster, "×")]
        rows.append([system, *cells, f"{fmean(run.memory for run in runs):.1f}"])
    return Table("Sampling", ["system", "tokens/s", "kedge is faster by", "peak GiB"], rows)


def sampling_section(record: dict[str, Any]) -> str:
    """The section of the page, in Markdown, from a record."""
    found = {system: [Sampled(**run) for run in runs] for system, runs in record["results"].items()}
    facts = {**record["machine"], "rounds": len(found[OURS]), **record["versions"]}
    listed = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    return f"{INTRODUCTION.format(precision=record['precision'])}\n{sampling_table(found).markdown()}\n\n{listed}\n"


def main() -> int:
    """Run the command line; returns 2 after an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an instruction model with a chat template")
    parser.add_argument("--peer", type=Path, help="Python of an environment with TRL 1.16")
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vLLM")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="of all; bf16 where the machine has it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=available_cores())
    options = parser.parse_args()
    machine = describe_machine(options.threads)
    if options.precision is None:
        options.precision = "fp32" if machine["bf16 in hardware"] == "no" else "bf16"
    try:
        options.model = model_folder(options.model)
        found = compare(options)
        versions = {} if options.peer is None else describe_versions(options.peer)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    results = {system: [asdict(run) for run in runs] for system, runs in found.items()}
    record = {"machine": machine, "versions": versions, "precision": options.precision, "results": results}
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\n{sampling_section(record)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

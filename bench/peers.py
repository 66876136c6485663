"""`python -m bench.peers MODEL --peer PYTHON`: kedge beside TRL 1.16 on an instruction model.

Each run is a process of its own, alone on the machine, and the systems take turns, so every ratio compares two runs
close in time. Both get the same folder, rows, lengths, precision and threads. The learning rate is almost 0: a policy
that learns changes its lengths, differently in each system. Seconds of a step are measured from outside, between rows
of metrics on disk; the first step is not counted. The record is `bench/results/peers.json`; `python -m bench --page`
writes its table into `docs/benchmarks.md`.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import random
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bench.figures import spread
from bench.machine import available_cores, describe_machine, describe_versions
from bench.processes import BenchError, run_alone
from bench.tables import Table, with_spread

HERE = Path(__file__).parent
WORK = HERE / ".work" / "peers"
RECORD = HERE / "results" / "peers.json"
LEARNING_RATE = "1e-9"
NUM_PROMPTS, NUM_RESPONSES, MAX_NEW_TOKENS, BATCH = 4, 8, 64, 8
"""An update of GRPO and RLOO: responses to each prompt, and their longest; rows of a step of the other stages."""

MODULES = ("argparse", "asyncio", "bdb", "collections", "csv", "datetime", "decimal", "difflib", "enum", "functools")
MODULES += (
    "inspect",
    "io",
    "json",
    "logging",
    "os",
    "pathlib",
    "pickle",
    "random",
    "re",
    "shutil",
    "socket",
    "sqlite3",
)
MODULES += ("statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "typing", "unittest")
"""Modules with enough long docstrings."""

INTRODUCTION = """\
## An instruction model

`make bench-peers`: SmolLM2-135M-Instruct in {precision}, with TRL 1.16, which has GRPO, RLOO, fine-tuning and reward
models, but no PPO. An update of GRPO and RLOO is 4 prompts, 8 responses to each and at most 64 tokens, with a
reference model and one pass over all responses; a step of the others is 8 rows of about 200 tokens, or pairs of them.
The first step is not counted. Packing is not enabled in either; kedge never computes padding. With *checkpointing*,
TRL's default and an option of kedge (`runtime.activation_checkpointing`), both compute activations again instead of
keeping them.

Four times TRL's speed in GRPO and fine-tuning at .4 of its memory was the aim. The processor counts: on an AMD EPYC,
which has AVX-512-BF16 and no AMX, an earlier version took 17.9 s for an update of GRPO, half of TRL's time, 7.4 s for a
step of fine-tuning (1.5 times TRL's speed) and 10.7 s for one of the reward model (1.7 times). There, a third of the
update was sampling, and the passes ran at two thirds of the rate that products of these shapes reached. Of the memory
of GRPO 2.3 GiB are weights, gradients, Adam's averages and the reference, 2.8 activations, .6 Python and its libraries,
and the rest is freed and kept for the next pass.
"""

QUESTION = "Write the documentation of {} in Python."
REWARD = """
def words(completions, **columns):
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [len(text.split()) / 50 for text in texts]
"""


@dataclass(frozen=True)
class Result:
    """One run: seconds of a step, the median; peak memory, GiB."""

    seconds: float
    memory: float


@dataclass(frozen=True)
class Task:
    """One thing that both systems do, with the command of each."""

    title: str
    kedge: Sequence[str]
    trl: str
    checkpointing: bool = False
    """Both compute activations again instead of keeping them, which is TRL's default and not kedge's."""


def model_folder(model: str) -> str:
    """The folder of a model, found in another process: the one that measures loads no torch.

    Raises:
        BenchError: There is no such model.
    """
    find = "import sys, kedge.models as models; print(models.find_model(sys.argv[1]))"
    found = subprocess.run([sys.executable, "-c", find, model], capture_output=True, text=True, check=False)
    if found.returncode:
        raise BenchError(found.stderr.strip().rpartition("\n")[2])
    return found.stdout.strip().rpartition("\n")[2]


def tasks(model: str, precision: str) -> list[Task]:
    """GRPO, RLOO, fine-tuning and reward model."""
    precise = [f"runtime.precision={precision}", "checkpoint.every=null"]
    sampled = ["--prompts", "prompts.jsonl", "--reward", "reward.py:words", f"num_prompts={NUM_PROMPTS}"]
    sampled += [f"num_responses={NUM_RESPONSES}", f"max_new_tokens={MAX_NEW_TOKENS}", "num_minibatches=1"]
    sampled += [f"ppo.learning_rate={LEARNING_RATE}", "missing_eos_score=null", "num_fixed_prompts=0", *precise]
    rows = [f"batch_size={BATCH}", f"learning_rate={LEARNING_RATE}", "eval_fraction=0", *precise]
    kept = [
        Task("GRPO", ["ppo", "--model", model, "--preset", "grpo", *sampled], "grpo"),
        Task("RLOO", ["ppo", "--model", model, "--preset", "rloo", *sampled], "rloo"),
        Task("SFT", ["sft", "--model", model, "--data", "demonstrations.jsonl", *rows], "sft"),
        Task("reward model", ["reward", "--model", model, "--data", "comparisons.jsonl", *rows], "reward"),
    ]
    again = "runtime.activation_checkpointing=true"
    return kept + [
        Task(f"{task.title}, checkpointing", [*task.kedge, again], task.trl, checkpointing=True) for task in kept
    ]


def write_rows(folder: Path, *, num_steps: int) -> None:
    """Write prompts, demonstrations and comparisons: the documentation of Python's own library, split into answers."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = sorted(documentation().items())
    random.Random(0).shuffle(texts)
    count = BATCH * (num_steps + 1)
    if len(texts) < 2 * count:
        raise BenchError(f"{len(texts)} texts are too few for {num_steps} steps")

    def write(name: str, rows: Sequence[dict[str, object]]) -> None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def asked(name: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": QUESTION.format(name)}]

    def answer(text: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": text}]

    write("prompts.jsonl", [{"prompt": asked(name)} for name, _ in texts[: NUM_PROMPTS * (num_steps + 1)]])
    write("demonstrations.jsonl", [{"prompt": asked(name), "completion": answer(text)} for name, text in texts[:count]])
    pairs = zip(texts[:count], texts[count : 2 * count], strict=True)
    write(
        "comparisons.jsonl",
        [
            {"prompt": asked(name), "chosen": answer(text), "rejected": answer(other)}
            for (name, text), (_, other) in pairs
        ],
    )
    (folder / "reward.py").write_text(textwrap.dedent(REWARD), encoding="utf-8")


def documentation() -> dict[str, str]:
    """Docstrings of 400 to 1,600 characters in Python's own library, by what they document."""
    found: dict[str, str] = {}
    for module in map(importlib.import_module, MODULES):
        members = inspect.getmembers(module, lambda value: inspect.isclass(value) or inspect.isroutine(value))
        for owner, member in members:
            inside = inspect.getmembers(member, inspect.isroutine) if inspect.isclass(member) else []
            for name, each in [(owner, member), *((f"{owner}.{name}", each) for name, each in inside)]:
                text = inspect.getdoc(each) or ""
                if 400 <= len(text) <= 1600:
                    found.setdefault(text, f"{module.__name__}.{name}")
    return {name: text for text, name in found.items()}


def measure(command: Sequence[str], rows: Path, log: Path, *, threads: int, num_steps: int) -> Result:
    """Run a command alone; the seconds between its rows, without those before the second row.

    Raises:
        BenchError: It failed, or wrote another number of rows.
    """
    shutil.rmtree(rows.parent, ignore_errors=True)
    finished = run_alone(command, log=log, rows=rows, num_threads=threads)
    ends = finished.arrivals[:num_steps]
    if len(ends) < num_steps:
        raise BenchError(f"{' '.join(command)}: {len(ends)} steps instead of {num_steps}")
    return Result(median(end - start for start, end in pairwise(ends)), finished.peak_memory)


def compare(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, dict[str, list[Result]]]:
    """The results of each task by system."""
    folder = WORK.resolve()
    write_rows(folder, num_steps=options.steps)
    out = folder / "run"
    found: dict[str, dict[str, list[Result]]] = {}
    for task in tasks(options.model, options.precision):
        if options.only and task.title not in options.only:
            continue
        settings = [f"num_updates={options.steps}"] if task.kedge[0] == "ppo" else []
        paths = [str(folder / part) if part.split(":")[0] in FILES else part for part in task.kedge]
        ours = [sys.executable, "-m", "kedge", *paths, "--out", str(out), *settings]
        theirs = [
            str(options.peer),
            "-I",
            str(HERE / "peer_trainers.py"),
            task.trl,
            options.model,
            str(folder),
            str(out),
        ]
        theirs += [f"--{name}={value}" for name, value in sizes(options).items()]
        theirs += ["--checkpointing"] if task.checkpointing else []
        for number in range(options.rounds):
            for system, command in (("kedge", ours), ("TRL", theirs)):
                result = measure(
                    command,
                    out / "metrics.jsonl",
                    folder / f"{system}.log",
                    threads=options.threads,
                    num_steps=options.steps,
                )
                found.setdefault(task.title, {}).setdefault(system, []).append(result)
                say(f"{task.title}, round {number + 1}, {system}: {result.seconds:.2f} s, {result.memory:.2f} GiB")
    shutil.rmtree(out, ignore_errors=True)
    return found


FILES = ("prompts.jsonl", "demonstrations.jsonl", "comparisons.jsonl", "reward.py")


def sizes(options: argparse.Namespace) -> dict[str, object]:
    """What TRL's side has to know."""
    return {
        "steps": options.steps,
        "precision": options.precision,
        "responses": NUM_RESPONSES,
        "batch": NUM_PROMPTS * NUM_RESPONSES,
        "max-new-tokens": MAX_NEW_TOKENS,
        "rows": BATCH,
        "learning-rate": LEARNING_RATE,
    }


def peers_table(found: dict[str, dict[str, list[Result]]]) -> Table:
    """Seconds and memory of both systems, and their ratios round by round."""
    rows = []
    for title, systems in found.items():
        ours, theirs = systems["kedge"], systems["TRL"]
        faster = [other.seconds / own.seconds for own, other in zip(ours, theirs, strict=True)]
        smaller = [own.memory / other.memory for own, other in zip(ours, theirs, strict=True)]
        middle = [f"{spread([getattr(run, name) for run in runs])[0]:.1f}" for name in ("seconds", "memory")
                  for runs in (ours, theirs)]  # fmt: skip
        rows.append([title, *middle[:2], with_spread(faster, "×"), *middle[2:], with_spread(smaller, "")])
    header = ["a step of", "kedge s", "TRL s", "times faster", "kedge GiB", "TRL GiB", "share of its memory"]
    return Table("An instruction model", header, rows)


def peers_section(record: dict[str, Any]) -> str:
    """The section of the page, in Markdown, from a record."""
    found = {
        title: {name: [Result(**run) for run in runs] for name, runs in systems.items()}
        for title, systems in record["results"].items()
    }
    rounds = len(next(iter(found.values()))["TRL"])
    facts = {**record["machine"], "rounds": rounds, "steps of each": record["steps"], **record["versions"]}
    listed = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    text = INTRODUCTION.format(precision=record["precision"])
    return f"{text}\n{peers_table(found).markdown()}\n\n{listed}\n"


def main() -> int:
    """Run the command line; returns 2 after an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an instruction model with a chat template")
    parser.add_argument("--peer", type=Path, required=True, help="Python of an environment with TRL 1.16")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="of both; bf16 where the machine has it")
    parser.add_argument("--only", nargs="*", help="tasks; those of the record that are not named stay")
    for name, default in (("rounds", 3), ("steps", 4), ("threads", available_cores())):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if options.precision is None:
        native = describe_machine(options.threads)["bf16 in hardware"] != "no"
        options.precision = "bf16" if native else "fp32"
    facts = {
        "machine": describe_machine(options.threads),
        "versions": describe_versions(options.peer),
        "precision": options.precision,
        "steps": options.steps,
    }
    try:
        kept = kept_results(facts) if options.only else {}
        options.model = model_folder(options.model)
        found = compare(options, print)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    results = {
        title: {name: [asdict(run) for run in runs] for name, runs in systems.items()}
        for title, systems in found.items()
    }
    record = {**facts, "results": kept | results}
    print(f"\n{peers_section(record)}")
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def kept_results(facts: dict[str, Any]) -> dict[str, Any]:
    """The results of the record, to which others with the same facts may be added.

    Raises:
        BenchError: The record has other facts.
    """
    if not RECORD.exists():
        return {}
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    for name, value in facts.items():
        if record[name] != value:
            raise BenchError(f"{RECORD.name} has another {name}: {record[name]}; measure all tasks")
    return record["results"]


if __name__ == "__main__":
    sys.exit(main())

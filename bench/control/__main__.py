"""`python -m bench.control speed|learn|oracle|page`: runs what is not recorded yet, and prints the tables.

- speed: environment steps per CPU second; the systems take turns, every round one run of each.
- learn: CartPole until a return is reached; MuJoCo's tasks with a budget of steps.
- oracle: one step of TRPO beside sb3-contrib's, from the same weights on the same rollout.
- page: writes its `RESULTS.md` from what is recorded, here, by `bench.table1` and by `bench.details`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from bench.control.jobs import Job, Peers, read_outcomes, run_jobs
from bench.control.oracle import Compared, compare, oracle_table
from bench.control.page import CHOSEN_ON, LEVELS, page
from bench.control.recipes import RECIPES, AtariRecipe, TrpoRecipe
from bench.control.tables import learning_table, machine_line, speed_table
from bench.details import RECORD as DETAILS_RECORD
from bench.processes import BenchError
from bench.table1 import RECORD as TABLE_RECORD

HERE = Path(__file__).parents[1]
RECORD = HERE / "results" / "control.jsonl"
WORK = HERE / ".work" / "control"
STEPS = HERE / "results" / "control-trpo.json"
PAGE = HERE / "control" / "RESULTS.md"

CARTPOLE_STEPS = 80_000
SPEED_UPDATES = 8
"""Updates of a run for speed; the first quarter is not counted."""

VARIANT_FACTOR = 4
"""Factor on the updates of kedge's variants: the uncounted part must cover the seconds of compilation."""


def main() -> int:
    """Run the command line; returns 2 after an error."""
    options = arguments()
    try:
        if options.what == "oracle":
            steps = list(compared(options))
            STEPS.write_text(json.dumps([asdict(each) for each in steps], indent=1) + "\n", encoding="utf-8")
            print(oracle_table(steps))
        elif options.what == "page":
            publish(options.record)
        else:
            jobs = list(speed_jobs(options) if options.what == "speed" else learning_jobs(options))
            peers = Peers(options.peer, options.cleanrl)
            run_jobs(jobs, record=options.record, work=WORK, peers=peers, processes=options.processes)
            found = list(read_outcomes(options.record).values())
            learned = learning_table(found, levels=LEVELS, chosen_on=CHOSEN_ON)
            print(f"\n{speed_table(found)}\n{learned}\n{machine_line(found)}")
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted; the same command resumes", file=sys.stderr)
        return 130
    return 0


def publish(record: Path) -> None:
    """Write the page.

    Raises:
        BenchError: Nothing is recorded.
    """
    found, variants, details = (list(read_outcomes(each).values()) for each in (record, TABLE_RECORD, DETAILS_RECORD))
    if not found or not STEPS.is_file():
        raise BenchError("nothing is recorded yet: run `speed`, `learn` and `oracle` first")
    steps = [Compared(**each) for each in json.loads(STEPS.read_text(encoding="utf-8"))]
    PAGE.write_text(page(found, steps, [each for each in variants if each.kind == "table"], details), encoding="utf-8")


def speed_jobs(options: argparse.Namespace) -> Iterator[tuple[str, Job]]:
    """Round by round, each system in turn, so that a slow minute does not fall on one of them."""
    systems = [("alone", "", {}), ("kedge", "", {})]
    if options.variant:
        systems.append(("kedge", options.variant, settings_of(options)))
    systems += [(name, "", {}) for name in chosen_peers(options)]
    for repeat in range(options.rounds):
        for env in options.envs or ["HalfCheetah-v5"]:
            recipe = RECIPES[env]
            for system, name, settings in systems:
                if system in ("alone", "cleanrl") and isinstance(recipe, AtariRecipe):
                    continue  # a step is four frames, scaled and stacked by each system; CleanRL has another script
                steps = SPEED_UPDATES * recipe.steps_per_update * (VARIANT_FACTOR if name else 1)
                yield name, Job("speed", system, recipe, 1, steps, settings=settings, repeat=repeat)


def learning_jobs(options: argparse.Namespace) -> Iterator[tuple[str, Job]]:
    """Seed by seed, each system in turn."""
    for seed in range(options.first_seed, options.seeds + 1):
        for env in options.envs or ["CartPole-v1"]:
            is_short = env == "CartPole-v1"
            steps = options.steps or (CARTPOLE_STEPS if is_short else 1_000_000)
            recipe = TrpoRecipe(env) if options.trpo else RECIPES[env]
            for system in ("kedge", *chosen_peers(options)):
                settings = settings_of(options) if system == "kedge" else {}
                stop_at = LEVELS[env][0] if is_short else None
                name = "TRPO" if options.trpo else options.variant if settings else ""
                yield name, Job("learn", system, recipe, seed, steps, stop_at=stop_at, settings=settings)


def compared(options: argparse.Namespace) -> Iterator[Compared]:
    """Steps of TRPO, of a policy of choices and of policies of one and of several numbers.

    Raises:
        BenchError: No peer was named.
    """
    if options.peer is None:
        raise BenchError("oracle needs --peer PYTHON, the interpreter of an environment with sb3-contrib")
    for env, iterations in (("CartPole-v1", 10), ("Pendulum-v1", 10), ("Hopper-v5", 10), ("Hopper-v5", 100)):
        yield compare(env, iterations=iterations, peer=options.peer, work=WORK)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of the variant of kedge, typed as YAML."""
    pairs = [each.partition("=") for each in options.set]
    return {name: yaml.safe_load(value) for name, _, value in pairs}


def chosen_peers(options: argparse.Namespace) -> list[str]:
    """The peers that were named on the command line."""
    return [name for name, place in (("sb3", options.peer), ("cleanrl", options.cleanrl)) if place is not None]


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.control", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("what", choices=["speed", "learn", "oracle", "page"])
    parser.add_argument("--peer", type=Path, help="python of an environment with stable-baselines3, tyro, tensorboard")
    parser.add_argument("--cleanrl", type=Path, help="folder with CleanRL's ppo.py and ppo_continuous_action.py")
    parser.add_argument("--envs", nargs="+", choices=sorted(RECIPES), metavar="ID", help="environments")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of `speed`")
    parser.add_argument("--seeds", type=int, default=10, help="the last seed of `learn`")
    parser.add_argument("--first-seed", type=int, default=1, help="the first seed of `learn`")
    parser.add_argument("--trpo", action="store_true", help="`learn` with TRPO, on actions that are numbers")
    parser.add_argument("--steps", type=int, help="steps of a run of `learn`")
    parser.add_argument("--variant", default="", help="name of a second kedge, which runs with --set")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="settings of the variant")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time; 1 for speeds that are compared")
    parser.add_argument("--record", type=Path, default=RECORD, help="the file of the runs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

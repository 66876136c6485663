"""`python -m bench.score MODEL --peer PYTHON`: time to a held-out score, kedge's GRPO and PPO beside TRL's GRPO.

Each run is a process of its own, alone on the machine, and the arms take turns. The clock starts with the command, so
it counts imports, loading and the first update, and it stands still while the policy is measured: every few updates it
is saved, and kedge samples two responses to each held-out prompt, for all arms in the same way. A run ends when the
mean score is reached, or after its last update.

All arms get the same model, prompts, reward function, number of responses and limit of tokens, and the same number of
tries: a tuned arm has one run with each rate of RATES and a seed of its own for each task, and keeps the rate that
reached the score in the fewest updates. TRL's other arm has TRL's defaults. Finished runs are lines of
bench/results/score.jsonl and are not repeated; a seed's runs are made on one machine, another seed's may be made on
another. `python -m bench --page` writes the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from bench.machine import available_cores, describe_machine, describe_versions
from bench.peers import model_folder
from bench.processes import GIB, BenchError, environment, run_alone
from bench.tables import Table
from kedge_base.intervals import Interval, mean_interval
from kedge_base.run_folder.record_format import read_json_lines
from kedge_tasks.verify import instruction_text

HERE: Final = Path(__file__).resolve().parent
BRIEF: Final = HERE.parent / "examples" / "brief"
WORK: Final = HERE / ".work" / "score"
RECORD: Final = HERE / "results" / "score.jsonl"
NUM_PROMPTS, NUM_RESPONSES = 4, 8
MEASURED = 2
"""Responses to each held-out prompt."""
EVERY = 2
"""Updates between two measurements."""
RATES: Final = (1e-5, 2e-5, 4e-5)
TUNING_SEED: Final = 100
SEEDS: Final = (0, 1, 2, 3, 4)
ASKED_FOR: Final = " Answer in one sentence of at most 15 words."
"""At the end of every question of examples/brief."""


@dataclass(frozen=True)
class Task:
    """A task: what its rows ask for besides a question, who scores, and the score that counts.

    Attributes:
        about: One line for the page.
        instruction: What every question asks for, in place of the example's; None leaves that.
        reward: The reward function.
        score: The held-out mean score, set beforehand.
        max_new_tokens: Of a response.
        num_updates: Most updates of a run.
    """

    about: str
    instruction: Mapping[str, Any] | None
    reward: str
    score: float
    max_new_tokens: int
    num_updates: int

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a file of examples/brief, as this task asks."""
        rows = read_json_lines(BRIEF / name)
        if self.instruction is None:
            return rows
        asks = instruction_text(**self.instruction)
        questions = [row["prompt"][0]["content"].removesuffix(ASKED_FOR) for row in rows]
        return [
            {"prompt": [{"role": "user", "content": f"{question} {asks}"}], "instructions": [self.instruction]}
            for question in questions
        ]


TASKS: Final[Mapping[str, Task]] = {
    "brief": Task(
        "one sentence of at most 15 words (`examples/brief`)",
        None,
        f"{BRIEF / 'reward.py'}:one_short_sentence",
        score=0.7,
        max_new_tokens=40,
        num_updates=30,
    ),
    "commas": Task(
        "an answer without commas",
        {"kind": "no_commas"},
        "kedge_tasks.verify:instructions",
        score=0.7,
        max_new_tokens=40,
        num_updates=30,
    ),
}
TEMPERATURE: Final = 0.8
"""Of all tuned arms and of all measurements: that of the preset small-instruct."""


@dataclass(frozen=True)
class Arm:
    """A system with its settings; `is_tuned` if its learning rate is chosen among RATES."""

    system: str
    settings: Mapping[str, Any]
    is_tuned: bool = True


ARMS: Final[Mapping[str, Arm]] = {
    "kedge, GRPO": Arm("kedge", {"preset": "grpo"}),
    "kedge, TRL's loss": Arm("kedge", {"preset": "grpo", "aggregation": "token", "kl_coef": 0.0}),
    "kedge, PPO": Arm("kedge", {"preset": "small-instruct"}),
    "TRL, GRPO": Arm("TRL", {"lr_scheduler_type": "constant", "gradient_checkpointing": False}),
    "TRL, GRPO with its defaults": Arm("TRL", {}, is_tuned=False),
}
FIRST: Final = next(iter(ARMS))
"""The arm that others are compared with."""


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        task: Name of its task.
        arm: Name of its arm.
        rate: Learning rate; None for the system's default.
        seed: Its seed.
        seconds: Until the score was reached; None if it was not.
        memory: Peak, GiB.
        curve: Update, seconds and score of each measurement.
        facts: Model, machine and versions.
    """

    task: str
    arm: str
    rate: float | None
    seed: int
    seconds: float | None
    memory: float
    curve: Sequence[tuple[int, float, float]]
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, float | None, int]:
        """What makes it another run."""
        return self.task, self.arm, self.rate, self.seed


def settings_of(task: Task, arm: Arm, rate: float | None, seed: int, num_updates: int) -> dict[str, Any]:
    """The settings of a run, as its system takes them."""
    if arm.system == "kedge":
        return {
            **arm.settings,
            "num_prompts": NUM_PROMPTS,
            "num_responses": NUM_RESPONSES,
            "max_new_tokens": task.max_new_tokens,
            "rollout.temperature": TEMPERATURE,
            "missing_eos_score": None,
            "num_updates": num_updates,
            "num_minibatches": 1,
            "ppo.learning_rate": rate,
            "ppo.schedule": "constant",
            "runtime.seed": seed,
            "runtime.report": False,
            "num_fixed_prompts": 0,
            "checkpoint.every": None,
        }
    return {
        **arm.settings,
        **({"learning_rate": rate, "temperature": TEMPERATURE} if arm.is_tuned else {}),
        "per_device_train_batch_size": NUM_PROMPTS * NUM_RESPONSES,
        "num_generations": NUM_RESPONSES,
        "max_completion_length": task.max_new_tokens,
        "max_steps": num_updates,
        "seed": seed,
        "use_cpu": True,
    }


class Bench:
    """Makes runs, and records them.

    Args:
        options: The command line.
        facts: Of all runs.
    """

    def __init__(self, options: argparse.Namespace, facts: Mapping[str, str]) -> None:
        self.options = options
        self.facts = facts
        self.runs = read_record(options.record)
        for run in self.runs:
            is_compared = run.task in options.tasks and run.seed in options.seeds
            if run.facts["model"] != facts["model"] or (is_compared and run.facts != facts):
                raise BenchError(
                    f"{options.record}: seed {run.seed} of {run.task} was run with {run.facts}, not {facts}; "
                    f"name other --seeds"
                )

    def run(self, task: str, arm: str, rate: float | None, seed: int) -> Run:
        """The run, from the record if it is there."""
        known = {run.key: run for run in self.runs}
        if (task, arm, rate, seed) in known:
            return known[task, arm, rate, seed]
        seconds, memory, curve = self._measured(TASKS[task], ARMS[arm], rate, seed)
        run = Run(task, arm, rate, seed, seconds, memory, curve, self.facts)
        self.runs.append(run)
        with self.options.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(run), ensure_ascii=False) + "\n")
        end = "not reached" if seconds is None else f"{seconds:.0f} s"
        scores = " ".join(f"{score:.2f}" for _, _, score in curve)
        print(f"{task}, {arm}, rate {rate}, seed {seed}: {end}, {memory:.1f} GiB, scores {scores}", flush=True)
        return run

    def rate(self, task: str, arm: str) -> float | None:
        """The learning rate of an arm: of those tried, the one with the fewest updates to the score, or the nearest."""
        if not ARMS[arm].is_tuned:
            return None
        rates = self.options.rates
        if len(rates) == 1:
            return rates[0]
        tried = [self.run(task, arm, rate, TUNING_SEED) for rate in rates]
        return best(tried).rate

    def _measured(
        self, task: Task, arm: Arm, rate: float | None, seed: int
    ) -> tuple[float | None, float, list[tuple[int, float, float]]]:
        """Seconds to the score, memory and curve of a run."""
        folder = WORK.resolve() / self.options.record.stem
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_rows(folder / "prompts.jsonl", task.rows("prompts.jsonl"))
        write_rows(folder / "held_out.jsonl", task.rows("held_out.jsonl") * MEASURED)
        num_updates = self.options.updates or task.num_updates
        spec = {
            "system": arm.system,
            "model": self.options.model,
            "prompts": str(folder / "prompts.jsonl"),
            "reward": task.reward,
            "folder": str(folder),
            "every": EVERY,
            "num_updates": num_updates,
            "settings": settings_of(task, arm, rate, seed, num_updates),
            "started": time.time(),
        }
        (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        python = [sys.executable] if arm.system == "kedge" else [str(self.options.peer), "-I"]
        command = [*python, str(HERE / "score_child.py"), str(folder / "spec.json")]
        curve: list[tuple[int, float, float]] = []
        with (folder / "log.txt").open("wb") as log:
            child = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment(self.options.threads)
            )
            try:
                while True:
                    ended, status, usage = os.wait4(child.pid, os.WNOHANG)
                    if ended:
                        child.returncode = os.waitstatus_to_exitcode(status)
                        break
                    if (asked := folder / "asked.json").is_file():
                        curve.append(self._answer(asked, task))
                    time.sleep(0.02)
            finally:
                if child.returncode is None:
                    child.kill()
                    child.wait()
        if child.returncode or not curve:
            last = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise BenchError(f"{arm.system}: exit code {child.returncode}, {' '.join(last) or 'no output'}")
        memory = usage.ru_maxrss * 1024 / GIB
        shutil.rmtree(folder)
        return curve[-1][1] if curve[-1][2] >= task.score else None, memory, curve

    def _answer(self, asked: Path, task: Task) -> tuple[int, float, float]:
        """Measure the policy that a run has saved, and let the run continue or end."""
        at = json.loads(asked.read_text(encoding="utf-8"))
        asked.unlink()
        folder = asked.parent
        config = {
            "model": str(folder / "policy"),
            "out": str(folder / "measured"),
            "reward": task.reward,
            "data": {"prompts": str(folder / "held_out.jsonl")},
            "generate": {"temperature": TEMPERATURE},
            "rollout": {"max_new_tokens": task.max_new_tokens},
            "runtime": {"report": False},
        }
        (folder / "generate.json").write_text(json.dumps(config), encoding="utf-8")
        command = [sys.executable, "-m", "kedge", "generate", "--config", str(folder / "generate.json")]
        run_alone(command, log=folder / "measured.txt", num_threads=self.options.threads)
        score = fmean(row["score"] for row in read_json_lines(folder / "measured" / "responses.jsonl"))
        shutil.rmtree(folder / "measured")
        answer = folder / "answer.part"
        answer.write_text(json.dumps(score >= task.score), encoding="utf-8")
        answer.replace(folder / "answer.json")
        return at["update"], at["seconds"], score


def best(tried: Sequence[Run]) -> Run:
    """The run with the fewest updates to the score; of several, or if none reached it, the highest last score."""
    reached = [run for run in tried if run.seconds is not None] or tried
    return min(reached, key=lambda run: (run.curve[-1][0] * (run.seconds is not None), -run.curve[-1][2]))


def write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines."""
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def read_record(file: Path) -> list[Run]:
    """The finished runs."""
    return [Run(**row) for row in read_json_lines(file)] if file.is_file() else []


def score_table(runs: Sequence[Run], task: str) -> Table:
    """Seconds to the score of each arm, with intervals over seeds, and the ratio to the first arm seed by seed."""
    counted = [run for run in runs if run.task == task and run.seed != TUNING_SEED]
    seconds = {(run.arm, run.seed): run.seconds for run in counted}
    rows = []
    for arm in ARMS:
        own = [run for run in counted if run.arm == arm]
        if not own:
            continue
        reached = [run.seconds for run in own if run.seconds is not None]
        pairs = [(run.seconds, seconds.get((FIRST, run.seed))) for run in own]
        ratios = [own / first for own, first in pairs if own is not None and first is not None]
        is_whole = len(reached) == len(own)
        most = max(run.curve[-1][1] for run in own)
        rows.append([
            arm,
            "default" if own[0].rate is None else f"{own[0].rate:g}",
            f"{len(reached)} of {len(own)}",
            _shown(mean_interval(reached), "{:.0f}") if is_whole else f"not within {most:.0f}",
            "–" if arm == FIRST or not is_whole or len(ratios) < len(own) else _shown(mean_interval(ratios), "{:.2f}×"),
            f"{fmean(run.curve[-1][0] for run in own):.0f}",
            f"{fmean(run.curve[-1][2] for run in own):.2f}",
            f"{fmean(run.memory for run in own):.1f}",
        ])  # fmt: skip
    header = ["", "learning rate", "reached", "seconds", f"times {FIRST}", "updates", "last score", "GiB"]
    return Table(task, header, rows)


def tries(runs: Sequence[Run], task: str) -> str:
    """The runs that chose the rates, in a line; empty if there are none."""
    parts = [
        f"{run.arm} {run.rate:g}: "
        + (f"{run.curve[-1][0]} updates" if run.seconds else f"{run.curve[-1][2]:.2f} at the end")
        for arm in ARMS
        for run in runs
        if (run.task, run.arm, run.seed) == (task, arm, TUNING_SEED)
    ]
    return f"\nTries: {'; '.join(parts)}.\n" if parts else ""


def _shown(interval: Interval, form: str) -> str:
    value = form.format(interval.value)
    return value if interval.low != interval.low else f"{value} ({interval.low:.3g} to {interval.high:.3g})"


INTRODUCTION = """\
## Time to a score

`python -m bench.score`: from the command to a held-out score that was set beforehand, SmolLM2-135M-Instruct. The clock
counts imports, loading and training; it stands still while the policy is measured, every {every} updates, by {measured}
responses to each of 60 held-out prompts. An update is {prompts} prompts and {responses} responses to each. The arms
take turns. A tuned arm has had one run with each of the rates {rates} and another seed; kedge's settings besides are
its presets `grpo` and `small-instruct`, and TRL's are its defaults without checkpointing and decay. *TRL's loss* is
the preset `grpo` with the mean over the tokens of all responses (`ppo.aggregation=token`) and without a KL, as in TRL;
the preset has the paper's mean over each response first. The preset `small-instruct` had been chosen with
`examples/brief` in use. Mean and Student's 95 % interval over seeds.
"""


def score_section(runs: Sequence[Run]) -> str:
    """The section of the page, in Markdown; empty until a seed has been run."""
    if not (counted := [run.facts for run in runs if run.seed != TUNING_SEED]):
        return ""
    rates = ", ".join(f"{rate:g}" for rate in RATES)
    text = INTRODUCTION.format(
        every=EVERY, measured=MEASURED, prompts=NUM_PROMPTS, responses=NUM_RESPONSES, rates=rates
    )
    parts = [
        f"A score of {task.score} for {task.about}:\n\n{score_table(runs, name).markdown()}\n{tries(runs, name)}"
        for name, task in TASKS.items()
        if any(run.task == name and run.seed != TUNING_SEED for run in runs)
    ]
    values = {name: dict.fromkeys(facts[name] for facts in counted if name in facts) for name in counted[0]}
    listed = "\n".join(f"- {name}: {' / '.join(each)}" for name, each in values.items())
    return "\n".join([text, *parts, listed, ""])


def planned(bench: Bench, options: argparse.Namespace) -> Iterator[Run]:
    """All runs: first those that choose the rates, then seed by seed, the arms in turn."""
    rates = {(task, arm): bench.rate(task, arm) for task in options.tasks for arm in options.arms}
    for seed in options.seeds:
        for (task, arm), rate in rates.items():
            yield bench.run(task, arm, rate, seed)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an instruction model with a chat template")
    parser.add_argument("--peer", type=Path, required=True, help="Python of an environment with TRL 1.16")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS], metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS], metavar="ARM", help="; ".join(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[*SEEDS], metavar="SEED")
    parser.add_argument("--rates", nargs="+", type=float, default=[*RATES], help="of tuned arms; a single one is taken")
    parser.add_argument("--updates", type=int, help="fewer updates, to try the bench")
    parser.add_argument("--record", type=Path, default=RECORD, help="file of the finished runs")
    parser.add_argument("--threads", type=int, default=available_cores())
    options = parser.parse_args()
    if options.record == RECORD and (options.updates or options.rates != [*RATES]):
        parser.error("--updates and --rates need a --record of their own")
    if TUNING_SEED in options.seeds:
        parser.error(f"seed {TUNING_SEED} is that of the runs that choose the rates")
    return options


def main() -> int:
    """Run the command line; returns 2 after an error."""
    options = arguments()
    try:
        name = Path(options.model).name if Path(options.model).is_dir() else options.model
        options.model = model_folder(options.model)
        facts = {"model": name, **describe_machine(options.threads), **describe_versions(options.peer)}
        bench = Bench(options, facts)
        for _ in planned(bench, options):
            pass
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(f"\n{score_section(bench.runs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

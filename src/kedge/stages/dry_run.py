"""A dry run of a training stage: everything is loaded and checked, a few rows are timed, and nothing is kept.

The stage runs in a temporary folder. It uses the models of the process, so no saved state changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kedge.config import Config, mean_epochs, schedule_in_words, with_values
from kedge.data import Prompt, PromptStream
from kedge.logs.progress import format_duration, format_figure, say
from kedge.logs.table import Cell, print_table
from kedge.models import ModelCard, save_scalar_model
from kedge.runs.run import Run, offloads_optimizer, open_run
from kedge.stages.critic.parts import Part
from kedge.stages.critic.sampling import load_critic_inputs
from kedge.stages.ppo.critics import with_saved_critic
from kedge.stages.ppo.roles import load_roles
from kedge.stages.ppo.sampling import Sampling
from kedge.stages.ppo.trainer import Trainer
from kedge.stages.reward import load_reward_inputs, train_reward_model
from kedge.stages.rlhf import check_inputs, scored_config, stage_config, with_trained
from kedge.stages.sft import load_sft_inputs, train_sft
from kedge.system.generators import kept_random_state
from kedge.system.invocation import refuse_nested_run
from kedge.system.ranks import tokens_of
from kedge.system.stage import find_stage
from kedge.training.runtime import Stopwatch, default_modes, stream_seed
from kedge.training.supervised.loop import count_steps
from kedge.training.supervised.returns import SampledReturns, train_critic

ROWS = 16
"""Responses of a trial, unless `rollout.micro_batch_size` is set."""


@dataclass(frozen=True)
class TimedPhase:
    """A timed phase.

    Attributes:
        name: Its stage and its name, as in `time/NAME` of the metrics.
        seconds: Time for the trial's rows.
        rows: The trial's rows.
        total_rows: Rows of the whole run, each time that one is computed.
    """

    name: str
    seconds: float
    rows: int
    total_rows: float

    @property
    def whole(self) -> float:
        """Estimated seconds in the whole run."""
        return self.seconds / self.rows * self.total_rows


@dataclass(frozen=True, repr=False)
class DryRun:
    """The result of a dry run, after its table was printed.

    Attributes:
        stage: sft, reward, critic, ppo or rlhf.
        phases: The timed phases.
    """

    stage: str
    phases: tuple[TimedPhase, ...]

    @property
    def seconds(self) -> float:
        """Estimated seconds of the whole run, without loading, evaluations, checkpoints and samples."""
        return math.fsum(each.whole for each in self.phases)

    def __repr__(self) -> str:
        phases = ", ".join(f"{each.name} {format_duration(each.whole)}" for each in self.phases)
        return f"DryRun of {self.stage}: about {format_duration(self.seconds)} in all ({phases})"


@kept_random_state()
@default_modes()
def dry_run(config: Config, stage: str, **given: Any) -> DryRun:
    """Load and check everything that a stage reads, time a few rows of each phase, and print an estimate.

    Args:
        config: The resolved configuration.
        stage: sft, reward, critic, ppo or rlhf.
        given: Python objects instead of configured fields, by the name of the stage's argument; see `Stage.arguments`.

    Raises:
        KedgeError: As when the stage itself starts.
    """
    refuse_nested_run()
    with TemporaryDirectory(prefix="kedge-dry-run-") as scratch:
        config = with_values(config, {"out": str(Path(scratch) / stage)})
        phases = _trial(config, stage, given)
    found = DryRun(stage, tuple(phases))
    rows: dict[str, list[Cell]] = {
        each.name: [str(each.rows), f"{format_figure(each.seconds)} s", format_duration(each.whole)] for each in phases
    }
    print_table("Dry run: nothing was written", ["phase", "rows timed", "time", "in the whole run"], rows)
    print(f"About {format_duration(found.seconds)} in all, without loading, evaluations, checkpoints and samples.")
    return found


def _trial(config: Config, stage: str, given: Mapping[str, Any]) -> list[TimedPhase]:
    """The phases of one stage; it picks its inputs from the given ones."""
    config = with_saved_critic(config) if stage == "ppo" else config
    arguments = find_stage(stage).arguments
    own = {name: given.get(name) for name in arguments}
    run = open_run(config, stage, in_memory={field: own[name] for name, field in arguments.items()})
    return _TRIALS[stage](config, run, own)


def _sft(config: Config, run: Run, given: Mapping[str, Any]) -> list[TimedPhase]:
    inputs = load_sft_inputs(config, run, **given)
    run.data.say()
    say(f"sft takes {inputs.num_steps:,} optimizer steps of {config.sft.batch_size} demonstrations.")

    def trial(num_rows: int, **settings: Any) -> None:
        train_sft(inputs.model, inputs.tokenizer, inputs.split.train[:num_rows], **settings)

    return [_steps("sft", config, run, trial, inputs.num_steps)]


def _reward(config: Config, run: Run, given: Mapping[str, Any]) -> list[TimedPhase]:
    inputs = load_reward_inputs(config, run, **given)
    run.data.say()
    say(f"reward takes {inputs.num_steps:,} optimizer steps of {config.reward_model.batch_size} comparisons.")

    def trial(num_rows: int, **settings: Any) -> None:
        settings["normalize"] = "none"
        train_reward_model(inputs.model, inputs.tokenizer, inputs.split.train[:num_rows], **settings)

    phases = [_steps("reward", config, run, trial, inputs.num_steps)]
    run.folder.mkdir(exist_ok=True)  # the trial of rlhf scores with this model
    save_scalar_model(inputs.model, inputs.tokenizer, run.folder / "model", card=ModelCard("reward", "trial"))
    return phases


def _critic(config: Config, run: Run, given: Mapping[str, Any]) -> list[TimedPhase]:
    settings = config.critic
    inputs = load_critic_inputs(config, run, **given)
    total, held_out = inputs.num_responses
    run.data.say()
    say(inputs.plan)
    say(inputs.roles.stop_tokens.line)
    trainer = inputs.trainer
    num_prompts = _num_prompts(config, settings.num_responses)
    stream = _stream(config, inputs.roles.prompts)
    parts: list[SampledReturns] = []
    seconds: dict[str, float] = {}
    for _ in range(2):  # as in PPO's trial
        clock = Stopwatch(run.device)
        prompts = stream.next(num_prompts)
        with clock.phase("rollout"):
            rollout = trainer.sample(prompts)
        with clock.phase("reward"):
            scored = trainer.score(rollout, prompts)
        parts.append(Part.of(trainer.evaluate(scored), scored.rollout.group).returns)
        seconds = clock.metrics(num_tokens=0)
    done = num_prompts * settings.num_responses
    names = ("rollout", "reward")
    phases = [TimedPhase(f"critic: {name}", seconds[f"time/{name}"], done, total + held_out) for name in names]
    if settings.kind == "shared":
        return phases
    num_steps = count_steps(total, num_epochs=settings.num_epochs, batch_size=settings.batch_size)
    sampled = SampledReturns.joined(parts)

    def trial(num_rows: int, **settings: Any) -> None:
        rows = list(islice(cycle(range(sampled.rollout.num_responses)), num_rows))
        train_critic(inputs.loss(sampled, rows), rows, **settings)

    return [*phases, _steps("critic", config, run, trial, num_steps)]


def _ppo(config: Config, run: Run, given: Mapping[str, Any]) -> list[TimedPhase]:
    num_prompts = min(_num_prompts(config, config.rollout.num_responses), config.rollout.num_prompts)
    schedules = {**config.schedules, "ppo.num_epochs": {1: 1}}
    trial = with_values(config, {"rollout.num_prompts": num_prompts, "ppo.num_minibatches": 1, "schedules": schedules})
    roles = load_roles(trial, run, **given)
    run.data.say()
    say(schedule_in_words(config, len(roles.prompts)))
    say(roles.stop_tokens.line)
    trainer = Trainer.of(trial, run, roles)
    sampling = Sampling(_stream(config, roles.prompts), trainer, say=say)
    update = config.ppo.value_warmup_updates + 1  # the first one that trains the policy
    seconds: dict[str, float] = {}
    with closing(roles.engine):
        trainer.begin(update)
        for _ in range(2):  # the second pass counts: the first also allocates memory and starts workers
            clock = Stopwatch(run.device)
            batch = sampling.batch(update, clock)
            with clock.phase("experience"):
                experience = trainer.estimate(batch.trained)
            with clock.phase("train"):
                trainer.improve(experience)
            seconds = clock.metrics(num_tokens=batch.num_tokens)
    done = num_prompts * config.rollout.num_responses
    total = config.ppo.num_updates * config.responses_per_update
    times = {"rollout": 1, "reward": 1, "experience": 1, "train": mean_epochs(config)}
    return [TimedPhase(f"ppo: {name}", seconds[f"time/{name}"], done, total * each) for name, each in times.items()]


def _num_prompts(config: Config, num_responses: int) -> int:
    """The prompts of a trial."""
    return max(1, (config.rollout.micro_batch_size or ROWS) // num_responses)


def _stream(config: Config, prompts: list[Prompt]) -> PromptStream:
    return PromptStream(prompts, seed=stream_seed(config.runtime.seed, "prompts"))


def _rlhf(config: Config, run: Run, given: Mapping[str, Any]) -> list[TimedPhase]:
    check_inputs(config, run, given)
    run.folder.mkdir()
    trials = {name: stage_config(config, run, name) for name in ("sft", "reward")}
    supervised = [_trial(each, name, given) for name, each in trials.items()]
    trained = run.folder / "reward" / "model"
    rewards = None if given["reward"] is None else with_trained(trained, given["reward"])
    sft, repeated = supervised
    for name in ("critic", "ppo") if config.rlhf.train_critic else ("ppo",):
        scored = scored_config(config, run, name, model=Path(str(config.model)), reward=trained)
        kind = {"ppo.critic": config.critic.kind} if config.rlhf.train_critic else {}
        repeated += _trial(with_values(scored, kind), name, {**given, "reward": rewards})
    rounds = config.rlhf.num_rounds
    return [*sft, *(TimedPhase(each.name, each.seconds, each.rows, each.total_rows * rounds) for each in repeated)]


_TRIALS: Mapping[str, Callable[[Config, Run, Mapping[str, Any]], list[TimedPhase]]] = {
    "sft": _sft,
    "reward": _reward,
    "critic": _critic,
    "ppo": _ppo,
    "rlhf": _rlhf,
}


def _steps(stage: str, config: Config, run: Run, trial: Callable[..., None], num_steps: int) -> TimedPhase:
    """Two optimizer steps on as many rows as surely fit into one micro-batch; the second one counts.

    Args:
        stage: Its name.
        config: The resolved configuration.
        run: The run.
        trial: Trains on some rows: `(num_rows, **settings)`.
        num_steps: Of the run.
    """
    settings = config.training_of(find_stage(stage).trains[-1])
    batch_size = settings["batch_size"]
    budget = tokens_of(run.micro_batch_tokens)
    rows = batch_size if budget is None else max(1, min(batch_size, budget // config.data.max_length))
    seconds: list[float] = []
    settings |= {
        "batch_size": rows,
        "num_epochs": 1,
        "precision": run.precision,
        "seed": config.runtime.seed,
        "micro_batch_tokens": budget,
        "offload_optimizer": offloads_optimizer(config, run.device),
        "on_step": lambda step, metrics: seconds.append(metrics["time/update"]),
    }
    trial(2 * rows, **settings)
    return TimedPhase(f"{stage}: train", seconds[-1], rows, num_steps * batch_size)

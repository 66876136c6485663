"""A dry run of a training stage: everything is loaded and checked, a few rows are timed, and nothing is kept.

The stage runs in a temporary folder. It uses the models of the process, so no saved state changes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kedge.config import Config, schedule_in_words, with_values
from kedge.data import PromptStream
from kedge.logs.progress import format_duration, format_figure, say
from kedge.logs.table import Cell, print_table
from kedge.models import ModelCard, save_scalar_model
from kedge.runs.run import Run, offloads_optimizer, open_run
from kedge.stages.critic.parts import Part
from kedge.stages.critic.sampling import load_critic_inputs
from kedge.stages.ppo.critics import with_saved_critic
from kedge.stages.ppo.roles import load_roles
from kedge.stages.ppo.trainer import Trainer
from kedge.stages.reward import load_reward_inputs, train_reward_model
from kedge.stages.rlhf import check_inputs, scored_config, stage_config, with_trained
from kedge.stages.sft import load_sft_inputs, train_sft
from kedge.system.invocation import refuse_nested_run
from kedge.system.ranks import tokens_of
from kedge.training.runtime import stream_seed
from kedge.training.supervised.loop import count_steps
from kedge.training.supervised.returns import SampledReturns, train_critic

__all__ = ["DryRun", "dry_run"]

ROWS = 16
"""Responses of the PPO trial, unless `rollout.micro_batch_size` is set."""


INPUTS: Mapping[str, Mapping[str, str]] = {
    "sft": {"demonstrations": "data.demonstrations"},
    "reward": {"comparisons": "data.comparisons", "demonstrations": "data.demonstrations"},
    "ppo": {"prompts": "data.prompts", "eval_prompts": "data.eval_prompts", "reward": "reward"},
    "critic": {"prompts": "data.prompts", "eval_prompts": "data.eval_prompts", "reward": "reward"},
    "rlhf": {
        "demonstrations": "data.demonstrations",
        "comparisons": "data.comparisons",
        "prompts": "data.prompts",
        "labeler": "rlhf.labeler",
        "reward": "reward",
    },
}
"""The arguments of each stage's function that may be Python objects, and the fields that they replace."""


@dataclass(frozen=True)
class Phase:
    """A timed phase.

    Attributes:
        name: As shown.
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
    phases: tuple[Phase, ...]

    @property
    def seconds(self) -> float:
        """Estimated seconds of the whole run, without loading, evaluations, checkpoints and samples."""
        return math.fsum(each.whole for each in self.phases)

    def __repr__(self) -> str:
        phases = ", ".join(f"{each.name} {format_duration(each.whole)}" for each in self.phases)
        return f"DryRun of {self.stage}: about {format_duration(self.seconds)} in all ({phases})"


def dry_run(config: Config, stage: str, **given: Any) -> DryRun:
    """Load and check everything that a stage reads, time a few rows of each phase, and print an estimate.

    Args:
        config: The resolved configuration.
        stage: sft, reward, critic, ppo or rlhf.
        given: Python objects instead of configured fields, by the name of the stage's argument; see `INPUTS`.

    Raises:
        KedgeError: As when the stage itself starts.
    """
    refuse_nested_run()
    with TemporaryDirectory(prefix="kedge-dry-run-") as scratch:
        config = with_values(config, {"out": str(Path(scratch) / stage)})
        phases = _trial(config, stage, given)
    _print_phases(found := DryRun(stage, tuple(phases)))
    return found


def _trial(config: Config, stage: str, given: Mapping[str, Any]) -> list[Phase]:
    """The phases of one stage; it picks its inputs from the given ones."""
    config = with_saved_critic(config) if stage == "ppo" else config
    own = {name: given.get(name) for name in INPUTS[stage]}
    run = open_run(config, stage, in_memory={INPUTS[stage][name]: value for name, value in own.items()})
    return _TRIALS[stage](config, run, own)


def _sft(config: Config, run: Run, given: Mapping[str, Any]) -> list[Phase]:
    inputs = load_sft_inputs(config, run, **given)
    run.data.say()
    say(f"sft takes {inputs.num_steps:,} optimizer steps of {config.sft.batch_size} demonstrations.")

    def trial(**settings: Any) -> None:
        settings = {**config.training_of("sft"), **settings}
        train_sft(inputs.model, inputs.tokenizer, inputs.split.train[: 2 * settings["batch_size"]], **settings)

    return [_supervised("sft: optimizer steps", config, run, trial, config.sft.batch_size, inputs.num_steps)]


def _reward(config: Config, run: Run, given: Mapping[str, Any]) -> list[Phase]:
    inputs = load_reward_inputs(config, run, **given)
    settings = config.reward_model
    run.data.say()
    say(f"reward takes {inputs.num_steps:,} optimizer steps of {settings.batch_size} comparisons.")

    def trial(**changes: Any) -> None:
        values = {**config.training_of("reward_model"), **changes, "normalize": "none"}
        train_reward_model(inputs.model, inputs.tokenizer, inputs.split.train[: 2 * values["batch_size"]], **values)

    phases = [_supervised("reward: optimizer steps", config, run, trial, settings.batch_size, inputs.num_steps)]
    run.folder.mkdir(exist_ok=True)  # the trial of rlhf scores with this model
    save_scalar_model(inputs.model, inputs.tokenizer, run.folder / "model", card=ModelCard("reward", "trial"))
    return phases


def _critic(config: Config, run: Run, given: Mapping[str, Any]) -> list[Phase]:
    settings = config.critic
    inputs = load_critic_inputs(config, run, **given)
    num_prompts = max(1, min(config.rollout.micro_batch_size or ROWS, ROWS) // settings.num_responses)
    total, held_out = inputs.num_responses
    run.data.say()
    say(inputs.plan)
    say(inputs.roles.stop_tokens.line)
    prompts = PromptStream(inputs.roles.prompts, seed=stream_seed(config.runtime.seed, "prompts"))
    seconds: dict[str, float] = {}
    parts: list[SampledReturns] = []
    for _ in range(2):  # as in PPO's trial
        drawn = prompts.next(num_prompts)
        with _timed(seconds, "sampling"):
            rollout = inputs.trainer.sample(drawn)
        with _timed(seconds, "scoring"):
            scored = inputs.trainer.score(rollout, drawn)
        experience = inputs.trainer.evaluate(scored)
        parts.append(Part.of(experience, experience.rollout.group).returns)
    done = num_prompts * settings.num_responses
    phases = [Phase(f"critic: {name}", each, done, total + held_out) for name, each in seconds.items()]
    if settings.kind == "shared":
        return phases
    num_steps = count_steps(total, num_epochs=settings.num_epochs, batch_size=settings.batch_size)
    sampled = SampledReturns.joined(parts)

    def trial(**changes: Any) -> None:
        values = {**config.training_of("critic"), **changes}
        rows = list(islice(cycle(range(sampled.rollout.num_responses)), 2 * values["batch_size"]))
        train_critic(inputs.loss(sampled, rows), rows, **values)

    return [*phases, _supervised("critic: optimizer steps", config, run, trial, settings.batch_size, num_steps)]


def _ppo(config: Config, run: Run, given: Mapping[str, Any]) -> list[Phase]:
    rows = min(config.rollout.micro_batch_size or ROWS, config.responses_per_update)
    num_prompts = max(1, rows // config.rollout.num_responses)
    trial = with_values(config, {"rollout.num_prompts": num_prompts, "ppo.num_minibatches": 1, "ppo.num_epochs": 1})
    roles = load_roles(trial, run, **given)
    run.data.say()
    say(schedule_in_words(config, len(roles.prompts)))
    say(roles.stop_tokens.line)
    trainer = Trainer.of(trial, run, roles)
    prompts = PromptStream(roles.prompts, seed=stream_seed(config.runtime.seed, "prompts"))
    update = config.ppo.value_warmup_updates + 1  # the first one that trains the policy
    seconds: dict[str, float] = {}
    with closing(roles.engine):
        trainer.begin(update)
        trainer.publish(update - 1)
        for _ in range(2):  # the second pass counts: the first also allocates memory and starts workers
            drawn = prompts.next(num_prompts)
            with _timed(seconds, "sampling"):
                rollout = trainer.sample(drawn)
                greedy = None
                if trainer.settings.needs_baseline:
                    greedy = trainer.sample(drawn, groups=range(len(drawn)), greedy=True)
            with _timed(seconds, "scoring"):
                scored = trainer.score(rollout, drawn)
                if greedy is not None:
                    scored = scored.compared_with(trainer.score(greedy, drawn, "reward", update, "greedy"))
            with _timed(seconds, "forward"):
                experience = trainer.estimate(scored)
            with _timed(seconds, "epochs"):
                trainer.improve(experience)
    done = num_prompts * config.rollout.num_responses
    total = config.ppo.num_updates * config.responses_per_update
    epochs = {"epochs": config.ppo.num_epochs}
    return [Phase(f"ppo: {name}", each, done, total * epochs.get(name, 1)) for name, each in seconds.items()]


def _rlhf(config: Config, run: Run, given: Mapping[str, Any]) -> list[Phase]:
    rows = {name: value for name, value in given.items() if name != "labeler"}
    check_inputs(config, run, **rows, labeler=given["labeler"])
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
    return [*sft, *(Phase(each.name, each.seconds, each.rows, each.total_rows * rounds) for each in repeated)]


_TRIALS: Mapping[str, Callable[[Config, Run, Mapping[str, Any]], list[Phase]]] = {
    "sft": _sft,
    "reward": _reward,
    "critic": _critic,
    "ppo": _ppo,
    "rlhf": _rlhf,
}


def _supervised(
    name: str, config: Config, run: Run, trial: Callable[..., None], batch_size: int, num_steps: int
) -> Phase:
    """Two optimizer steps on as many examples as surely fit into one micro-batch; the second one counts."""
    budget = tokens_of(run.micro_batch_tokens)
    rows = batch_size if budget is None else max(1, min(batch_size, budget // config.data.max_length))
    seconds: list[float] = []
    trial(
        batch_size=rows,
        num_epochs=1,
        precision=run.precision,
        seed=config.runtime.seed,
        micro_batch_tokens=budget,
        offload_optimizer=offloads_optimizer(config, run.device),
        on_step=lambda step, metrics: seconds.append(metrics["time/update"]),
    )
    return Phase(name, seconds[-1], rows, num_steps * batch_size)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started


def _print_phases(found: DryRun) -> None:
    rows: dict[str, list[Cell]] = {
        each.name: [str(each.rows), f"{format_figure(each.seconds)} s", format_duration(each.whole)]
        for each in found.phases
    }
    print_table("Dry run: nothing was written", ["phase", "rows timed", "time", "in the whole run"], rows)
    total = format_duration(found.seconds)
    print(f"About {total} in all, without loading, evaluations, checkpoints and samples.")

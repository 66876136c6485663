"""The responses that a critic is fitted to, with their returns: sampled and scored as in PPO, and kept."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kedge.data import Prompt, PromptStream
from kedge.logs.progress import Progress, say
from kedge.runs.run import Run
from kedge.stages.critic.inputs import CriticInputs
from kedge.stages.critic.parts import Part, PartStore
from kedge.system.output import SAMPLED_FOLDER
from kedge.training.runtime import stream_seed
from kedge.training.stopping import stopping
from kedge.training.supervised.returns import SampledReturns

__all__ = ["Chunk", "Sampled", "sample_part", "sample_returns"]

STREAM = "critic responses"
"""Name of the random numbers. PPO uses others: the critic must not be fitted to its first responses."""


@dataclass(frozen=True)
class Sampled:
    """The sampled responses of training and held-out prompts.

    Attributes:
        returns: All responses.
        train_rows: Numbers of those to fit to.
        held_out_rows: Numbers of those to measure with.
        missing_eos_score: The score of a response without a stop token; None for no penalty.
        unscored: Responses that the rewards did not score.
        seconds: Time that sampling and scoring took.
    """

    returns: SampledReturns
    train_rows: list[int]
    held_out_rows: list[int]
    missing_eos_score: float | None
    unscored: int
    seconds: float

    def summary(self) -> dict[str, Any]:
        """For `summary.json`."""
        train = self.returns.select(self.train_rows)
        groups = self.returns.rollout.group
        return {
            "num_prompts": len(groups[self.train_rows].unique()),
            "num_responses": len(self.train_rows),
            "num_held_out_prompts": len(groups[self.held_out_rows].unique()),
            "num_held_out_responses": len(self.held_out_rows),
            "unscored": self.unscored,
            "eos_rate": float(train.rollout.stopped.double().mean()),
            "returns_mean": train.mean,
            "returns_std": train.std,
            "missing_eos_score": self.missing_eos_score,
            "sampling_seconds": self.seconds,
        }


def sample_returns(inputs: CriticInputs, run: Run) -> Sampled:
    """Sample and score responses to the training prompts, then to the held-out ones; parts that are kept are read.

    Raises:
        RewardError: A reward failed, or scored no response of a part.
        KeyboardInterrupt, Terminated: Interrupted between two parts, which are kept.
    """
    store = PartStore(run.shared_folder / SAMPLED_FOLDER, inputs.sampling_key)
    chunks = list(_chunks(inputs))
    say(inputs.roles.stop_tokens.line)
    say(inputs.plan)
    parts: list[Part] = []
    with (
        stopping(ranks=run.ranks) as stop,
        Progress("critic: sampling", total=len(chunks), done=store.num_kept) as progress,
    ):
        for number, chunk in enumerate(chunks):
            part = store.read(number)
            if part is None:
                stop.raise_if_requested()
                part = sample_part(inputs, number, chunk)
                if run.ranks.is_first:
                    store.write(number, part)
            if inputs.roles.missing_eos is not None:
                inputs.roles.missing_eos.load_state_dict(part.missing_eos)
            parts.append(part)
            progress.update(number + 1)
        stop.raise_if_requested()
    return _joined(parts, inputs)


@dataclass(frozen=True)
class Chunk:
    """Prompts that are sampled together.

    Attributes:
        prompts: The prompts.
        numbers: The number of each; equal prompts have equal ones.
        is_held_out: Whether they are held out.
    """

    prompts: Sequence[Prompt]
    numbers: Sequence[int]
    is_held_out: bool


def _chunks(inputs: CriticInputs) -> Iterator[Chunk]:
    """The prompts in chunks of PPO's size: a scale of rewards or an automatic score is then that of an update."""
    roles = inputs.roles
    seed = inputs.config.runtime.seed
    stream = PromptStream(roles.prompts, seed=stream_seed(seed, STREAM), mixture=roles.mixture)
    train = stream.next(inputs.num_prompts or len(roles.prompts))
    numbers: dict[str, int] = {}
    for prompts, is_held_out in ((train, False), (roles.held_out, True)):
        size = inputs.config.rollout.num_prompts
        for start in range(0, len(prompts), size):
            chunk = prompts[start : start + size]
            yield Chunk(chunk, [numbers.setdefault(each.text, len(numbers)) for each in chunk], is_held_out)


def sample_part(inputs: CriticInputs, number: int, chunk: Chunk) -> Part:
    """Sample and score a chunk's responses; their returns are as in PPO's first update."""
    started = time.perf_counter()
    trainer = inputs.trainer
    missing_eos = inputs.roles.missing_eos
    rollout = trainer.sample(chunk.prompts, STREAM, number)
    experience = trainer.evaluate(trainer.score(rollout, chunk.prompts, "reward", number))
    numbers = torch.tensor(chunk.numbers)[experience.rollout.group.cpu()]
    return Part.of(
        experience,
        numbers,
        is_held_out=chunk.is_held_out,
        missing_eos={} if missing_eos is None else missing_eos.state_dict(),
        unscored=rollout.num_responses - experience.num_rows,
        seconds=time.perf_counter() - started,
    )


def _joined(parts: Sequence[Part], inputs: CriticInputs) -> Sampled:
    held_out = [part.is_held_out for part in parts for _ in range(part.returns.rollout.num_responses)]
    score = None if inputs.roles.missing_eos is None else inputs.roles.missing_eos.score
    return Sampled(
        SampledReturns.joined([part.returns for part in parts]),
        [row for row, held in enumerate(held_out) if not held],
        [row for row, held in enumerate(held_out) if held],
        score if isinstance(score, float) else None,
        sum(part.unscored for part in parts),
        sum(part.seconds for part in parts),
    )

"""An update's time by phase, what bounds it, and whether it fits into memory."""

from __future__ import annotations

from dataclasses import dataclass

from bench.cluster.memory import MICRO_BATCHES, ServerMemory, TrainerMemory, server_memory, trainer_memory
from bench.cluster.passes import Pass, experience_time, sync_time, training_time
from bench.cluster.practice import Practice
from bench.cluster.rollout import Rollout, rollout_time
from bench.cluster.work import Layout, Workload


@dataclass(frozen=True)
class UpdateTime:
    """One update on one layout; seconds and bytes.

    Attributes:
        work: The workload.
        layout: Where.
        rollout: Sampling.
        experience: Forward passes of the policy, reference, critic and reward model.
        training: The epochs.
        sync: Weights to the servers.
        seconds: The whole update.
        waiting: Seconds that the average card has nothing to do.
        trainer: Memory of a training card.
        server: Memory of a card of a server.
        problem: Why it does not fit; None if it does.
    """

    work: Workload
    layout: Layout
    rollout: Rollout
    experience: Pass
    training: Pass
    sync: float
    seconds: float
    waiting: float
    trainer: TrainerMemory
    server: ServerMemory
    problem: str | None

    @property
    def card_seconds(self) -> float:
        """The price of an update: all cards for its duration."""
        return self.seconds * self.layout.cards

    @property
    def other(self) -> float:
        """Scoring, moving data and barriers."""
        trainer = self.experience.seconds + self.training.seconds
        busy = max(self.rollout.seconds, trainer) if self.layout.staleness else self.rollout.seconds + trainer
        return self.seconds - self.sync - busy

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts and responses per second and card."""
        return self.work.tokens / self.card_seconds

    @property
    def bottleneck(self) -> str:
        """The longest phase, and what bounds it."""
        phases = {
            "rollout": (self.rollout.seconds, self.rollout.limit),
            "reference, reward and critic passes": (self.experience.seconds, self.experience.limit),
            "training": (self.training.seconds, self.training.limit),
            "weight sync": (self.sync, "the link" if self.layout.cards <= self.layout.card.linked else "the network"),
        }
        name, (_, limit) = max(phases.items(), key=lambda phase: phase[1][0])
        return f"{name}, bound by {limit}"


def update_time(work: Workload, layout: Layout, practice: Practice | None = None) -> UpdateTime:
    """The cost of an update.

    synchronous:  (rollout + passes + training) · overhead + sync
    stale by one: max(rollout, passes + training) · overhead + sync

    Args:
        work: The update.
        layout: The cards.
        practice: The constants; None for the fitted ones.
    """
    practice = practice or Practice()
    usable = layout.card.memory * practice.trainer_memory
    choices = [trainer_memory(work, layout, tokens) for tokens in MICRO_BATCHES]
    trainer = next((choice for choice in choices if choice.bytes <= usable), choices[-1])
    server = server_memory(work, layout, practice)
    rollout = rollout_time(work, layout, practice)
    experience = experience_time(work, layout, practice, trainer.micro_batch)
    training = training_time(work, layout, practice, trainer.micro_batch)
    sync = sync_time(work, layout, practice)
    sampling = rollout.seconds
    rest = experience.seconds + training.seconds
    busy = max(sampling, rest) if layout.staleness else sampling + rest
    idle = 0.0
    if layout.apart:
        idle = layout.rollout_cards * (busy - sampling) + layout.training_cards * (busy - rest)
    problem = _problem(trainer, server, usable, layout)
    return UpdateTime(
        work, layout, rollout, experience, training, sync, busy * practice.overhead + sync, idle / layout.cards,
        trainer, server, problem,
    )  # fmt: skip


def _problem(trainer: TrainerMemory, server: ServerMemory, usable: float, layout: Layout) -> str | None:
    if layout.training_cards < 1:
        return "no card is left to train"
    if trainer.bytes > usable:
        return f"a training card needs {trainer.bytes / 1e9:.0f} GB and has {usable / 1e9:.0f} GB"
    if not server.fits:
        needed = server.weights + server.longest
        return f"a server needs {needed / 1e9:.0f} GB per card and has {(server.room + server.weights) / 1e9:.0f} GB"
    return None

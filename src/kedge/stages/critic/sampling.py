"""Samples and scores the responses that a critic is fitted to, as in PPO's first update."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from kedge.config import Config, PpoConfig, with_values
from kedge.config.schedules import config_at
from kedge.data import Prompt, PromptStream
from kedge.models import ActorCritic
from kedge.runs.run import Run
from kedge.stages.critic.parts import Part, PartStore
from kedge.stages.ppo.roles import Roles, load_roles
from kedge.stages.ppo.trainer import Trainer
from kedge.training.runtime import stopping, stream_seed
from kedge.training.supervised.returns import ReturnsLoss, SampledReturns
from kedge_base.machine.progress import Progress, say
from kedge_base.run_folder.output import SAMPLED_FOLDER

ALL_HELD_OUT = 10**9
"""A limit on the number of held-out prompts that is never reached: `data.eval_fraction` decides."""

STREAM = "critic responses"
"""Name of the random numbers. PPO uses others: the critic must not be fitted to its first responses."""


@dataclass(frozen=True)
class CriticInputs:
    """The inputs of a critic's training.

    Attributes:
        config: The configuration of PPO's first update that the critic is for; see `as_first_update`.
        num_prompts: Number of training prompts to sample responses to; None for each prompt once.
        roles: Policy, critic, rewards and prompts.
        trainer: Samples and scores as in PPO, but without the critic, whose values are not needed yet.
    """

    config: Config
    num_prompts: int | None
    roles: Roles
    trainer: Trainer

    def loss(self, sampled: SampledReturns, train_rows: Sequence[int]) -> ReturnsLoss:
        """The critic's loss on sampled responses, in the unit of the training returns."""
        train = sampled.select(train_rows)
        return ReturnsLoss(
            self.roles.actor_critic,
            sampled,
            center=train.mean,
            unit=train.std,
            value_after_last=self.config.ppo.score_at == "after_last",
            precision=self.trainer.run.precision,
        )

    @property
    def plan(self) -> str:
        """One line that says how many responses will be sampled."""
        each = self.config.rollout.num_responses
        prompts = self.roles.prompts
        train = (self.num_prompts or len(prompts.train)) * each
        held_out = len(prompts.held_out) * each
        return (
            f"critic samples {train + held_out:,} responses, {each} per prompt, {held_out:,} of them to held-out "
            f"prompts, at most {self.config.rollout.max_new_tokens} new tokens"
        )

    @property
    def sampling_key(self) -> dict[str, str]:
        """Fingerprint of the responses and returns: hashes of the inputs and settings that they depend on."""
        settings = self.config.model_dump(mode="json", exclude={"out", "checkpoint", "push", "critic", "sft"})
        settings |= {"num_prompts": self.num_prompts, "reward": self.trainer.run.rewards}
        settings["runtime"] = {"seed": self.config.runtime.seed, "precision": self.trainer.run.precision}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        return {**self.trainer.run.fingerprint, "settings": digest}


def as_first_update(config: Config, *, holds_out: bool) -> Config:
    """Return the configuration of PPO's first update, where the KL is 0, with the critic that the stage trains.

    Everything that affects a return is as in PPO: the discount, the position of the score, the scale of the rewards,
    and the score of a response without a stop token.
    """
    config = config_at(config, 1)
    settings = config.critic
    advantages = config.ppo
    is_privileged = settings.kind == "separate" and advantages.privileged is not None
    ppo = PpoConfig.model_validate(
        {
            "critic": advantages.critic if is_privileged else settings.kind,
            "critic_init": settings.base,
            "advantage": "to_go",
            "gamma": advantages.gamma,
            "credit": advantages.resolved_credit,
            "score_at": advantages.score_at,
            "whiten_rewards": advantages.whiten_rewards,
            "kl_coef": 0.0,
            "num_minibatches": 1,
            "eval_every": {"updates": 1 if holds_out else None, "num_prompts": ALL_HELD_OUT},
        }
    )
    plain = config.model_copy(update={"ppo": ppo, "schedules": {}})
    return with_values(
        plain,
        {
            "rollout.num_responses": settings.num_responses,
            "rollout.engine": "builtin",
            "evaluate.judge": None,
            "data.curriculum": None,
            "data.draw": "evenly",
        },
    )


def load_critic_inputs(config: Config, run: Run) -> CriticInputs:
    """Load policy, critic, rewards and prompts; errors as in `run_critic`."""
    own = bool(config.data.eval_prompts) or "data.eval_prompts" in run.objects
    first = as_first_update(config, holds_out=own or config.data.eval_fraction > 0)
    roles = load_roles(first, run)
    policy = roles.actor_critic.policy
    without = replace(roles, actor_critic=ActorCritic(policy)) if roles.actor_critic.critic is not None else roles
    return CriticInputs(first, config.critic.num_prompts, roles, Trainer.of(first, run, without))


@dataclass(frozen=True)
class Sampled:
    """The sampled responses of training and held-out prompts.

    Attributes:
        returns: All responses.
        train_rows: Row numbers to train on.
        held_out_rows: Row numbers to evaluate on.
        figures: Additional figures for `summary.json`.
    """

    returns: SampledReturns
    train_rows: list[int]
    held_out_rows: list[int]
    figures: Mapping[str, float | None]

    def summary(self) -> dict[str, Any]:
        """For `summary.json`."""
        train = self.returns.select(self.train_rows)
        groups = self.returns.rollout.group
        return {
            "num_prompts": len(groups[self.train_rows].unique()),
            "num_responses": len(self.train_rows),
            "num_held_out_prompts": len(groups[self.held_out_rows].unique()),
            "num_held_out_responses": len(self.held_out_rows),
            "eos_rate": float(train.rollout.stopped.double().mean()),
            "returns_mean": train.mean,
            "returns_std": train.std,
            **self.figures,
        }


def sample_returns(inputs: CriticInputs, run: Run) -> Sampled:
    """Sample and score responses to the training prompts, then to the held-out ones; stored parts are read instead.

    Raises:
        RewardError: A reward failed, or scored no response of a part.
        KeyboardInterrupt, Terminated: Interrupted between two parts; finished parts are kept.
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
                if run.ranks.is_first and run.has_started:  # a resumed run can still be refused
                    store.write(number, part)
            if inputs.roles.missing_eos is not None:
                inputs.roles.missing_eos.load_state_dict(part.missing_eos)
            parts.append(part)
            progress.update(number + 1)
        stop.raise_if_requested()
    held_out = [part.is_held_out for part in parts for _ in range(part.returns.rollout.num_responses)]
    score = None if inputs.roles.missing_eos is None else inputs.roles.missing_eos.score
    return Sampled(
        SampledReturns.joined([part.returns for part in parts]),
        [row for row, held in enumerate(held_out) if not held],
        [row for row, held in enumerate(held_out) if held],
        {
            "unscored": sum(part.unscored for part in parts),
            "missing_eos_score": score if isinstance(score, float) else None,
            "sampling_seconds": sum(part.seconds for part in parts),
        },
    )


class Chunk(NamedTuple):
    """Prompts that are sampled together.

    Attributes:
        prompts: The prompts.
        numbers: The number of each prompt; equal prompts share a number.
        is_held_out: Whether they are held out.
    """

    prompts: Sequence[Prompt]
    numbers: Sequence[int]
    is_held_out: bool


def starts_of_chunks(count: int, config: Config) -> list[int]:
    """Index of the first prompt of each chunk. Chunks have the size of a PPO update, so that reward scaling and
    automatic scores behave as in an update.

    With whitened rewards, leftover prompts join the last full chunk: a small chunk would be scaled differently.
    """
    size = config.rollout.num_prompts
    starts = [*range(0, count, size)]
    return starts[:-1] if config.ppo.whiten_rewards and count > size and count % size else starts


def _chunks(inputs: CriticInputs) -> Iterator[Chunk]:
    """Yield the prompts in chunks, training prompts first."""
    roles = inputs.roles
    seed = inputs.config.runtime.seed
    stream = PromptStream(roles.prompts.train, seed=stream_seed(seed, STREAM), mixture=roles.prompts.mixture)
    train = stream.next(inputs.num_prompts or len(roles.prompts.train))
    numbers: dict[str, int] = {}
    for prompts, is_held_out in ((train, False), (roles.prompts.held_out, True)):
        for start, end in pairwise([*starts_of_chunks(len(prompts), inputs.config), len(prompts)]):
            chunk = prompts[start:end]
            yield Chunk(chunk, [numbers.setdefault(each.text, len(numbers)) for each in chunk], is_held_out)


def sample_part(inputs: CriticInputs, number: int, chunk: Chunk) -> Part:
    """Sample and score a chunk's responses; their returns are as in PPO's first update."""
    started = time.perf_counter()
    trainer = inputs.trainer
    missing_eos = inputs.roles.missing_eos
    rollout = trainer.sample(chunk.prompts, STREAM, number)
    experience = trainer.evaluate(trainer.score(rollout, chunk.prompts, "reward", number))
    unscored = rollout.num_responses - len(experience.scores)
    whole = (~experience.rollout.was_cut).nonzero().squeeze(1)
    if inputs.config.rollout.masks_truncated and len(whole):  # PPO does not train on truncated responses
        experience = experience.select(whole)
    numbers = torch.tensor(chunk.numbers)[experience.rollout.group.cpu()]
    return Part.of(
        experience,
        numbers,
        is_held_out=chunk.is_held_out,
        missing_eos={} if missing_eos is None else missing_eos.state_dict(),
        unscored=unscored,
        seconds=time.perf_counter() - started,
    )

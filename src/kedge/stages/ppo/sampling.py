"""The sampling of an update: prompts, responses and their scores, in several rounds if groups have no spread.

    prompts ─▶ rollout ─▶ scores ─▶ groups with spread ─▶ enough? ─▶ batch
       ▲                                                    │ no
       └────────────────────────────────────────────────────┘

Source: DAPO (arXiv 2503.14476) §3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kedge.algorithm.experience import Rollout
from kedge.data import Prompt
from kedge.errors import UnscoredError
from kedge.logs.stopwatch import Stopwatch
from kedge.rewards.score import ScoredRollout, join_scored
from kedge.stages.ppo.batch import SampledBatch
from kedge.stages.ppo.steps import PpoSteps

__all__ = ["Prompts", "Sampling", "next_round_size"]


class Prompts(Protocol):
    """Where prompts are drawn from, such as a `PromptStream`."""

    def next(self, num_prompts: int) -> list[Prompt]:
        """The next prompts."""
        ...


@dataclass
class _Round:
    """A round of sampling.

    Attributes:
        prompts: Its prompts.
        drawn: The responses.
        greedy: The greedy response to each prompt, if the advantage needs its score.
        scored: The responses that have a score; None if no response has one.
        failures: The failed calls of reward functions, if no response has a score; else they are in `scored`.
    """

    prompts: list[Prompt]
    drawn: Rollout
    greedy: Rollout | None = None
    scored: ScoredRollout | None = None
    failures: list[Mapping[str, float]] = field(default_factory=list)

    @property
    def rollouts(self) -> list[Rollout]:
        """Everything that was sampled."""
        return [self.drawn] if self.greedy is None else [self.drawn, self.greedy]


class Sampling:
    """Draws prompts, samples and scores responses, and chooses those to train on.

    Args:
        prompts: The stream of prompts. How many an update draws depends on the scores.
        check: Called with the responses of each round before they are scored.
        say: Prints a line to the user.
    """

    def __init__(self, prompts: Prompts, *, check: Callable[[Rollout], None], say: Callable[[str], None]) -> None:
        self._prompts, self._check, self._say = prompts, check, say
        self._said: set[str] = set()

    def batch(self, now: PpoSteps, update: int, clock: Stopwatch) -> SampledBatch:
        """The responses of an update.

        Args:
            now: The update's steps.
            update: Its number.
            clock: Times the phases `rollout` and `reward`.

        Raises:
            RewardError: A reward failed or returned invalid scores.
            UnscoredError: No response of the first round has a score.
        """
        wanted, size = now.config.rollout.num_prompts, now.config.rollout.num_prompts
        mode = now.config.ppo.constant_groups if now.trains_policy(update) else "keep"
        rounds: list[_Round] = []
        while True:
            rounds.append(self._round(now, update, len(rounds), size, clock))
            batch = _join(rounds, pad_id=now.pad_id)
            found = int(batch.groups.has_spread.sum())
            if mode != "resample" or found >= wanted or len(rounds) > now.config.ppo.max_resamples:
                break
            size = next_round_size(wanted, len(batch.prompts), found)
        return batch if mode == "keep" else self._with_spread(batch, wanted, update)

    def metrics(self) -> dict[str, float]:
        """Nothing: the clock of `batch` has it all."""
        return {}

    def _round(self, now: PpoSteps, update: int, number: int, size: int, clock: Stopwatch) -> _Round:
        """Draw prompts, sample and score; with a greedy response per prompt if the advantage needs its score."""
        stream = ("resample", number) if number else ()
        with clock.phase("rollout"):
            prompts = self._prompts.next(size)
            done = _Round(prompts, now.sample(prompts, update, *stream))
        try:
            done.scored = self._score(now, done.drawn, prompts, update, *stream, clock=clock)
            if now.needs_baseline:
                done.scored = self._compared(now, done, done.scored, update, *stream, clock=clock)
        except UnscoredError as error:
            if number == 0:
                raise
            done.scored = None
            done.failures.append(error.failures)
        return done

    def _compared(
        self, now: PpoSteps, part: _Round, scored: ScoredRollout, update: int, *stream: str | int, clock: Stopwatch
    ) -> ScoredRollout:
        """The responses that have a score together with the greedy response to their prompt."""
        with clock.phase("rollout"):
            part.greedy = now.sample_greedy(part.prompts, update)
        try:
            greedy = self._score(now, part.greedy, part.prompts, update, *stream, "greedy", clock=clock)
        except UnscoredError:
            part.failures.append(scored.terms.failures)
            raise
        return scored.compared_with(greedy)

    def _score(
        self,
        now: PpoSteps,
        rollout: Rollout,
        prompts: Sequence[Prompt],
        update: int,
        *stream: str | int,
        clock: Stopwatch,
    ) -> ScoredRollout:
        with clock.phase("reward"):
            self._check(rollout)
            return now.score(rollout, prompts, update, *stream)

    def _with_spread(self, batch: SampledBatch, wanted: int, update: int) -> SampledBatch:
        """The same responses; the update trains on the first `wanted` groups with spread."""
        groups = batch.groups
        found = groups.group[groups.has_spread][:wanted]
        is_flat = len(found) == 0
        rows = groups.among(groups.group[:wanted] if is_flat else found).nonzero().squeeze(1).tolist()
        if len(rows) < batch.num_scored or is_flat:
            batch = replace(batch, trained=batch.scored.select(rows), is_flat=is_flat)
        self._report(batch, len(found), wanted, update)
        return batch

    def _report(self, batch: SampledBatch, found: int, wanted: int, update: int) -> None:
        """Say, once of each kind, how many responses are not trained on, and that groups are missing."""
        groups, rounds = len(batch.groups.group), batch.num_rounds
        constant = int((~batch.groups.has_spread).sum())
        if batch.num_unused:
            more = f" after {rounds} rounds of sampling" if rounds > 1 else ""
            self._once(
                "unused",
                f"update {update}: the responses of {constant} of {groups} groups all score the same{more}; "
                f"{batch.num_unused} of {batch.num_scored} responses are not trained on",
            )
        if batch.is_flat:
            self._once("flat", f"update {update}: no group has spread, and no step is taken")
        elif rounds > 1 and found < wanted:
            self._once("short", f"update {update}: ppo.max_resamples is reached with {found} of {wanted} groups")

    def _once(self, kind: str, line: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(f"{line} (shown once; later updates: group/… in metrics.jsonl).")


def next_round_size(wanted: int, drawn: int, found: int) -> int:
    """Prompts of the next round: as many as the share of groups with spread so far makes enough, at most `wanted`.

    Args:
        wanted: Groups with spread that the update needs, more than `found`.
        drawn: Prompts drawn so far.
        found: Groups with spread among them.
    """
    return min(wanted, math.ceil((wanted - found) * drawn / found)) if found else wanted


def _join(rounds: Sequence[_Round], *, pad_id: int) -> SampledBatch:
    """All rounds as one; the groups are numbered by the places of their prompts among those of all rounds."""
    prompts: list[Prompt] = []
    parts: list[ScoredRollout] = []
    for each in rounds:
        if each.scored is not None:
            parts.append(each.scored.renumbered(len(prompts)))
        prompts += each.prompts
    rollouts = [rollout for each in rounds for rollout in each.rollouts]
    scored = join_scored(parts, pad_id=pad_id)
    lost = [failures for each in rounds for failures in each.failures]
    scored = replace(scored, terms=scored.terms.with_failures(*lost))
    num_sampled = sum(each.drawn.num_responses for each in rounds)
    return SampledBatch(prompts, rollouts, num_sampled, scored, scored, num_rounds=len(rounds))

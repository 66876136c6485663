"""Samples an update's prompts, responses and scores, in several rounds if groups have no spread.

    prompts ─▶ rollout ─▶ scores ─▶ groups with spread ─▶ enough? ─▶ batch
       ▲                                                    │ no
       └────────────────────────────────────────────────────┘

Source: DAPO (arXiv 2503.14476) §3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from kedge.algorithm.experience import Experience, Rollout
from kedge.algorithm.shaping import GroupScores, group_scores
from kedge.data import Prompt, PromptStream
from kedge.logs.experience_metrics import describe_groups, describe_lengths, describe_responses
from kedge.rewards.score import ScoredRollout, join_scored
from kedge.stages.ppo.trainer import Trainer
from kedge.training.checkpoint.loop import CheckpointedLoop
from kedge.training.runtime import Stopwatch, stream_seed
from kedge_base.errors import UnscoredError


@dataclass(frozen=True)
class SampledBatch:
    """The responses of an update.

    Attributes:
        prompts: The prompts that were drawn; groups are indices into them.
        rollouts: Everything that was sampled, greedy responses included.
        num_sampled: Number of responses that were sampled, without the greedy ones.
        scored: The responses that have a score and, if needed, a scored greedy response to the same prompt.
        trained: The responses that the update trains on, or only evaluates if it `is_flat` or all are masked.
        is_flat: Groups without spread are excluded, and no other group was found: no step is taken.
        num_rounds: Number of sampling rounds.
        num_masked: Number of cut-off responses excluded from the steps; None if they are not excluded.
        masked_share: Their share of the responses that the update would otherwise train on.
        takes_steps: False if no response is left to train on.
        costs: Metrics that the update's clock lacks: sending the weights to the engine, resting prompts, and with
            sampling ahead the seconds of its phases.
    """

    prompts: Sequence[Prompt]
    rollouts: Sequence[Rollout]
    num_sampled: int
    scored: ScoredRollout
    trained: ScoredRollout
    is_flat: bool = False
    num_rounds: int = 1
    num_masked: int | None = None
    masked_share: float | None = None
    takes_steps: bool = True
    costs: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and responses that were sampled, without padding."""
        return sum(rollout.num_tokens for rollout in self.rollouts)

    @property
    def num_scored(self) -> int:
        """Responses that have a score, and could be trained on."""
        return self.scored.rollout.num_responses

    @property
    def num_unused(self) -> int:
        """Responses that have a score, and that the update does not train on because of their group."""
        masked = (self.num_masked or 0) if self.takes_steps else 0
        return self.num_scored if self.is_flat else self.num_scored - self.trained.rollout.num_responses - masked

    @cached_property
    def groups(self) -> GroupScores:
        """The scores by prompt."""
        return group_scores(self.scored.total_scores, self.scored.rollout.group)

    def masked(self, experience: Experience) -> tuple[SampledBatch, Experience]:
        """Exclude the responses that were cut off: their scores remain in the baselines, but no step is taken on them.

        Args:
            experience: The experience of `trained`; the advantages were estimated with all responses.

        Source: DAPO (arXiv 2503.14476) §3.4, overlong filtering.
        """
        rollout = experience.rollout
        rows = (~rollout.was_cut).nonzero().squeeze(1)
        num_masked = rollout.num_responses - len(rows)
        batch = replace(self, num_masked=num_masked, masked_share=num_masked / rollout.num_responses)
        if num_masked and len(rows):
            return replace(batch, trained=self.trained.select(rows.tolist())), experience.select(rows)
        return replace(batch, takes_steps=self.takes_steps and num_masked == 0), experience

    def metrics(self, *, compares_groups: bool = False) -> dict[str, float]:
        """Terms of the reward, spread of the groups, and figures of all responses if not all are trained on.

        Args:
            compares_groups: The advantage compares the responses to a prompt: `group/single` says if it cannot.
        """
        rollout = self.scored.rollout
        scores = self.scored.total_scores
        groups = describe_groups(self.groups, rollout, scores)
        if groups:
            groups["group/resamples"] = self.num_rounds - 1
            groups["group/unused"] = self.num_unused
        if groups or compares_groups:
            groups["group/single"] = float((self.groups.count == 1).double().mean())
        masked = {} if self.masked_share is None else {"response/masked": self.masked_share}
        return {
            **(describe_responses(rollout, scores) if self.num_unused or self.num_masked else {}),
            **masked,
            **(describe_lengths(rollout, scores) if self.scored.reasons is not None else {}),
            **self.scored.metrics(),
            "reward/unscored": float(self.num_sampled - self.num_scored),
            "group/sampled": self.num_sampled,
            **groups,
        }


def prompt_stream(trainer: Trainer, loop: CheckpointedLoop) -> PromptStream:
    """Open the stream of a run's prompts; it is resumed with the run."""
    roles = trainer.roles
    data = trainer.run_settings.config.data
    seed = stream_seed(trainer.run_settings.seed, "prompts")
    prompts = PromptStream(
        roles.prompts.train,
        seed=seed,
        curriculum=data.curriculum,
        mixture=roles.prompts.mixture,
        rest=data.draw.parameter or 0,
        by_spread=data.draw.name == "by_spread",
    )
    loop.register("prompts", prompts)
    return prompts


class Sampling:
    """Draws prompts, samples and scores responses, and chooses those to train on.

    Args:
        prompts: What `batch` draws from; None if it is not called. How many an update draws depends on the
            scores.
        trainer: Samples and scores.
        check: Called with the responses of each round before they are scored.
        say: Prints a line to the user.
        note: Called with the prompts of groups and the variance of each one's scores; returns the share of prompts
            that the next pass leaves out. None where prompts are not chosen by their scores.
    """

    def __init__(
        self,
        prompts: PromptStream | None,
        trainer: Trainer,
        *,
        check: Callable[[Rollout], None] = lambda _: None,
        say: Callable[[str], None],
        note: Callable[[Sequence[Prompt], Sequence[float]], float] | None = None,
    ) -> None:
        self._prompts = prompts
        self._trainer = trainer
        self._check = check
        self._say = say
        self._note = note
        self._shown: set[str] = set()

    def batch(self, update: int, clock: Stopwatch) -> SampledBatch:
        """Sample an update's responses, timing its phases; errors as in `sampled`."""
        costs = self._trainer.publish(update - 1)
        assert self._prompts is not None
        batch = self.sampled(self._trainer, clock, self._prompts.next)
        if self._note is not None:
            groups = batch.groups
            compared = groups.count > 1
            variances = (groups.std.square() * groups.has_spread)[compared].tolist()
            resting = self._note([batch.prompts[number] for number in groups.group[compared].tolist()], variances)
            costs = {**costs, "prompt/resting": resting}
        return replace(batch, costs=costs)

    def given(
        self, rollout: Rollout, prompts: Sequence[Prompt], clock: Stopwatch, *, scores: Sequence[object] | None = None
    ) -> SampledBatch:
        """Prepare existing responses for the trainer's current update.

        Args:
            rollout: The responses.
            prompts: The prompts, indexed by the rollout's groups.
            clock: Times the phases.
            scores: One per response; None for those of the run's reward.

        Raises:
            RewardError: A reward failed, or scores are invalid.
            UnscoredError: No response has a score.
        """
        trainer = self._trainer
        rollouts = [rollout]
        scored = self._score(trainer, rollouts, prompts, (), [], clock, scores=scores, is_given=True)
        batch = SampledBatch(prompts, rollouts, rollout.num_responses, scored, scored)
        if not trainer.trains_policy or trainer.settings.ppo.constant_groups.name == "keep":
            return batch
        return self._with_spread(batch, len(prompts), trainer.update)

    def sampled(self, trainer: Trainer, clock: Stopwatch, draw: Callable[[int], list[Prompt]]) -> SampledBatch:
        """Sample the responses of the trainer's current update.

        Args:
            trainer: Samples and scores.
            clock: Times the phases.
            draw: Returns as many prompts as a round needs.

        Raises:
            RewardError: A reward failed or returned invalid scores.
            UnscoredError: No response has a score.
        """
        wanted = size = trainer.settings.rollout.num_prompts
        mode = trainer.settings.ppo.constant_groups.name if trainer.trains_policy else "keep"
        prompts: list[Prompt] = []
        rollouts: list[Rollout] = []
        parts: list[ScoredRollout] = []
        failures: list[Mapping[str, float]] = []
        num_sampled = num_rounds = 0
        while True:
            with clock.phase("rollout"):
                drawn = draw(size)
                names = ("resample", num_rounds) if num_rounds else ()
                sampled = [trainer.sample(drawn, "rollout", trainer.update, *names)]
            try:
                scored = self._score(trainer, sampled, drawn, names, failures, clock)
                parts.append(scored.renumbered(len(prompts)))
            except UnscoredError as error:
                if not num_rounds:
                    raise
                failures.append(error.failures)
            prompts += drawn
            rollouts += sampled
            num_sampled += sampled[0].num_responses
            num_rounds += 1
            scored = join_scored(parts, pad_id=trainer.pad_id)
            if failures:
                scored = replace(scored, terms=scored.terms.with_failures(*failures))
            batch = SampledBatch(prompts, rollouts, num_sampled, scored, scored, num_rounds=num_rounds)
            if mode == "keep":
                return batch
            found = int(batch.groups.has_spread.sum())
            if mode == "drop" or found >= wanted or num_rounds > trainer.settings.ppo.max_resamples:
                return self._with_spread(batch, wanted, trainer.update)
            size = next_round_size(wanted, len(prompts), found)

    def _score(
        self,
        trainer: Trainer,
        sampled: list[Rollout],
        prompts: Sequence[Prompt],
        names: tuple[str | int, ...],
        failures: list[Mapping[str, float]],
        clock: Stopwatch,
        *,
        scores: Sequence[object] | None = None,
        is_given: bool = False,
    ) -> ScoredRollout:
        """Score a round's responses; if the advantage needs it, sample and score a greedy response to each prompt."""
        streams = ("rollout", trainer.update, *names)  # greedy episodes get the seeds of the sampled ones
        names = ("reward", trainer.update, *names)
        with clock.phase("reward"):
            self._check(sampled[0])
            scored = trainer.score(sampled[0], prompts, *names, scores=scores)
        if not trainer.settings.samples_greedy:
            return scored
        # Prompts passed in by the caller may be tokenized differently, and their responses may have a different length
        # limit.
        given: dict[str, Any] = {}
        if is_given:
            rollout = sampled[0]
            rows = [rollout.group.tolist().index(group) for group in range(len(prompts))]
            given["prompt_ids"] = [rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist() for row in rows]
            given["max_new_tokens"] = rollout.response_ids.shape[1]
        with clock.phase("rollout"):
            sampled.append(trainer.sample(prompts, *streams, groups=range(len(prompts)), greedy=True, **given))
        with clock.phase("reward"):
            self._check(sampled[1])
            try:
                greedy = trainer.score(sampled[1], prompts, *names, "greedy")
            except UnscoredError:
                failures.append(scored.terms.failures)
                raise
        return scored.compared_with(greedy)

    def _with_spread(self, batch: SampledBatch, wanted: int, update: int) -> SampledBatch:
        """Restrict training to the first `wanted` groups with spread; the responses are unchanged."""
        groups = batch.groups
        found = groups.group[groups.has_spread][:wanted]
        is_flat = len(found) == 0
        rows = groups.among(groups.group[:wanted] if is_flat else found).nonzero().squeeze(1).tolist()
        if len(rows) < batch.num_scored or is_flat:
            batch = replace(batch, trained=batch.scored.select(rows), is_flat=is_flat, takes_steps=not is_flat)
        self._report(batch, len(found), wanted, update)
        return batch

    def _report(self, batch: SampledBatch, found: int, wanted: int, update: int) -> None:
        """Print, once of each kind, how many responses are not trained on, and that groups are missing."""
        rounds = batch.num_rounds
        has_spread = batch.groups.has_spread
        if batch.num_unused:
            more = f" after {rounds} rounds of sampling" if rounds > 1 else ""
            self._once(
                "unused",
                f"update {update}: the responses of {int((~has_spread).sum())} of {len(has_spread)} groups all score "
                f"the same{more}; {batch.num_unused} of {batch.num_scored} responses are not trained on",
            )
        if batch.is_flat:
            self._once("flat", f"update {update}: no group has spread, and no step is taken")
        elif rounds > 1 and found < wanted:
            self._once(
                "short",
                f"update {update}: the rounds of ppo.constant_groups=resample ended with {found} of {wanted} groups",
            )

    def _once(self, kind: str, line: str) -> None:
        if kind not in self._shown:
            self._shown.add(kind)
            self._say(f"{line} (shown once; later updates: group/… in metrics.jsonl).")


def next_round_size(wanted: int, drawn: int, found: int) -> int:
    """Estimate how many prompts the next round needs from the share of groups with spread so far; at most `wanted`.

    Args:
        wanted: Groups with spread that the update needs, more than `found`.
        drawn: Prompts drawn so far.
        found: Groups with spread among them.
    """
    return min(wanted, math.ceil((wanted - found) * drawn / found)) if found else wanted

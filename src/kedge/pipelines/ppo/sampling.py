"""The sampling of an update: prompts, responses and their scores, in several rounds if groups have no spread.

    prompts ─▶ rollout ─▶ scores ─▶ groups with spread ─▶ enough? ─▶ batch
       ▲                                                    │ no
       └────────────────────────────────────────────────────┘

Source: DAPO (arXiv 2503.14476) §3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from kedge.algorithm.experience import Rollout
from kedge.data import Prompt, PromptStream
from kedge.errors import UnscoredError
from kedge.logs.stopwatch import Stopwatch
from kedge.pipelines.ppo.batch import SampledBatch
from kedge.pipelines.ppo.steps import PpoSteps
from kedge.rewards.score import ScoredRollout, join_scored

__all__ = ["Sampling", "next_round_size"]


class Sampling:
    """Draws prompts, samples and scores responses, and chooses those to train on.

    Args:
        prompts: The stream of prompts. How many an update draws depends on the scores.
        check: Called with the responses of each round before they are scored.
        say: Prints a line to the user.
    """

    def __init__(self, prompts: PromptStream, *, check: Callable[[Rollout], None], say: Callable[[str], None]) -> None:
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
        mode = now.config.ppo.grouping.constant_groups if now.trains_policy(update) else "keep"
        drawn: list[Prompt] = []
        rollouts: list[Rollout] = []
        parts: list[ScoredRollout] = []
        while True:
            with clock.phase("rollout"):
                prompts = self._prompts.next(size)
                rollouts.append(now.sample(prompts, update, len(rollouts)))
                self._check(rollouts[-1])
            with clock.phase("reward"):
                parts += _scored(now, rollouts[-1], prompts, update, len(rollouts) - 1, first_group=len(drawn))
            drawn += prompts
            scored = join_scored(parts, pad_id=now.pad_id)
            batch = SampledBatch(drawn, rollouts, scored, scored)
            found = int(batch.groups.has_spread.sum())
            if mode != "resample" or found >= wanted or len(rollouts) > now.config.ppo.grouping.max_resamples:
                break
            size = next_round_size(wanted, len(drawn), found)
        return batch if mode == "keep" else self._with_spread(batch, wanted, update)

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
        groups, rounds = len(batch.groups.group), len(batch.rollouts)
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
            self._once(
                "short",
                f"update {update}: trains on {found} groups instead of {wanted}, the limit of ppo.max_resamples",
            )

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


def _scored(
    now: PpoSteps, rollout: Rollout, prompts: list[Prompt], update: int, attempt: int, *, first_group: int
) -> list[ScoredRollout]:
    """A round's responses that have a score, with the groups numbered from `first_group`; none is an empty list."""
    try:
        scored = now.score(rollout, prompts, update, attempt)
    except UnscoredError:
        if attempt == 0:
            raise
        return []
    rows = scored.rollout
    return [replace(scored, rollout=replace(rows, group=rows.group + first_group))]

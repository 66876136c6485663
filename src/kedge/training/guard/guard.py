"""What becomes of figures that must not be learnt from: the run stops, leaves them out, or goes back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from kedge.algorithm.experience import Experience, Rollout
from kedge.errors import NonfiniteScoreError, NumericsError
from kedge.training.guard.nonfinite import Offender, find_in_experience, find_in_rollout
from kedge.training.guard.spikes import SpikeWatch

__all__ = ["MAX_RATIO", "Guard", "Incident", "Judge", "Policy", "Rules", "largest_ratio", "refuse_nonfinite"]

Policy = Literal["stop", "skip", "rollback"]

Judge = Callable[[int, Mapping[str, float], Callable[[], Offender]], bool]
"""Whether an optimiser step may be taken: its number in the update, from 0, its figures, and a search for who is to
blame for them."""

MAX_RATIO: Mapping[str, float] = {"fp32": 1.01, "bf16": 1.5}
"""How far apart rounding alone can drive two probabilities of one token, by the number format.

In fp32 they differ by 1e-4 and less. In bf16, whose numbers have 8 bits, ratios of 0.89 to 1.09 are published, and the
largest of ten thousand tokens came to 1.3. Another temperature or a position that is off by one make ratios of 2 and
more.
"""

CONSEQUENCES: Mapping[Policy, str] = {
    "skip": "the rest of this update is left out",
    "rollback": "the weights go back to the newest checkpoint, and the run on to the next prompts",
}


@dataclass(frozen=True)
class Rules:
    """What is to happen when a figure must not be learnt from.

    Attributes:
        on_nonfinite: When it is NaN or infinite.
        on_spike: When it is far outside of what the run is used to.
        max_skips: Updates in a row of which something may be left out; one more ends the run.
        max_ratio: Largest ratio, either way, of what sampler and trainer may think of a token.
        strict: Whether the run stops where it would warn.
        num_steps: Optimiser steps of a whole update.
    """

    on_nonfinite: Policy = "stop"
    on_spike: Policy = "skip"
    max_skips: int = 3
    max_ratio: float = MAX_RATIO["fp32"]
    strict: bool = False
    num_steps: int = 1


@dataclass(frozen=True)
class Incident:
    """Something that went wrong, and what became of it.

    Attributes:
        update: In which update.
        kind: A figure that is not finite, one that is far too large, or sampler and trainer that disagree.
        what: The figure, and where it stands.
        consequence: What the run does about it.
        row: The response to blame, counted from 0; None where there is none.
        token: Which token of it.
        evidence: All responses of the update, as far as they are known.
        figures: Those of the step that was not taken.
    """

    update: int
    kind: Literal["nonfinite", "spike", "mismatch"]
    what: str
    consequence: Literal["stop", "skip", "rollback", "warn"]
    row: int | None = None
    token: int | None = None
    evidence: Rollout | Experience | None = None
    figures: Mapping[str, float] = field(default_factory=dict)


class UpdateDropped(Exception):
    """The update is left out from here on: its experience is no good. It never leaves the guard."""


class Guard:
    """Looks at each update before anything is learnt from it.

        with guard.watching(update):
            guard.check_rollout(rollout)
            guard.check_experience(experience)
            ppo_update(…, judge=guard.allows)

    Args:
        rules: What happens when.
        spikes: What a spike is; None watches for none.
        record: Keeps an incident.
        warn: Tells a user.
        roll_back: Puts weights and optimizer back to where they were safe.
        find_dead_weight: Names a weight that is not finite, if there is one.
    """

    def __init__(
        self,
        rules: Rules,
        *,
        spikes: SpikeWatch | None = None,
        record: Callable[[Incident], None],
        warn: Callable[[str], None],
        roll_back: Callable[[], None],
        find_dead_weight: Callable[[], str | None],
    ) -> None:
        self._rules, self._spikes = rules, spikes
        self._record, self._warn = record, warn
        self._roll_back, self._find_dead_weight = roll_back, find_dead_weight
        self._in_a_row = 0
        self._told_mismatch = False
        self._begin(0)

    def _begin(self, update: int) -> None:
        self._update, self._taken = update, 0
        self._evidence: Rollout | Experience | None = None
        self._consequence: Policy | None = None
        self.dropped = False

    @contextmanager
    def watching(self, update: int) -> Iterator[None]:
        """One update. Where its experience is no good, the block ends there; `dropped` tells it.

        Raises:
            NumericsError: The rules stop the run, or nothing else is left.
        """
        self._begin(update)
        try:
            yield
        except NonfiniteScoreError as error:
            self._settle("nonfinite", str(error), row=error.row)
            self.dropped = True
        except UpdateDropped:
            self.dropped = True
        self._in_a_row = self._in_a_row + 1 if self._consequence else 0

    def check_rollout(self, rollout: Rollout) -> None:
        """See that the sampler's figures are finite, before anybody is asked for scores."""
        self._evidence = rollout
        self._refuse(find_in_rollout(rollout))

    def check_experience(self, experience: Experience) -> None:
        """See that all that will be learnt from is finite, and that sampler and trainer agree."""
        self._evidence = experience
        self._refuse(find_in_experience(experience))
        rollout = experience.rollout
        distance = torch.where(rollout.response_mask, experience.old_logprobs - rollout.logprobs, 0.0).abs()
        row, token = divmod(int(distance.argmax()), distance.shape[1])
        ratio = math.exp(min(float(distance[row, token]), 20.0))
        self._compare(ratio, "when it is trained on and when it was sampled", row, token)

    def allows(self, step: int, figures: Mapping[str, float], search: Callable[[], Offender]) -> bool:
        """Whether an optimiser step may be taken; see `Judge`. After one that may not, the rest is left out.

        Raises:
            NumericsError: The rules stop the run, or nothing else is left.
        """
        if step == 0:
            self._compare(largest_ratio(figures), "in the first step and before it, under the same weights")
        if wrong := _nonfinite(figures):
            offender = search()
            blamed = not math.isfinite(offender.figure)
            told = str(offender) if blamed else "each response alone is finite when it is computed again"
            place = {"row": offender.row, "token": offender.token} if blamed else {}
            self._settle("nonfinite", f"{wrong} in step {step + 1}: {told}", figures=figures, **place)
        elif self._spikes and (spike := self._spikes.find(figures)):
            offender = search()
            self._settle("spike", f"{spike}; of it, {offender}", row=offender.row, figures=figures)
        else:
            self._taken += 1
            if self._spikes:
                self._spikes.add(figures)
            return True
        return False

    def metrics(self) -> dict[str, float]:
        """What was left out of the update."""
        left_out = self._rules.num_steps - self._taken if self._consequence else 0
        return {"guard/skipped_steps": left_out, "guard/rolled_back": float(self._consequence == "rollback")}

    def state(self) -> dict[str, Any]:
        """What the guard remembers of the updates so far, for a checkpoint."""
        return {"in_a_row": self._in_a_row, "spikes": self._spikes.state() if self._spikes else None}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken."""
        self._in_a_row = state["in_a_row"]
        if self._spikes and state["spikes"]:
            self._spikes.restore(state["spikes"])

    def _refuse(self, offender: Offender | None) -> None:
        if offender is not None:
            self._settle("nonfinite", str(offender), row=offender.row, token=offender.token)
            raise UpdateDropped

    def _settle(self, kind: Literal["nonfinite", "spike"], what: str, **details: Any) -> None:
        """Keep an incident, and do about it what the rules say."""
        policy = self._rules.on_spike if kind == "spike" else self._rules.on_nonfinite
        end = self._reason_to_end(kind, policy)
        self._note(kind, what, "stop" if end else policy, **details)
        if end:
            raise NumericsError(f"update {self._update}: {what}; {end}")
        if policy == "rollback":
            self._roll_back()
            if dead := self._find_dead_weight():
                raise NumericsError(f"update {self._update}: {what}; {dead}, in the newest checkpoint, too")
        self._consequence = policy
        self._warn(f"update {self._update}: {what}; {CONSEQUENCES[policy]}")

    def _reason_to_end(self, kind: Literal["nonfinite", "spike"], policy: Policy) -> str | None:
        dead = self._find_dead_weight() if kind == "nonfinite" and policy != "rollback" else None
        if dead:
            return f"{dead}, which nothing that is left out can mend: start again from weights that are whole"
        if policy == "stop":
            return f"nothing is learnt from it (ppo.on_{kind}=skip would go on without it)"
        if self._in_a_row >= self._rules.max_skips:
            return f"something was left out of the {self._in_a_row} updates before, too: ppo.max_skips ends the run"
        return None

    def _compare(self, ratio: float, when: str, row: int | None = None, token: int | None = None) -> None:
        """Doubt a run whose sampler and trainer think differently of the same token; say so once."""
        apart = ratio > self._rules.max_ratio
        if not apart or (self._told_mismatch and not self._rules.strict):
            return
        what = (
            f"a token's probabilities {when} are {ratio:.4g} to 1, where rounding explains {self._rules.max_ratio:g}: "
            "sampler and trainer disagree; do they have the same weights, temperature and positions?"
        )
        self._note("mismatch", what, "stop" if self._rules.strict else "warn", row=row, token=token)
        if self._rules.strict:
            raise NumericsError(f"update {self._update}: {what}")
        self._told_mismatch = True
        self._warn(f"update {self._update}: {what} (This is said once; --strict stops.)")

    def _note(self, kind: Any, what: str, consequence: Any, **details: Any) -> None:
        self._record(Incident(self._update, kind, what, consequence, evidence=self._evidence, **details))


def refuse_nonfinite(step: int, figures: Mapping[str, float], search: Callable[[], Offender]) -> bool:
    """The judge of an update that nobody guards: a step that would turn the weights into NaN ends it.

    Raises:
        NumericsError: A figure is not finite.
    """
    if wrong := _nonfinite(figures):
        raise NumericsError(f"{wrong}: the step was not taken, and the weights are those before it; {search()}")
    return True


def largest_ratio(figures: Mapping[str, float]) -> float:
    """How far the ratios of a step are from 1, either way."""
    return max(figures["policy/ratio_max"], 1 / figures["policy/ratio_min"])


def _nonfinite(figures: Mapping[str, float]) -> str | None:
    return next((f"{name} is {figure}" for name, figure in figures.items() if not math.isfinite(figure)), None)

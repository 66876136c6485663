"""Guards a run against non-finite values, loss spikes, and a sampler that disagrees with the trainer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kedge.algorithm.experience import Experience, Rollout
from kedge_base.errors import NonfiniteScoreError, NumericsError


@dataclass(frozen=True)
class BadValue:
    """A value that must not be trained on, and its location.

    Attributes:
        what: The name of the quantity.
        value: The value.
        row: The response, counted from 0; None if it does not belong to a single one.
        token: The token of the response, counted from 0; None if it belongs to the whole response.
    """

    what: str
    value: float
    row: int | None = None
    token: int | None = None

    def __str__(self) -> str:
        """`the critic's value at token 3 of response 2 is nan`."""
        place = "" if self.token is None else f" at token {self.token}"
        place += "" if self.row is None else f" of response {self.row}"
        return f"{self.what}{place} is {self.value:.4g}"


Action = Literal["stop", "skip", "rollback"]

StepCheck = Callable[[int, Mapping[str, float], Callable[[], BadValue]], bool]
"""Decides whether to take an optimizer step. Arguments: its number in the update (from 0), its metrics, and a function
that searches for the response that caused a bad value.
"""

MAX_K3: Mapping[str, float] = {"fp32": 1e-6, "bf16": 1e-2}
"""Largest k3 of sampler and trainer, in nats per token, that rounding can explain, by number format.

Two programs' kernels gave 5e-13 in fp32 and 1.3e-4 in bf16. A sampler that missed an update gave 0.4 after large steps;
small steps first show in the largest ratio.
"""

CONSEQUENCES: Mapping[Action, str] = {
    "skip": "the rest of this update is skipped",
    "rollback": "the weights are restored from the newest checkpoint, and the run continues with the next prompts",
}


NORMAL = 1.4826
"""Ratio of standard deviation to median absolute deviation of a normal distribution."""

SMALLEST_SPREAD = 0.01
"""Lower bound of the spread, so that rounding errors in a nearly constant history do not count as spikes: 1% of a
norm, 0.01 of a loss."""


@dataclass(frozen=True)
class Incident:
    """A problem and its consequence.

    Attributes:
        update: The number of the update.
        kind: A non-finite value, a spike, or a mismatch between sampler and trainer.
        what: The value and its location.
        consequence: The action taken.
        row: The affected response, counted from 0; None if it is not a single one.
        token: The token within the response.
        evidence: All responses of the update, if sampled.
        figures: The metrics of the step that was not taken.
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
    """Ends the current update, because its experience must not be trained on. Always caught by the guard."""


@dataclass(eq=False, kw_only=True)
class Guard:
    """Checks each update before the policy is trained on it.

        with guard.watching(update, num_passes=…, num_minibatches=…):
            guard.check_rollout(rollout)
            guard.check_experience(experience)
            PpoUpdate(…, check_step=guard.allows, on_step=guard.takes).run()

    Args:
        on_nonfinite: Action on NaN or infinity.
        on_spike: Action on a step far outside the run's history.
        max_skips: Allowed number of consecutive updates with skipped steps; the next one stops the run.
        max_ratio: Largest allowed probability ratio or inverse ratio between sampler and trainer.
        max_k3: Largest allowed k3 between the two, nats per token.
        strict: Stop the run instead of warning.
        spikes: Detects spikes; None disables the check.
        record: Stores an incident.
        warn: Prints a line to the user.
        roll_back: Restores weights and optimizer from the newest checkpoint.
        find_bad_weight: Returns a description of a non-finite weight, or None.
        begin_changes: Called before the weights change, in each step.

    Attributes:
        dropped: The update's experience must not be trained on.
        evidence: The responses that the rows of an incident are counted in.
    """

    on_nonfinite: Action
    on_spike: Action
    max_skips: int
    max_ratio: float
    max_k3: float = math.inf
    strict: bool
    spikes: SpikeDetector | None
    record: Callable[[Incident], None]
    warn: Callable[[str], None]
    roll_back: Callable[[], None]
    find_bad_weight: Callable[[], str | None]
    begin_changes: Callable[[], None] = lambda: None
    _in_a_row = 0
    _warned_of_mismatch = False

    def __post_init__(self) -> None:
        self._begin(0, 0, 0)

    def _begin(self, update: int, num_passes: int, num_minibatches: int) -> None:
        self._update = update
        self._num_passes = num_passes
        self._num_minibatches = num_minibatches
        self._taken = 0
        self.evidence: Rollout | Experience | None = None
        self._consequence: Action | None = None
        self._ratios_start_at_1 = True
        self.dropped = False

    @contextmanager
    def watching(self, update: int, *, num_passes: int, num_minibatches: int) -> Iterator[None]:
        """Context of one update. If its experience must not be trained on, leaves the block and sets `dropped`.

        Args:
            update: Its number.
            num_passes: Passes over its responses, if it is complete.
            num_minibatches: Optimizer steps of each, if there are as many responses.

        Raises:
            NumericsError: The run must stop.
        """
        self._begin(update, num_passes, num_minibatches)
        try:
            yield
        except NonfiniteScoreError as error:
            self._settle("nonfinite", str(error), row=error.row)
            self.dropped = True
        except UpdateDropped:
            self.dropped = True
        self._in_a_row = self._in_a_row + 1 if self._consequence else 0

    def check_rollout(self, rollout: Rollout) -> None:
        """Check that the sampler's outputs are finite, before the responses are scored."""
        self.evidence = rollout
        self._refuse(find_in_rollout(rollout))

    def check_experience(self, experience: Experience) -> None:
        """Check that all training data is finite, and that sampler and trainer agree about the same weights."""
        self.evidence = experience
        self._refuse(find_in_experience(experience))
        if int(experience.rollout.policy_version.min()) < self._update - 1:
            # The responses were sampled with older weights, so the probabilities differ, and ratios start at 1 only if
            # the old log probabilities are the trainer's.
            self._ratios_start_at_1 = experience.recomputed_logprobs is None
            return
        logprobs = experience.rollout.logprobs
        distance = torch.where(experience.action_mask, experience.trainer_logprobs - logprobs, 0.0).abs()
        row, token = divmod(int(distance.argmax()), distance.shape[1])
        ratio = math.exp(min(float(distance[row, token]), 20.0))
        self._compare(ratio, "in training and in sampling", row, token, k3=experience.mismatch.k3)

    def allows(self, step: int, figures: Mapping[str, float], search: Callable[[], BadValue]) -> bool:
        """True to take the optimizer step; see `StepCheck`. After a refusal the rest of the update is skipped.

        Raises:
            NumericsError: The run must stop.
        """
        # If the KL ends the policy's steps before the first one, only the critic's steps follow.
        if step == 0 and self._ratios_start_at_1 and "policy/ratio_max" in figures:
            self._compare(largest_ratio(figures), "in the first step and before it, under the same weights")
        self._taken = step
        if wrong := _nonfinite(figures):
            bad = search()
            located = not math.isfinite(bad.value)
            what = (
                f"{wrong} in step {step + 1}: {bad if located else 'recomputed one by one, every response is finite'}"
            )
            self._settle(
                "nonfinite", what, figures=figures, **({"row": bad.row, "token": bad.token} if located else {})
            )
        elif self.spikes and (spike := self.spikes.find(figures)):
            bad = search()
            self._settle("spike", f"{spike}; {bad}", row=bad.row, figures=figures)
        else:
            return True
        return False

    def takes(self, figures: Mapping[str, float]) -> None:
        """Note a step that is taken now. Of the steps that are allowed, the KL limit may leave out one."""
        self.begin_changes()
        if self.spikes:
            self.spikes.add(figures)

    def forget_steps(self) -> None:
        """Forget the spike history, because the next steps train other parameters on a different loss."""
        if self.spikes:
            self.spikes.clear()

    def metrics(self) -> dict[str, float]:
        """Skipped steps, and 1 if the weights were rolled back."""
        rows = self._num_minibatches if self.evidence is None else len(self.evidence.action_mask)
        num_steps = self._num_passes * min(self._num_minibatches, rows)
        skipped = num_steps - self._taken if self._consequence else 0
        return {"guard/skipped_steps": skipped, "guard/rolled_back": float(self._consequence == "rollback")}

    def state_dict(self) -> dict[str, Any]:
        """Consecutive skips and the spike history, as JSON types."""
        return {"in_a_row": self._in_a_row, "spikes": self.spikes.state_dict() if self.spikes else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._in_a_row = state["in_a_row"]
        if self.spikes and state["spikes"]:
            self.spikes.load_state_dict(state["spikes"])

    def _refuse(self, bad: BadValue | None) -> None:
        if bad is not None:
            self._settle("nonfinite", str(bad), row=bad.row, token=bad.token)
            raise UpdateDropped

    def _settle(self, kind: Literal["nonfinite", "spike"], what: str, **details: Any) -> None:
        """Record an incident and take the configured action."""
        action = self.on_spike if kind == "spike" else self.on_nonfinite
        end = self._reason_to_end(kind, action)
        self._note(kind, what, "stop" if end else action, **details)
        if end:
            raise NumericsError(f"update {self._update}: {what}; {end}")
        if action == "rollback":
            self.roll_back()
            if bad := self.find_bad_weight():
                raise NumericsError(f"update {self._update}: {what}; {bad}, in the newest checkpoint as well")
        self._consequence = action
        self.warn(f"update {self._update}: {what}; {CONSEQUENCES[action]}")

    def _reason_to_end(self, kind: Literal["nonfinite", "spike"], action: Action) -> str | None:
        if kind == "nonfinite" and action != "rollback" and (bad := self.find_bad_weight()):
            return f"{bad}, which skipping steps cannot repair; restart from finite weights"
        if action == "stop":
            return f"the step was not taken (ppo.on_{kind}=skip would continue without it)"
        if self._in_a_row >= self.max_skips:
            return (
                f"the last {self._in_a_row} updates skipped steps as well, the limit of ppo.max_skips"
                if self.max_skips
                else "ppo.max_skips=0 lets no update skip steps"
            )
        return None

    def _compare(
        self, ratio: float, when: str, row: int | None = None, token: int | None = None, *, k3: float = 0.0
    ) -> None:
        """Warn once, or stop, if sampler and trainer disagree about a token, or slightly about many."""
        bound = self.max_k3
        disagree = ratio > self.max_ratio or k3 > bound
        if not disagree or (self._warned_of_mismatch and not self.strict):
            return
        distance = f" (k3 is {k3:.3g} nats per token, at most {bound:g} by rounding)" if k3 > bound else ""
        what = (
            f"sampler and trainer disagree: a token's probabilities {when} have the ratio {ratio:.4g}, rounding "
            f"explains at most {self.max_ratio:g}{distance}; check that both use the same weights, "
            "temperature and positions"
        )
        self._note("mismatch", what, "stop" if self.strict else "warn", row=row, token=token)
        if self.strict:
            raise NumericsError(f"update {self._update}: {what}")
        self._warned_of_mismatch = True
        self.warn(f"update {self._update}: {what} (shown once; --strict stops the run)")

    def _note(self, kind: Any, what: str, consequence: Any, **details: Any) -> None:
        self.record(Incident(self._update, kind, what, consequence, evidence=self.evidence, **details))


def refuse_nonfinite(step: int, figures: Mapping[str, float], search: Callable[[], BadValue]) -> bool:
    """The default step check: raises on a step that would make the weights NaN.

    Raises:
        NumericsError: A metric is not finite.
    """
    if wrong := _nonfinite(figures):
        raise NumericsError(f"{wrong}; {search()}; the step was not taken")
    return True


def largest_ratio(figures: Mapping[str, float]) -> float:
    """The largest ratio or inverse ratio of a step."""
    return max(figures["policy/ratio_max"], 1 / figures["policy/ratio_min"])


def _nonfinite(figures: Mapping[str, float]) -> str | None:
    return next((f"{name} is {figure}" for name, figure in figures.items() if not math.isfinite(figure)), None)


def find_in_rollout(rollout: Rollout) -> BadValue | None:
    """Find the first non-finite output of the sampler."""
    mask = rollout.action_mask
    return first_nonfinite(
        [("the sampler's log probability", rollout.logprobs, mask), ("the sampler's value", rollout.values, mask)]
    )


def find_in_experience(experience: Experience) -> BadValue | None:
    """Find the first non-finite value of experience, in the order of computation."""
    mask = experience.action_mask
    slots = experience.reward_mask
    return first_nonfinite(
        [
            ("the score", experience.scores, None),
            ("the token score", experience.token_scores, mask),
            ("the policy's log probability", experience.trainer_logprobs, mask),
            ("the reference's log probability", experience.ref_logprobs, mask),
            ("the critic's value", experience.values, slots),
            ("the reward", experience.rewards, slots),
            ("the return", experience.returns, slots),
            ("the advantage", experience.advantages, mask),
        ]
    )


def find_bad_weight(modules: Mapping[str, nn.Module]) -> str | None:
    """Describe the first non-finite weight; skipping steps cannot repair it.

    Args:
        modules: All models of the run, by their name in messages.
    """
    for owner, module in modules.items():
        for name, parameter in module.named_parameters():
            weight = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if not weight.isfinite().all():
                return f"{owner}: {name} contains {float(weight.detach()[~weight.isfinite()][0]):.4g}"
    return None


def first_nonfinite(values: Iterable[tuple[str, Tensor | None, Tensor | None]]) -> BadValue | None:
    """Find the first non-finite value in several named tensors, each with its mask; None is skipped."""
    known = [(what, value.detach(), mask) for what, value, mask in values if value is not None]
    counted = [(what, value if mask is None else torch.where(mask, value, 0.0)) for what, value, mask in known]
    # If all values are finite, this takes only one device synchronization.
    finite = torch.stack([value.isfinite().all() for _, value in counted]).tolist()
    for (what, value), is_finite in zip(counted, finite, strict=True):
        if not is_finite:
            place = (~value.isfinite()).nonzero()[0].tolist()
            return BadValue(what, float(value[tuple(place)]), *place)
    return None


def _log(norm: float) -> float:
    """Take the logarithm, by which norms are compared; 0 is treated as 1e-30."""
    return math.log(max(norm, 1e-30))


WATCHED: Mapping[str, Callable[[float], float]] = {
    "policy/grad_norm": _log,
    "value/grad_norm": _log,
    "loss/total": float,
}
"""The metrics checked for spikes, with the scale of the comparison; a step need not have all of them."""


@dataclass(eq=False, kw_only=True)
class SpikeDetector:
    """Compares each step with the steps before it.

    spike:  x > median + k·σ,   σ = 1.4826 · median |x − median|   over the last n steps taken

    x is the log of the gradient norm, or the loss. Medians are used because the spikes themselves would inflate a mean
    and a standard deviation. The first n steps are never spikes.

    Args:
        sigma: k > 0.
        history: n ≥ 1.

    Source: Leys et al. 2013, "Detecting outliers: do not use standard deviation around the mean".
    """

    sigma: float
    history: int

    def __post_init__(self) -> None:
        self._past: dict[str, deque[float]] = {name: deque(maxlen=self.history) for name in WATCHED}

    def find(self, figures: Mapping[str, float]) -> str | None:
        """Describe the first metric of a step that is a spike; None without a spike."""
        for name, scale in WATCHED.items():
            past = self._past[name]
            if name not in figures or len(past) < self.history:
                continue
            middle = median(past)
            spread = max(NORMAL * median(abs(x - middle) for x in past), SMALLEST_SPREAD)
            distance = (scale(figures[name]) - middle) / spread
            if distance > self.sigma:
                return (
                    f"{name} is {figures[name]:.4g}, {distance:.3g} σ above the median of the last {self.history} steps"
                )
        return None

    def add(self, figures: Mapping[str, float]) -> None:
        """Add a step to the history."""
        for name, scale in WATCHED.items():
            if name in figures:
                self._past[name].append(scale(figures[name]))

    def clear(self) -> None:
        """Forget the history."""
        for past in self._past.values():
            past.clear()

    def state_dict(self) -> dict[str, Any]:
        """The history, as JSON types."""
        return {name: list(past) for name, past in self._past.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.clear()
        for name, past in self._past.items():
            past.extend(state[name])

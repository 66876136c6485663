"""The score of a response without a stop token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor

from kedge.algorithm.shaping import MissingEosMode, penalize_missing_eos

__all__ = ["MissingEos"]

PUBLISHED = -1.0
"""The score in Stiennon and N+, whose reward models have mean 0."""


@dataclass
class MissingEos:
    """Penalizes responses without a stop token.

    `auto` is set by the first batch of scores, and then stays: it is −1, or lower where scores as low as −1 are common,
    so that a response gains nothing by not stopping.

        replace: min(−1, mean − std)   subtract: min(−1, −std)

    The mean is over the responses that stopped (over all if none did), since those are the alternative; the standard
    deviation is over all responses, because few may have stopped.

    Attributes:
        score: The score or the amount to subtract; None for no penalty.
        mode: Whether it replaces the score, or its absolute value is subtracted.

    Source: spec §4.16; −1 is N+'s, one standard deviation below the mean of normalized scores.
    """

    score: float | Literal["auto"] | None = None
    mode: MissingEosMode = "replace"

    def penalize(self, scores: Float[Tensor, " batch"], stopped: Bool[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """The scores after the penalty; the first call sets `auto`."""
        if self.score == "auto":
            self.score = self._automatic(scores.tolist(), stopped.tolist())
        return scores if self.score is None else penalize_missing_eos(scores, stopped, value=self.score, mode=self.mode)

    def _automatic(self, scores: list[float], stopped: list[bool]) -> float:
        finished = [score for score, ended in zip(scores, stopped, strict=True) if ended]
        center = fmean(finished or scores) if self.mode == "replace" else 0.0
        return min(PUBLISHED, center - pstdev(scores))

    @property
    def is_known(self) -> bool:
        """Whether the penalty is set; `auto` is not before the first scores."""
        return self.score != "auto"

    def metrics(self) -> dict[str, float]:
        """`reward/missing_eos_score`, if there is a penalty: the score, or with `subtract` what is added to it."""
        if self.score is None or self.score == "auto":
            return {}
        return {"reward/missing_eos_score": self.score if self.mode == "replace" else -abs(self.score)}

    def state_dict(self) -> dict[str, float | str | None]:
        """The score."""
        return {"score": self.score}

    def load_state_dict(self, state: Mapping[str, float | Literal["auto"] | None]) -> None:
        """Restore a `state_dict`."""
        self.score = state["score"]

"""`details.jsonl`: the distributions of an update (scores, lengths, ratios per epoch), one row per update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kedge.algorithm.experience import Experience
from kedge.logs.json_lines import RunLog

__all__ = ["DETAILS_FILE", "DetailsLog", "describe_update"]

DETAILS_FILE = "details.jsonl"
NUM_QUANTILES = 21
NUM_BINS = 41
WIDEST = 1.0
"""Largest |log ρ| of the bins; values beyond count in the outermost bins."""


class DetailsLog(RunLog):
    """Writes `details.jsonl`; flushed after each row.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / DETAILS_FILE)

    def write(self, update: int, details: Mapping[str, Any]) -> None:
        """Append the row of one update."""
        self.append(update, details)


def describe_update(
    experience: Experience,
    passes: Sequence[Float[Tensor, "batch time"]],
    *,
    clip: tuple[float, float] | None,
) -> dict[str, Any]:
    """Distributions of scores and lengths, and of the ratios in each epoch.

    `scores`, `lengths`: quantiles at 0, 5, …, 100 %. `epochs`, each: `approx_kl`, nats per token; `cases`, the shares
    of tokens that are raised or lowered (by the sign of the advantage), each split into clipped (`_held`) and not;
    `clip_fraction`, the sum of the clipped shares; `ratios`, token counts in 41 equal bins of log ρ from −1 to 1.

    Args:
        experience: The experience trained on.
        passes: Log probabilities under the policy in training, per epoch; NaN where a token was not visited.
        clip: ε below 1 and above; None if nothing is clipped.

    Source: PPO figure 1.
    """
    lengths = experience.rollout.response_lengths.float()
    return {
        "scores": _quantiles(experience.total_scores),
        "lengths": _quantiles(lengths),
        "epochs": [_epoch(experience, logprobs, clip) for logprobs in passes],
    }


def _quantiles(values: Tensor) -> list[float]:
    at = torch.linspace(0, 1, NUM_QUANTILES, device=values.device)
    return [float(f"{each:.6g}") for each in torch.quantile(values.float(), at).tolist()]


def _epoch(experience: Experience, logprobs: Tensor, clip: tuple[float, float] | None) -> dict[str, Any]:
    seen = experience.rollout.action_mask & ~logprobs.isnan()
    log_ratio = (logprobs - experience.old_logprobs)[seen]
    advantages = experience.advantages[seen]
    raised = advantages >= 0
    ratio = log_ratio.exp()
    count = max(1, log_ratio.numel())
    epoch: dict[str, Any] = {"approx_kl": float((log_ratio.expm1() - log_ratio).sum()) / count}
    if clip is not None:
        held = torch.where(raised, ratio > 1 + clip[1], ratio < 1 - clip[0]) & (advantages != 0)
        cases = {
            "raised": raised & ~held,
            "raised_held": raised & held,
            "lowered": ~raised & ~held,
            "lowered_held": ~raised & held,
        }
        shares = {name: int(tokens.sum()) / count for name, tokens in cases.items()}
        epoch |= {"clip_fraction": shares["raised_held"] + shares["lowered_held"], "cases": shares}
    return epoch | {"ratios": {"raised": _histogram(log_ratio[raised]), "lowered": _histogram(log_ratio[~raised])}}


def _histogram(log_ratio: Tensor) -> list[int]:
    bins = ((log_ratio + WIDEST) / (2 * WIDEST) * NUM_BINS).floor().long().clamp(0, NUM_BINS - 1)
    return torch.bincount(bins, minlength=NUM_BINS).tolist()

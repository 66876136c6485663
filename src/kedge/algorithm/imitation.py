"""Imitation of the policy's own good responses, beside the policy gradient."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from kedge.algorithm.checks import check_positive
from kedge.algorithm.masking import keep_counted

__all__ = ["positive_nll"]


def positive_nll(
    logprobs: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    positive: Bool[Tensor, " batch"],
    *,
    normalizer: float,
) -> Float[Tensor, ""]:
    """Negative log likelihood of the correct responses, mean over their tokens; 0 if there are none.

    loss = −Σ_{b correct} Σ_t log π(a_bt) / N,   N = number of actions in the correct responses

    Args:
        logprobs: log probability of each action under the current weights, nats.
        mask: True = counts.
        positive: True for a correct response.
        normalizer: N of the whole minibatch, or any number above 0 if it has no correct response, so that the losses of
            its parts add up.

    Source: VAPO (arXiv 2504.05118) eq. 9; its coefficient is 0.1 (§5.1).
    """
    check_positive(normalizer=normalizer)
    return -keep_counted(logprobs, mask & positive.unsqueeze(-1)).sum() / normalizer

"""Ranks: the processes of one run. Each holds the full batch; only the passes through the models are divided.

Whitening, the mean KL, controllers, divisors and the guard are computed on every rank from the same numbers, so that
the results do not depend on the number of ranks, up to the rounding of sums.
"""

from kedge.ranks.passes import (
    AdaptiveTokens,
    Part,
    PassTokens,
    Prompts,
    budget_batches,
    budget_metrics,
    tokens_in,
    tokens_of,
)
from kedge.ranks.ranks import ALONE, Ranks, check_equal_weights, checksum, evaluate_in_passes, within_memory

__all__ = [
    "ALONE",
    "AdaptiveTokens",
    "Part",
    "PassTokens",
    "Prompts",
    "Ranks",
    "budget_batches",
    "budget_metrics",
    "check_equal_weights",
    "checksum",
    "evaluate_in_passes",
    "tokens_in",
    "tokens_of",
    "within_memory",
]

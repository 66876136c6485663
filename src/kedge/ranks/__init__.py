"""Ranks: the processes of one run. Each holds the whole batch; only the passes through the models are shared out.

Whitening, the mean KL, controllers, divisors and the guard are computed on every rank from the same numbers, so that
the results do not depend on the number of ranks, up to the rounding of sums.
"""

from kedge.ranks.agreement import check_equal_weights
from kedge.ranks.plan import Part, budget_batches
from kedge.ranks.ranks import ALONE, Ranks

__all__ = ["ALONE", "Part", "Ranks", "budget_batches", "check_equal_weights"]

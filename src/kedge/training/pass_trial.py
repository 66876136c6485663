"""Finds how many tokens fit into a training pass, with two small passes before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from kedge.models.live_bytes import LiveBytes
from kedge.ranks import AdaptiveTokens, PassTokens, Prompts, Ranks, tokens_in
from kedge.training.host_state import HostState
from kedge.training.optimizer import all_parameters
from kedge.training.optimizer_kinds import Optimizer
from kedge_base.machine.memory import free_memory, in_phase, with_unit

MOST_ON_GPU = 65_536
"""Maximum tokens per pass on a GPU, which larger passes do not utilize better; on a CPU, the initial number."""

SHARE = 0.8
"""Share of the free memory that a pass may use: allocators lose some to fragmentation, and rows differ."""

MOMENT_BYTES = 8
"""Bytes per trained parameter of Adam's two moments, which the first step allocates."""


@in_phase("the update")
def find_tokens(
    budget: PassTokens,
    lengths: Sequence[int],
    run_pass: Callable[[list[int]], object],
    optimizer: Optimizer,
    *,
    prompts: Prompts = None,
    ranks: Ranks,
) -> None:
    """Set the tokens per pass to the largest power of two that fits, unless they are given or known already.

    A pass over the longest row is measured, and then one over the two longest if it is sure to fit: a system that
    overcommits memory would kill the process. Memory grows linearly with the tokens. No state changes: gradients are
    dropped, and the random state is restored.

    Args:
        budget: Tokens per pass; set here if adaptive.
        lengths: Tokens per row.
        run_pass: Makes a forward and backward pass over some rows.
        optimizer: The optimizer of the trained parameters.
        prompts: See `Prompts`.
        ranks: All of them get the smallest number that one of them finds. With sharded weights none is looked for.

    Raises:
        MemoryError: Not even the longest row fits.
    """
    if not isinstance(budget, AdaptiveTokens) or budget.is_found or ranks.is_sharded:
        return
    longest = sorted(range(len(lengths)), key=lambda row: -lengths[row])[:2]
    weights = all_parameters(optimizer)
    device = weights[0].device
    row = lengths[longest[0]]
    come_later = not optimizer.state and not isinstance(optimizer, HostState)
    free = _free(device) - (MOMENT_BYTES * sum(weight.numel() for weight in weights) if come_later else 0)
    states = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    one = _peak(lambda: run_pass(longest[:1]), optimizer, weights)
    if one > free:
        raise MemoryError(f"a row of {row} tokens tried to allocate {one} bytes")
    per_token = one / row  # at most: a part of it does not grow with the tokens
    added = tokens_in(longest, lengths, prompts) - row
    if added and 2 * one < SHARE * free:
        per_token = (_peak(lambda: run_pass(longest), optimizer, weights) - one) / added
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)
    tokens = MOST_ON_GPU if device.type == "cuda" else budget.tokens
    # A limit below the longest row has no effect: a pass holds at least one row.
    while tokens > row and one + per_token * (tokens - row) > SHARE * free:
        tokens //= 2
    tokens = -ranks.largest(-max(tokens, 1))
    budget.start_with(tokens, f", of {with_unit(per_token)} each, with {with_unit(free)} free")


def _peak(run: Callable[[], object], optimizer: Optimizer, held: Iterable[Tensor]) -> int:
    """Measure the additional bytes that a pass needs, including gradients."""
    held = list(held)
    device = held[0].device
    try:
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            run()
            return torch.cuda.max_memory_allocated(device) - before
        with LiveBytes() as counter:
            before = counter.hold(held)
            run()
            return counter.restart() - before
    finally:
        optimizer.zero_grad(set_to_none=True)


def _free(device: torch.device) -> int:
    if device.type != "cuda":
        return free_memory()
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reusable

"""Seconds of a rollout: waves of full batches, then a tail until the longest response ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from bench.cluster.lengths import Lengths
from bench.cluster.memory import rows_of_a_server
from bench.cluster.practice import Practice
from bench.cluster.work import Layout, Workload

Limit = Literal["memory bandwidth", "arithmetic", "the fixed time of a step", "the longest responses"]


@dataclass(frozen=True)
class Rollout:
    """Seconds of one rollout.

    Attributes:
        prefill: Reading prompts.
        full: Decoding while every server is full.
        tail: Decoding while servers run empty, until the longest response ends.
        rows: Rows that a server decodes at once.
        limit: The bound on it.
    """

    prefill: float
    full: float
    tail: float
    rows: float
    limit: Limit

    @property
    def seconds(self) -> float:
        """The whole rollout."""
        return self.prefill + self.full + self.tail


def attention_flops(layers: int, hidden: int, context: float) -> float:
    """FLOPs of attention for one token that sees `context` tokens: scores and their weighted sum."""
    return 4.0 * layers * hidden * context


def decode_step(
    work: Workload, layout: Layout, practice: Practice, rows: float, context: float
) -> tuple[float, float, float]:
    """One token for each of a server's rows.

    max(bytes / (TP · bandwidth · share), FLOPs / (TP · peak · share)) + a fixed time, + all-reduces if TP > 1

    Args:
        work: The update.
        layout: The servers.
        practice: The shares.
        rows: That the server decodes at once.
        context: Tokens that a row has on average.

    Returns:
        Seconds to read weights, keys and values; seconds of arithmetic; fixed seconds. The step takes the greater of
        the first two, and the third.
    """
    policy = work.policy
    card = layout.card
    parallel = layout.tensor_parallel
    # Of a mixture, different rows use different experts: a few rows already read most weights.
    weights = min(policy.parameters, policy.active * max(1.0, rows / 4.0))
    read = 2.0 * weights + rows * context * policy.key_value_bytes
    flops = rows * (2.0 * policy.active + attention_flops(policy.layers, policy.hidden, context))
    fixed = practice.step + (2 * policy.layers * practice.reduce if parallel > 1 else 0.0)
    return (
        read / (parallel * card.bandwidth * practice.bandwidth),
        flops / (parallel * card.flops * practice.decode_flops),
        fixed,
    )


def rollout_time(work: Workload, layout: Layout, practice: Practice) -> Rollout:
    """Seconds to sample the batch.

    A server takes up to `rows` responses at once and starts the next as soon as one ends. When none is left to start,
    the rest runs down as `Lengths` says. Servers that never wait for a batch (staleness above 1) have no tail.
    """
    share = work.responses / layout.servers
    rows = min(share, rows_of_a_server(work, layout, practice))
    pieces = Lengths(work.response, work.longest_response).running(work.responses)
    has_tail = layout.staleness <= 1
    # A row that runs at a random moment is a long one, seen halfway: its expected age is E[l²] / (2 E[l]).
    age = sum(at * width * left for at, width, left in pieces) / work.response
    full_steps = (share - rows if has_tail else share) / rows * work.response
    full = _Decoding(full_steps, 1.0, *decode_step(work, layout, practice, rows, work.prompt + age))
    tail: list[_Decoding] = []
    for at, width, left in pieces if has_tail else ():
        running = max(1.0, rows * left)  # the slowest server has a row until the end
        tail.append(_Decoding(width, left, *decode_step(work, layout, practice, running, work.prompt + at)))
    flops = 2.0 * work.policy.active * work.prompt * work.responses
    prefill = flops / (layout.servers * layout.tensor_parallel * layout.card.flops * practice.prefill)
    limit = _limit([full, *tail])
    return Rollout(prefill, full.seconds, sum(each.seconds for each in tail), rows, limit)


class _Decoding(NamedTuple):
    """Steps with about the same share of their rows left; seconds of one step."""

    steps: float
    left: float
    reading: float
    arithmetic: float
    fixed: float

    @property
    def seconds(self) -> float:
        return self.steps * (max(self.reading, self.arithmetic) + self.fixed)


def _limit(decoding: list[_Decoding]) -> Limit:
    """The longest responses, if servers are less than a quarter full most of the time; else the greatest part."""
    total = sum(each.seconds for each in decoding)
    if sum(each.seconds for each in decoding if each.left < 0.25) > total / 2:
        return "the longest responses"
    parts: dict[Limit, float] = {
        "memory bandwidth": sum(each.steps * each.reading for each in decoding if each.reading >= each.arithmetic),
        "arithmetic": sum(each.steps * each.arithmetic for each in decoding if each.arithmetic > each.reading),
        "the fixed time of a step": sum(each.steps * each.fixed for each in decoding),
    }
    return max(parts, key=lambda name: parts[name])

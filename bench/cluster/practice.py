"""Shares of the data sheets' figures reached in practice: the constants of the cost model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Practice:
    """Shares of peaks, and times that no data sheet has.

    Fitted by hand to NeMo-RL 0.4 on H100 (`bench.cluster.published`); all other figures are checks.

    Attributes:
        train: Of peak FLOP/s, forward and backward, packed rows.
        forward: Of peak FLOP/s, forward alone.
        prefill: Of peak FLOP/s, reading prompts.
        decode_flops: Of peak FLOP/s while decoding many rows.
        bandwidth: Of the memory's bandwidth while decoding.
        collective: Of a link's or network's bandwidth while gathering shards in large pieces.
        sync: Of a link's or network's bandwidth while sending weights to servers, tensor by tensor.
        step: Seconds per decoding step of any size: launches, scheduling, sampling tokens.
        reduce: Seconds of a tensor-parallel all-reduce; there are two per layer.
        server_rows: Rows that one server decodes at once.
        overhead: Factor on all phases but the sync: scoring, moving data, barriers.
        server_memory: Share of a card's memory that a server may use.
        trainer_memory: Share of a card's memory that the trainer may use; the rest is the allocator's and NCCL's.
    """

    train: float = 0.35
    forward: float = 0.40
    prefill: float = 0.45
    decode_flops: float = 0.35
    bandwidth: float = 0.55
    collective: float = 0.6
    sync: float = 0.3
    step: float = 0.004
    reduce: float = 12e-6
    server_rows: int = 256
    overhead: float = 1.10
    server_memory: float = 0.90
    trainer_memory: float = 0.90

"""Bytes per card: what the trainer and a server hold."""

from __future__ import annotations

from dataclasses import dataclass

from bench.cluster.practice import Practice
from bench.cluster.shape import ModelShape
from bench.cluster.work import Layout, Workload

MICRO_BATCHES = (16_384, 8_192, 4_096, 2_048)
"""Tokens of a micro-batch per card; the largest that fits is taken."""

TRAINED_BYTES = 16
"""Per trained parameter: fp32 weight, gradient and Adam's two moments."""

LAYER_BYTES = 34
"""Per token and hidden unit: a block's activations in bf16 while it is computed again, without the attention matrix.

Source: Korthikanti et al. 2022, Reducing Activation Recomputation, eq. 1.
"""


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes per training card, parameters sharded over all of them.

    Attributes:
        state: Weights, gradients and Adam's moments of the trained models.
        frozen: bf16 weights of reference and reward model.
        gathered: Two blocks in bf16, and embedding and output layer whole, in fp32, with their gradient.
        activations: One state per block, and all of one block while it is computed again.
        micro_batch: Tokens per card that this is for.
    """

    state: float
    frozen: float
    gathered: float
    activations: float
    micro_batch: float

    @property
    def bytes(self) -> float:
        """The sum."""
        return self.state + self.frozen + self.gathered + self.activations


@dataclass(frozen=True)
class ServerMemory:
    """Bytes per card of a server.

    Attributes:
        weights: bf16.
        longest: Keys and values of one row of the largest length.
        room: For keys and values.
    """

    weights: float
    longest: float
    room: float

    @property
    def fits(self) -> bool:
        """True if a row of the largest length can be decoded."""
        return self.room >= self.longest


def trainer_memory(work: Workload, layout: Layout, micro_batch: float) -> TrainerMemory:
    """The trainer's memory with micro-batches of the given number of tokens; a longer row is a separate micro-batch."""
    policy = work.policy
    cards = max(1, layout.training_cards)
    models = 2 if work.critic == "separate" else 1
    state = TRAINED_BYTES * policy.parameters * models / cards
    frozen = 2.0 * ((policy.parameters if work.reference else 0.0) + _parameters(work.reward)) / cards
    # The update trains one model at a time, so that one set of gathered weights and activations is enough.
    embeddings = 2.0 * policy.vocabulary * policy.hidden
    block = max(0.0, policy.parameters - embeddings) / policy.layers
    gathered = 2 * 2.0 * block + 8.0 * embeddings if cards > 1 else 0.0
    tokens = max(micro_batch, work.longest)
    activations = tokens * policy.hidden * (2.0 * policy.layers + LAYER_BYTES)
    return TrainerMemory(state, frozen, gathered, activations, tokens)


def server_memory(work: Workload, layout: Layout, practice: Practice) -> ServerMemory:
    """A server's memory per card; on shared cards the trainer's weights and moments stay."""
    parallel = layout.tensor_parallel
    policy = work.policy
    weights = 2.0 * policy.parameters / parallel
    taken = 0.0
    if not layout.apart:
        held = trainer_memory(work, layout, 0.0)
        taken = held.state + held.frozen
    room = layout.card.memory * practice.server_memory - weights - taken
    return ServerMemory(weights, work.longest * policy.key_value_bytes / parallel, room)


def rows_of_a_server(work: Workload, layout: Layout, practice: Practice) -> float:
    """Rows of mean length that a server decodes at once; at least one."""
    room = server_memory(work, layout, practice).room * layout.tensor_parallel
    return max(1.0, min(float(practice.server_rows), room / (work.length * work.policy.key_value_bytes)))


def _parameters(shape: ModelShape | None) -> float:
    return shape.parameters if shape else 0.0

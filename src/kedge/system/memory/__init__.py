"""How much memory the process may use, and what happens when it runs out. Imports no torch."""

from kedge.system.memory.exhaustion import Exhaustion, asked_for, in_phase, is_out_of_memory, release, with_unit
from kedge.system.memory.limits import (
    MemoryLimit,
    free_memory,
    held_memory,
    memory_limit,
    memory_limits,
    private_memory,
    tightest_limit,
)

__all__ = [
    "Exhaustion",
    "MemoryLimit",
    "asked_for",
    "free_memory",
    "held_memory",
    "in_phase",
    "is_out_of_memory",
    "memory_limit",
    "memory_limits",
    "private_memory",
    "release",
    "tightest_limit",
    "with_unit",
]

"""`reward_functions`: what Python functions that score are allowed, and what becomes of their failures."""

from typing import Literal

from kedge.config.schema.field import Section, knob

__all__ = ["RewardFunctions"]


class RewardFunctions(Section):
    """A named function runs in a process of its own; one that Python handed over cannot be stopped at a deadline."""

    timeout: float = knob(
        300.0,
        gt=0,
        meaning="Longest call of a function, in seconds: all responses of an update, or of a batch. Then it is killed.",
        source="kedge: a judge over the network needs minutes for a large batch; a hang costs as much, not the night",
        too_high="a function that hangs holds the run up for so long, at each attempt",
        too_low="a call that is only slow counts as failed",
    )
    startup_timeout: float = knob(
        600.0,
        gt=0,
        meaning="Longest import of a function's module, in seconds.",
        source="kedge: it may load a model of its own, or fetch it",
        too_high="a module that hangs holds the start up for so long",
        too_low="a module that is only slow to load ends the run",
    )
    retries: int = knob(
        1,
        ge=0,
        meaning="Further attempts after a call that failed: after 1 s, then 2 s, 4 s and so on.",
        source="kedge: a service that stumbles once costs nothing",
        too_high="a function that fails each time takes long to be given up",
        too_low="a service that stumbles once ends the run, or costs scores",
    )
    on_error: Literal["stop", "drop", "value"] = knob(
        "stop",
        meaning="When the attempts are used up: end the run, give the responses concerned no score, so that they take "
        "no part in the update, or give them error_score. Halves of the batch are asked to find which those are.",
        source="kedge: what is wrong should be seen",
    )
    error_score: float = knob(
        0.0,
        meaning="The score, before its weight, of a response on which the function failed, with on_error=value.",
        source="kedge",
        too_high="the policy learns to break the function",
        too_low="a fault of the function is held against the policy",
    )
    memory_growth: float = knob(
        2.0,
        gt=0,
        meaning="A function's process is replaced when it holds so many GiB more than after its first call.",
        source="kedge: room for caches, and a leak does not take the machine down",
        too_high="memory may run out",
        too_low="the module is imported anew time and again",
    )

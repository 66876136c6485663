"""`reward_functions`: limits for Python reward functions, and how their failures are handled."""

from typing import Literal

from kedge.config.schema.field import field
from kedge.config.schema.section import Section

__all__ = ["RewardFunctionsConfig"]


class RewardFunctionsConfig(Section):
    """Limits and failures of Python reward functions.

    A function given by name runs in its own process. One passed in from Python cannot be stopped at the timeout.
    """

    timeout: float = field(
        300.0,
        gt=0,
        meaning="Seconds that one call may take, for all responses of an update or batch, before it is killed.",
        source="kedge: a judge over the network takes minutes for a large batch; a hang costs minutes, not hours",
        too_high="each attempt of a function that hangs blocks the run for this long",
        too_low="a call that is merely slow counts as failed",
    )
    startup_timeout: float = field(
        600.0,
        gt=0,
        meaning="Seconds that importing a function's module may take.",
        source="kedge: the module may load or download a model",
        too_high="a module that hangs delays the start for this long",
        too_low="a module that is merely slow to load ends the run",
    )
    retries: int = field(
        1,
        ge=0,
        meaning="Further attempts after a failed call, after 1 s, 2 s, 4 s and so on.",
        source="kedge: a service that fails once costs nothing",
        too_high="a function that always fails delays the run",
        too_low="a service that fails once ends the run or costs scores",
    )
    on_error: Literal["stop", "drop", "value"] = field(
        "stop",
        meaning="After the last attempt: stop the run, drop the failed responses from the update, or give them "
        "error_score. The batch is halved repeatedly to find which responses fail.",
        source="kedge: a failure should be seen",
    )
    error_score: float = field(
        0.0,
        meaning="Score, before its weight, of a response on which the function fails, with on_error=value.",
        source="kedge: neutral",
        too_high="the policy learns to make the function fail",
        too_low="the policy is punished for the function's faults",
    )
    memory_growth: float = field(
        2.0,
        gt=0,
        meaning="GiB that a function's process may grow after its first call before it is replaced.",
        source="kedge: leaves room for caches, and a leak does not exhaust the machine",
        too_high="memory may run out",
        too_low="the module is imported over and over",
    )

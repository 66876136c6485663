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
    retries: int = field(
        1,
        ge=0,
        meaning="Further attempts after a failed call, after 1 s, 2 s, 4 s and so on.",
        source="kedge: a service that fails once costs nothing",
        too_high="a function that always fails delays the run",
        too_low="a service that fails once ends the run or costs scores",
    )
    on_error: Literal["stop", "drop"] | float = field(
        "stop",
        meaning="After the last attempt: stop the run, drop the failed responses from the update, or give them "
        "this score, before its weight. The batch is halved repeatedly to find which responses fail.",
        source="kedge: a failure should be seen",
    )

"""`reward` and `reward_functions`: one term of the reward, and the limits of Python functions."""

from typing import Any, Literal

from kedge.config.schema.field import field
from kedge.config.schema.section import Section
from kedge_base.texts import names_function


class RewardTermConfig(Section):
    """One reward and its weight in the sum."""

    source: str = field(
        ...,
        meaning="A reward model's folder or id, a Python function (`file.py:function`, `package.module:function`) such "
        "as the verifier `kedge_tasks.verify:gsm8k`, or a judge behind an API (`openai:MODEL@URL`).",
        source="kedge: no reward is assumed",
        text="a folder, a hub id or a function",
    )
    weight: float = field(
        1.0,
        meaning="Factor of the score in the sum; with 0 the term is only reported, and does not train the policy.",
        source="kedge: a sum with equal weights",
        too_high="the term drowns out the others",
        too_low="the others drown out the term",
    )
    settings: dict[str, Any] = field(
        {},
        meaning="Keyword arguments for a function; for a judge behind an API, `rubric`, `max_tokens` and `ranks` "
        "(compare all responses to a prompt).",
        source="kedge: the function's own defaults",
    )
    name: str | None = field(
        None,
        meaning="Name of the term in metrics and messages; null is the name of its function or folder.",
        source="kedge",
        text="a name",
    )

    @property
    def is_function(self) -> bool:
        """True if the source is a Python function rather than a reward model."""
        return names_function(self.source)


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

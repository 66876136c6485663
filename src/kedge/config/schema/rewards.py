"""`reward` and `reward_functions`: one term of the reward, and the limits of Python functions."""

from typing import Any, Literal

from kedge.config.schema.field import field
from kedge.config.schema.section import Section
from kedge_base.texts import names_function


class RewardTermConfig(Section):
    """One reward and its weight in the sum."""

    source: str
    """A reward model's folder or id, a Python function (`file.py:function`, `package.module:function`) such as the
    verifier `kedge_tasks.verify:gsm8k`, or a judge behind an API (`openai:MODEL@URL`).

    Source: kedge: no reward is assumed
    Text: a folder, a hub id or a function
    """
    weight: float = 1.0
    """Factor of the score in the sum; with 0 the term is only reported, and does not train the policy.

    Source: kedge: a sum with equal weights
    Too high: the term drowns out the others
    Too low: the others drown out the term
    """
    settings: dict[str, Any] = field({})
    """Keyword arguments for a function; for a judge behind an API, `rubric`, `max_tokens` and `ranks` (compare all
    responses to a prompt).

    Source: kedge: the function's own defaults
    """
    name: str | None = None
    """Name of the term in metrics and messages; null is the name of its function or folder.

    Source: kedge
    Text: a name
    """

    @property
    def is_function(self) -> bool:
        """True if the source is a Python function rather than a reward model."""
        return names_function(self.source)


class RewardFunctionsConfig(Section):
    """Limits and failures of Python reward functions.

    A function given by name runs in its own process. One passed in from Python cannot be stopped at the timeout.
    """

    timeout: float = field(300.0, gt=0)
    """Seconds that one call may take, for all responses of an update or batch, before it is killed.

    Source: kedge: a judge over the network takes minutes for a large batch; a hang costs minutes, not hours
    Too high: each attempt of a function that hangs blocks the run for this long
    Too low: a call that is merely slow counts as failed
    """
    retries: int = field(1, ge=0)
    """Further attempts after a failed call, after 1 s, 2 s, 4 s and so on.

    Source: kedge: a service that fails once costs nothing
    Too high: a function that always fails delays the run
    Too low: a service that fails once ends the run or costs scores
    """
    on_error: Literal["stop", "drop"] | float = "stop"
    """After the last attempt: stop the run, drop the failed responses from the update, or give them this score, before
    its weight. The batch is halved repeatedly to find which responses fail.

    Source: kedge: a failure should be seen
    """

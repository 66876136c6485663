"""`environment`: what the policy talks to in episodes of several turns."""

from kedge.config.schema.field import field
from kedge.config.schema.section import Section

__all__ = ["EnvironmentConfig"]


class EnvironmentConfig(Section):
    """Episodes of several turns with an environment or tools; rollout.max_new_tokens counts both sides."""

    source: str | None = field(
        None,
        meaning="The environment's class, `file.py:Class` or `package.module:Class`: with `reset(row, seed)` and "
        "`step(text)`, or with public methods that are tools; null is a single turn.",
        source="kedge: a single turn",
        text="a class",
    )
    max_turns: int = field(
        8,
        ge=1,
        meaning="Turns of the policy in an episode; more end it.",
        source="kedge",
        too_high="policies that never finish make long episodes",
        too_low="the task cannot be solved in time",
    )
    max_turn_tokens: int | None = field(
        None,
        ge=1,
        meaning="Tokens of one turn of the policy: longer turns are cut there and answered; null is as many as are "
        "left of rollout.max_new_tokens.",
        source="kedge: turns end with a stop token",
        too_high="policies that do not stop spend the whole episode on one turn",
        too_low="turns are cut off before they end",
    )
    timeout: float = field(
        30.0,
        gt=0,
        meaning="Seconds that one call of an episode may take. A later answer ends the episode; a call that opens one, "
        "or that cannot be interrupted, ends the run.",
        source="kedge",
        too_high="a hanging environment blocks the run for this long",
        too_low="slow answers end episodes",
    )

"""One term of `reward`."""

from typing import Any

from kedge.config.schema.field import field
from kedge.config.schema.section import Section
from kedge.system.texts import names_function

__all__ = ["RewardTermConfig"]


class RewardTermConfig(Section):
    """One reward and its weight in the sum."""

    source: str = field(
        ...,
        meaning="A reward model's folder or id, or a Python function (`file.py:function`, `package.module:function`).",
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
        {}, meaning="Keyword arguments for a function.", source="kedge: the function's own defaults"
    )
    name: str | None = field(
        None,
        meaning="Name of the term in metrics and messages; null is the name of its function or folder.",
        source="kedge",
        text="a name",
    )

    @property
    def is_function(self) -> bool:
        """Whether the source is a Python function rather than a reward model."""
        return names_function(self.source)

"""`evaluate`: how two policies are compared."""

from typing import Literal

from kedge.config.schema.field import field
from kedge.config.schema.section import Section, StringList

__all__ = ["EvaluateConfig"]


class EvaluateConfig(Section):
    """Comparison of a policy with another one, or with the references in the data."""

    against: str | None = field(
        None,
        meaning="Folder or id of the policy to compare with; null uses the references (`completion`) in the prompts.",
        source="kedge",
    )
    judge: str | None = field(
        None,
        meaning="The judge: a reward model's folder or id, or a function (`file.py:function`, `module:function`).",
        source="kedge: no judge is assumed",
    )
    judge_mode: Literal["score", "pairwise"] = field(
        "score",
        meaning="Whether the judge scores each response on its own, or picks the better of two shown in both orders.",
        source="Stiennon's reward models score; pairwise judges favor a position, so both orders are shown",
    )
    frontier: StringList = field(
        [],
        meaning="Further policies (folders or ids) to place on the curve of score over KL from `against`.",
        source="Gao: proxy and gold score over √KL",
    )
    num_prompts: int | None = field(
        None,
        ge=1,
        meaning="Number of prompts to judge, from the first on; null uses all.",
        source="kedge: all prompts, for the narrowest interval",
        too_high="slow",
        too_low="the confidence interval is wide: ±7 points of win rate at 200 prompts",
    )
    num_bootstrap: int = field(
        10_000,
        ge=100,
        meaning="Bootstrap resamples of the prompts for the confidence interval.",
        source="kedge: the ends of the interval settle to a tenth of a point",
        too_high="slow, and the interval does not narrow: only more prompts narrow it",
        too_low="the ends of the interval are noisy",
    )
    confidence: float = field(
        0.95,
        gt=0,
        lt=1,
        meaning="Coverage of the confidence interval.",
        source="kedge: the usual level",
        too_high="the interval is wide",
        too_low="the interval often misses the true value",
    )

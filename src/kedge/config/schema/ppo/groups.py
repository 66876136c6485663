"""The responses to the same prompt: what happens to groups whose scores are all equal."""

from typing import Literal

from kedge.config.schema.field import field
from kedge.config.schema.section import Group

__all__ = ["GroupsConfig"]


class GroupsConfig(Group):
    """Groups without spread: a baseline of the same prompt finds nothing to prefer in them."""

    constant_groups: Literal["keep", "drop", "resample"] = field(
        "keep",
        meaning="What happens to prompts whose responses all score the same (token scores are summed): keep, drop them "
        "before training, or drop and resample: sample other prompts until rollout.num_prompts groups have spread. "
        "Updates that train the critic alone keep them. reward/score_mean is of all responses, trained on or not.",
        source="kedge: keep, since a critic learns from them, too. DAPO resamples",
    )
    max_resamples: int = field(
        9,
        ge=1,
        meaning="Additional rounds of sampling in an update with constant_groups=resample, at most; the update is "
        "smaller if they do not fill it. A round has as many prompts as should be enough by the share found so far, at "
        "most rollout.num_prompts.",
        source="verl's recipe for DAPO generates at most 10 batches, and then stops with an error",
        too_high="updates take long once most prompts are solved, or none are",
        too_low="updates are smaller than rollout.num_prompts",
    )

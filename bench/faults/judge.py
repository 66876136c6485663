"""The gold judge as a reward function: it has the story behind every post, so it measures true quality."""

from __future__ import annotations

from kedge_lab.demo.world import World, judge_summary


def gold(completions: list[str], index: list[int], *, world: int) -> list[float]:
    """The judge's quality of each summary, in [0, 1].

    Args:
        completions: The summaries.
        index: The number of the post of each.
        world: The world's seed.
    """
    forum = World(world, "prompts")
    return [judge_summary(forum.post(post), text).quality for post, text in zip(index, completions, strict=True)]

"""The embedded world: TL;DR summarization in miniature, with a gold judge that has the facts of every post.

world       posts with distractions, authors of differing skill, the gold judge, and the authors' texts and preferences
words       the language: values of the facts, and sentences
"""

from kedge.stages.demo.world.world import (
    AUTHORS,
    AXES,
    Author,
    Post,
    SummaryScores,
    World,
    judge_summary,
    render_whole,
    stated_facts,
)

__all__ = [
    "AUTHORS",
    "AXES",
    "Author",
    "Post",
    "SummaryScores",
    "World",
    "judge_summary",
    "render_whole",
    "stated_facts",
]

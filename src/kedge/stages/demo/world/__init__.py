"""The embedded world: TL;DR summarization in miniature, with a gold judge that has the facts of every post.

posts       stories with distractions
authors     reference summaries by authors of differing skill
judge       coverage, accuracy, coherence and brevity of a text as a summary of a post
world       demonstrations, comparisons by a noisy annotator, and prompts
words       the language: values of the facts, and sentences
"""

from kedge.stages.demo.world.authors import AUTHORS, Author
from kedge.stages.demo.world.judge import AXES, SummaryScores, judge_summary, stated_facts
from kedge.stages.demo.world.posts import Post
from kedge.stages.demo.world.world import World, render_whole

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

"""The embedded world: TL;DR summarisation in miniature, with a gold judge who knows every story.

posts       stories and how they are told, among distractions
authors     reference summaries by people of differing skill
judge       coverage, accuracy, coherence and brevity of any text as a summary of a post
world       all of it as demonstrations, comparisons and prompts, with a noisy annotator
words       the language: values of the facts, and sentences
"""

from kedge.demo.world.authors import AUTHORS, Author
from kedge.demo.world.judge import AXES, SummaryScores, judge_summary, stated_facts
from kedge.demo.world.posts import Post
from kedge.demo.world.world import World, render_whole

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

"""Makes comparisons of sampled responses, ranked by a labeler or not yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kedge.data import Prompt, Rendered
from kedge.rewards import MESSAGES_COLUMN, Responses, Scores, WeightedReward
from kedge_base.errors import RewardError

POST_FIELDS = ("subreddit", "title", "post")
"""Columns that `data.template=tldr` builds the prompt from; comparisons keep no other columns."""


def ranked_rows(prompts: Sequence[Prompt], responses: Responses, labeler: WeightedReward) -> list[dict[str, Any]]:
    """Rank the responses to each prompt, which follow each other, by the labeler's scores.

    Returns:
        Rows of `prompt`, `responses` and `ranks`, as `parse_comparison` expects them; prompts whose responses all have
        the same score are left out.

    Raises:
        RewardError: No row is left, or the labeler returned invalid scores.
    """
    scores = labeler.score(responses)
    rows: list[dict[str, Any]] = []
    for prompt, span in _with_slices(prompts, responses):
        texts, ranks = rank_responses(responses.completions[span], scores[span])
        if texts:
            rows.append({**_asked(prompt), "responses": texts, "ranks": ranks})
    if not rows:
        raise RewardError(
            f"labeler {labeler.name!r} scored all responses to each prompt the same; increase "
            "rollout.temperature so that responses differ"
        )
    return rows


def unranked_rows(prompts: Sequence[Prompt], responses: Responses) -> list[dict[str, Any]]:
    """Rows of `prompt` and `responses`, without blank and repeated responses."""
    return [
        {**_asked(prompt), "responses": list(dict.fromkeys(filter(str.strip, responses.completions[span])))}
        for prompt, span in _with_slices(prompts, responses)
    ]


def _with_slices(prompts: Sequence[Prompt], responses: Responses) -> Iterator[tuple[Prompt, slice]]:
    """Each prompt, with the slice of its responses."""
    size = len(responses) // len(prompts)
    for number, prompt in enumerate(prompts):
        yield prompt, slice(number * size, (number + 1) * size)


def _asked(prompt: Prompt) -> dict[str, Any]:
    post = {name: prompt.columns[name] for name in POST_FIELDS if name in prompt.columns}
    # Keep a conversation as messages, so that its template closes the answers.
    asked = prompt.columns.get(MESSAGES_COLUMN) if isinstance(prompt.text, Rendered) else None
    return {**post, "prompt": asked or prompt.text}


def rank_responses(texts: Sequence[str], scores: Scores) -> tuple[list[str], list[int]]:
    """Rank distinct texts, with 1 as the best; equal scores get equal ranks. The result is empty if no text is
    preferred.

    Blank responses and responses without a score are left out; equal texts are merged.
    """
    scored = {text: score for text, score in zip(texts, scores, strict=True) if text.strip() and score is not None}
    levels = sorted(set(scored.values()), reverse=True)
    if len(levels) < 2:
        return [], []
    return list(scored), [levels.index(score) + 1 for score in scored.values()]

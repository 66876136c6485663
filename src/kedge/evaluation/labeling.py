"""Comparisons of a policy's own responses: sampled, scored by a labeller, ranked.

Source: InstructGPT §3.4–3.5: new comparisons are collected on the newest policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kedge.data import Prompt
from kedge.errors import RewardError
from kedge.evaluation.policy import Policy, Sampling
from kedge.evaluation.responses import join_responses
from kedge.rewards import Scores, WeightedReward

__all__ = ["collect_rankings", "rank_responses"]

POST_FIELDS = ("subreddit", "title", "post")
"""What `data.template=tldr` builds a prompt from; a row's other columns are no part of a comparison."""


def collect_rankings(
    policy: Policy,
    prompts: Sequence[Prompt],
    labeller: WeightedReward,
    sampling: Sampling,
    *,
    num_responses: int,
    title: str,
) -> list[dict[str, Any]]:
    """Sample several responses to each prompt and let the labeller rank them.

    Args:
        policy: Whose responses are compared.
        prompts: What it is asked.
        labeller: Its scores make the ranks.
        sampling: How the responses are drawn.
        num_responses: Responses per prompt, ≥ 2.
        title: Of the progress display.

    Returns:
        Rows of `prompt`, `responses` and `ranks`, as `read_comparisons` takes them; a prompt whose responses are all
        alike to the labeller has none.

    Raises:
        RewardError: No prompt has a row, or the labeller broke its contract.
    """
    asked = [prompt for prompt in prompts for _ in range(num_responses)]
    answers = policy.sample_all(asked, sampling, title=title)
    responses = join_responses([each.responses for each in answers])
    scores = labeller.scores(responses)
    rows: list[dict[str, Any]] = []
    for number, prompt in enumerate(prompts):
        its = slice(number * num_responses, (number + 1) * num_responses)
        texts, ranks = rank_responses(responses.completions[its], scores[its])
        if texts:
            post = {name: prompt.columns[name] for name in POST_FIELDS if name in prompt.columns}
            rows.append({**post, "prompt": prompt.text, "responses": texts, "ranks": ranks})
    if not rows:
        raise RewardError(
            f"labeller {labeller.name!r} told no two responses apart to any of {len(prompts)} prompts; a higher "
            "rollout.temperature makes them differ"
        )
    return rows


def rank_responses(texts: Sequence[str], scores: Scores) -> tuple[list[str], list[int]]:
    """Different texts with their ranks, 1 the best; equal scores have equal ranks. Empty where nothing is preferred.

    Responses that are blank or have no score are left out; equal texts are one.
    """
    scored = {text: score for text, score in zip(texts, scores, strict=True) if text.strip() and score is not None}
    levels = sorted(set(scored.values()), reverse=True)
    if len(levels) < 2:
        return [], []
    return list(scored), [levels.index(score) + 1 for score in scored.values()]

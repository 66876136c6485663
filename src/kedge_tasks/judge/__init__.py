"""Judges over an API: a model on any OpenAI-compatible server scores, compares or ranks responses.

    kedge ppo --reward openai:llama3:8b@http://127.0.0.1:11434/v1 …

endpoint: one request. ledger: limits, and answers that are kept. questions: prompts, and reading the answers. judge:
all of them together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from kedge_base.verdict import reads
from kedge_tasks.judge.judge import Judge
from kedge_tasks.judge.ledger import JudgeLimitError, Limits, read_usage

__all__ = ["Judge", "JudgeLimitError", "Limits", "read_usage", "score"]

SECONDS = 3600.0
"""Added to the time limit of a call for each response: the judge has limits of its own."""


@reads(lambda: SECONDS)
def score(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    messages: Sequence[Any] | None = None,
    *,
    judge: str,
    rubric: str = "",
    ranks: bool = False,
    max_tokens: int = 1024,
    limits: Mapping[str, Any] | None = None,
    file: str | None = None,
) -> list[float | None]:
    """Score responses; see `Judge.score`, and `Judge` for the settings."""
    settings = {"rubric": rubric, "ranks": ranks, "max_tokens": max_tokens, "limits": limits, "file": file}
    return _judge(judge, json.dumps(settings)).score(prompts, completions, messages)


@cache
def _judge(judge: str, settings: str) -> Judge:
    """The judge with these settings, cached with what it has learned of its server."""
    return Judge(judge, **json.loads(settings))

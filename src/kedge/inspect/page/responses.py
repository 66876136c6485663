"""The responses that the page shows token by token: the same prompts over time first, and never too many."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kedge.inspect.page.numbers import evenly, rounded
from kedge.inspect.record import RunRecord

__all__ = ["sampled"]

FIGURES = ("logprobs", "ref_logprobs", "new_logprobs", "values", "rewards", "advantages", "entropies")
MOST_TOKENS = 600
"""A longer response is shown without its end, a longer prompt without its beginning."""

MOST_CHARACTERS = 6000
MOST_UPDATES = 24
FEWEST_UPDATES = 2
MOST_PROMPTS = 8


def sampled(record: RunRecord, *, most_bytes: int) -> dict[str, Any]:
    """Prompts with responses from the whole of a run, as many as fit.

    Args:
        record: The run.
        most_bytes: Of the JSON that comes out; kept unless two updates alone hold more.

    Returns:
        `prompts`, each with its `title`, `prompt` and `responses` by update; and how many were `kept` `of` how many.
    """
    rows = [row for row in record.samples if isinstance(row.get("tokens"), list)]
    if not rows:
        return {"empty": _why_empty(record)}
    fixed = {number: [row for row in rows if row.get("fixed") == number] for number in _fixed_numbers(rows)}
    others = [row for row in rows if row.get("fixed") is None]
    shown: list[dict[str, Any]] = []
    for most_updates in _fewer(MOST_UPDATES):
        shown = [_prompt(f"Prompt {number + 1}", rows, most_updates) for number, rows in fixed.items()]
        shown += [_prompt("", others, most_updates)] if others else []
        if len(json.dumps(shown)) <= most_bytes:
            break
    return {"prompts": shown, "kept": sum(len(prompt["responses"]) for prompt in shown), "of": len(rows)}


def _fixed_numbers(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    return sorted({row["fixed"] for row in rows if isinstance(row.get("fixed"), int)})[:MOST_PROMPTS]


def _fewer(most: int) -> list[int]:
    """Ever fewer updates, to try which fit."""
    counts = []
    while most > FEWEST_UPDATES:
        counts.append(most)
        most = most * 2 // 3
    return [*counts, FEWEST_UPDATES]


def _prompt(title: str, rows: Sequence[Mapping[str, Any]], most_updates: int) -> dict[str, Any]:
    """One prompt's responses over time; without a title those to many prompts, each with its own."""
    updates = sorted({int(row["update"]) for row in rows})
    kept = {updates[index] for index in evenly(len(updates), most_updates)}
    responses = [_response(row, with_prompt=not title) for row in rows if row["update"] in kept]
    responses.sort(key=lambda response: response["update"])
    return {"title": title, "prompt": _shortened(str(rows[0]["prompt"])) if title else "", "responses": responses}


def _response(row: Mapping[str, Any], *, with_prompt: bool) -> dict[str, Any]:
    tokens = [str(token) for token in row["tokens"]]
    figures = {name: rounded(row[name][:MOST_TOKENS], 4) for name in FIGURES if isinstance(row.get(name), list)}
    return {
        "update": int(row["update"]),
        "score": rounded(row.get("score")),
        "stopped": bool(row.get("stopped")),
        "length": len(tokens),
        "tokens": tokens[:MOST_TOKENS],
        **figures,
        **({"prompt": _shortened(str(row["prompt"]))} if with_prompt else {}),
    }


def _shortened(prompt: str) -> str:
    return prompt if len(prompt) <= MOST_CHARACTERS else f"…{prompt[-MOST_CHARACTERS:]}"


def _why_empty(record: RunRecord) -> str:
    if record.stage != "ppo":
        return "Only PPO samples responses while it trains."
    if record.setting("runtime.num_samples") == 0:
        return "runtime.num_samples is 0: with 1 or more the run keeps responses of every update."
    return "No responses are kept yet: samples.jsonl fills with the first update."

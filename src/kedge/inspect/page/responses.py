"""The responses shown token by token: fixed prompts first, within a size limit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kedge.inspect.page.numbers import evenly_spaced, rounded
from kedge.inspect.record import RunRecord

__all__ = ["shown_responses"]

TOKEN_VALUES = ("logprobs", "ref_logprobs", "new_logprobs", "values", "rewards", "advantages", "entropies")
MOST_TOKENS = 600
"""Longer responses lose their end, longer prompts their beginning."""

MOST_CHARACTERS = 6000
MOST_UPDATES = 24
FEWEST_UPDATES = 2
MOST_PROMPTS = 8


def shown_responses(record: RunRecord, *, most_bytes: int) -> dict[str, Any]:
    """Prompts with responses from the whole run, as many as fit.

    Args:
        record: The run.
        most_bytes: Size limit of the resulting JSON; exceeded only if the responses of two updates are larger.

    Returns:
        `prompts`, each with `title`, `prompt` and `responses` by update; the number of responses `kept`, and `of` all.
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
    """Decreasing numbers of updates to try."""
    counts = []
    while most > FEWEST_UPDATES:
        counts.append(most)
        most = most * 2 // 3
    return [*counts, FEWEST_UPDATES]


def _prompt(title: str, rows: Sequence[Mapping[str, Any]], most_updates: int) -> dict[str, Any]:
    """The responses to one prompt over time; without a title, responses that have their own prompt each."""
    updates = sorted({int(row["update"]) for row in rows})
    kept = {updates[index] for index in evenly_spaced(len(updates), most_updates)}
    responses = [_response(row, with_prompt=not title) for row in rows if row["update"] in kept]
    responses.sort(key=lambda response: response["update"])
    return {"title": title, "prompt": _shortened(str(rows[0]["prompt"])) if title else "", "responses": responses}


def _response(row: Mapping[str, Any], *, with_prompt: bool) -> dict[str, Any]:
    tokens = [str(token) for token in row["tokens"]]
    values = {name: rounded(row[name][:MOST_TOKENS], 4) for name in TOKEN_VALUES if isinstance(row.get(name), list)}
    return {
        "update": int(row["update"]),
        "score": rounded(row.get("score")),
        "stopped": bool(row.get("stopped")),
        "length": len(tokens),
        "tokens": tokens[:MOST_TOKENS],
        **values,
        **({"prompt": _shortened(str(row["prompt"]))} if with_prompt else {}),
    }


def _shortened(prompt: str) -> str:
    return prompt if len(prompt) <= MOST_CHARACTERS else f"…{prompt[-MOST_CHARACTERS:]}"


def _why_empty(record: RunRecord) -> str:
    if record.stage != "ppo":
        return ""
    if record.setting("runtime.num_samples") == 0:
        return "runtime.num_samples is 0; set it to 1 or more to keep responses of every update."
    return "No responses yet: they come with the first update."

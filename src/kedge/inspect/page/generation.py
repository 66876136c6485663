"""A generate run on the page: lengths, scores, every response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kedge.inspect.page.distributions import distributions
from kedge.inspect.page.excerpts import fitting, shortened
from kedge.inspect.page.numbers import as_number, rounded
from kedge.inspect.record import RunRecord

__all__ = ["describe_generation", "generation"]

FIGURES = (
    "model", "num_prompts", "num_responses", "num_distinct", "num_scored", "length", "eos_rate", "reward", "score",
)  # fmt: skip


def generation(record: RunRecord, *, most_bytes: int) -> dict[str, Any]:
    """The figures of `summary.json` and the rows of `responses.jsonl`, also of a run in progress.

    Args:
        record: The run.
        most_bytes: Size limit of the responses' JSON; of larger runs, evenly spaced responses are shown.

    Returns:
        The figures by name; `scores` and `lengths` as distributions; `responses` with the number `kept` and `of` all.
        `empty` with the reason for a run without them.
    """
    if record.stage != "generate":
        return {"empty": "This run did not generate responses."}
    if not record.results:
        return {"empty": "No responses yet." if record.state == "running" else "The run stopped before any response."}
    scores = [as_number(row.get("score")) for row in record.results]
    kept = fitting([_response(row) for row in record.results], most_bytes)
    lengths = distributions({"responses": [len(str(row.get("completion", ""))) for row in record.results]})
    return {
        **rounded({name: record.summary.get(name) for name in FIGURES}),
        "scores": distributions({"responses": [score for score in scores if score is not None]}),
        "lengths": lengths and {"unit": "characters", **lengths},
        "responses": kept,
        "kept": len(kept),
        "of": len(record.results),
    }


def describe_generation(record: RunRecord) -> list[str]:
    """One or two sentences about the responses and their scores."""
    summary, count = record.summary, len(record.results)
    if not summary:
        total = record.progress[-1]["total"] if record.progress else None
        of = f" of {total:,}" if total else ""
        return [f"{'So far' if record.state == 'running' else 'Stopped after'} {count:,}{of} responses."]
    first = (
        f"{summary['num_responses']:,} responses to {summary['num_prompts']:,} prompts, {summary['length']:.3g} tokens "
        f"long on average; {summary['eos_rate']:.0%} end with a stop token."
    )
    score = summary.get("score")
    if not isinstance(score, Mapping):
        return [first]
    limits = "" if score["low"] is None else f" ({score['low']:.3g} to {score['high']:.3g})"
    return [first, f"Their mean score by {summary.get('reward', 'the reward')} is {score['value']:.3g}{limits}."]


def _response(row: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: shortened(str(row.get(name, ""))) for name in ("prompt", "completion")}
    scored = {"score": rounded(as_number(row["score"]))} if "score" in row else {}
    return {**texts, "stopped": bool(row.get("stopped")), **scored}

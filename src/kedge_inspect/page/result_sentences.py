"""The sentences of the page about evaluations and generated responses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kedge_base.texts import counted
from kedge_inspect.page.changes import figure, percent, ranged
from kedge_inspect.page.numbers import as_number
from kedge_inspect.record import RunRecord


def of_evaluation(record: RunRecord, progress: str) -> list[str]:
    """Two sentences: the outcome, and whether it distinguishes the two sides."""
    summary = record.summary
    if not summary:
        return [why_no_result(record)]
    if "pass@k" in summary:
        scores = [score for row in record.results if (score := as_number(row.get("score"))) is not None]
        return [*_solved_sentences(summary), *no_verdicts(scores, summary["judge"])]
    if "win_rate" not in summary:
        return [f"The critic of {summary.get('critic')} was checked, with rewards from {summary.get('reward')}."]
    rate = summary["win_rate"]
    against = summary.get("against", "references")
    first = (
        f"{summary['model']} won {summary['won']:,}, tied {summary['tied']:,} and lost {summary['lost']:,} of "
        f"{counted(summary['num_judged'], 'prompt')} against {against}, judged by {summary['judge']}: a win rate of "
        f"{percent(rate)}, ties counting half."
    )
    if rate["low"] <= 0.5 <= rate["high"]:
        return [first, "The interval includes 50%: this evaluation does not tell the two apart."]
    return [first, f"The judge prefers {summary['model'] if rate['value'] > 0.5 else against}."]


def _solved_sentences(summary: Mapping[str, Any]) -> list[str]:
    """Two sentences: the share of prompts that a policy solves at the first try, and with all responses."""
    most = summary["num_samples"]
    known = [(summary.get(name) or {}).get(str(k)) for name, k in (("pass@k", 1), ("pass@k", most), ("maj@k", most))]
    first, last, majority = (percent(interval) if interval else "" for interval in known)
    voted = f", and the most frequent answer for {majority}" if majority else ""
    return [
        f"At the first try {summary['model']} solves {first} of {counted(summary['num_prompts'], 'prompt')}, "
        f"judged by {summary['judge']}.",
        *([f"At least one of {most} responses is right for {last}{voted}."] if last else []),
    ]


def no_verdicts(scores: Collection[float], judge: str) -> list[str]:
    """A sentence about pass@k by a judge whose scores exceed the range 0 to 1, such as a reward model's; empty
    otherwise.
    """
    low = min(scores, default=0.0)
    high = max(scores, default=1.0)
    if low >= 0 and high <= 1:
        return []
    return [
        f"Right is a score of 1 or more, and {judge} gives {figure(low)} to {figure(high)}: unless these are verdicts "
        "of right or wrong, pass@k means little."
    ]


def of_generation(record: RunRecord, progress: str) -> list[str]:
    """One or two sentences about the responses and their scores."""
    summary = record.summary
    count = len(record.results)
    if not summary:
        total = record.progress[-1]["total"] if record.progress else None
        so_far = f"{count:,} of {total:,} responses" if total else counted(count, "response")
        return [f"{'So far' if record.state == 'running' else 'Stopped after'} {so_far}."]
    best = f", each the best of {summary['best_of']}" if "best_of" in summary else ""
    first = (
        f"{counted(summary['num_responses'], 'response')} to {counted(summary['num_prompts'], 'prompt')}{best}, "
        f"{figure(summary['length'])} tokens long on average; {summary['eos_rate']:.0%} end with a stop token."
    )
    score = summary.get("score")
    if not isinstance(score, Mapping):
        return [first]
    single = summary.get("score_of_one")
    one = f"; that of a single response is {figure(single['value'])}" if isinstance(single, Mapping) else ""
    return [first, f"Their mean score by {summary.get('reward', 'the reward')} is {ranged(score)}{one}."]


def why_no_result(record: RunRecord) -> str:
    """The reason why an evaluation has no result."""
    if record.state == "running":
        return "The evaluation is running. Its result comes at the end."
    return "The evaluation stopped before it had a result."

"""The sentences of the page about a run, by stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kedge_base.intervals import score_interval
from kedge_base.texts import counted
from kedge_inspect.page.changes import change_of, ends_of, figure, joined, percent, ranged, share
from kedge_inspect.page.numbers import as_number, numbers_of, rounded
from kedge_inspect.record import RunRecord
from kedge_inspect.resolved import learns_from_teacher

COUNTS = ("unused", "sampled", "resamples")
"""Responses that were not trained on and all of them, and additional rounds of sampling, per update: `group/…`."""


def of_ppo(record: RunRecord, progress: str) -> list[str]:
    """Sentences on score and KL, held-out scores, other changes, and responses that were thrown away, if any."""
    measured = [_reward_sentence(record, progress), *before_and_after(record), _behavior_sentence(record)]
    return [*measured, *_unused_sentence(record)]


def paired_responses(record: RunRecord) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The responses of the first and of the last evaluation to each prompt of both."""
    rows = record.evaluations
    if len(rows) < 2:
        return []
    first, last = ({each["number"]: each for each in row.get("responses") or ()} for row in (rows[0], rows[-1]))
    return [(first[number], after) for number, after in last.items() if number in first]


def before_and_after(record: RunRecord) -> list[str]:
    """A sentence on the mean scores of the first and the last evaluation, with intervals over prompts, if known."""
    scores = [[rounded(as_number(side["score"])) for side in pair] for pair in paired_responses(record)]
    known = [pair for pair in scores if None not in pair]
    if not known:
        return []
    before, after = (ranged(score_interval([[score] for score in side]).as_json()) for side in zip(*known, strict=True))
    first, last = (moment(record.evaluations[at]["update"]) for at in (0, -1))
    return [f"The mean score on {len(known):,} held-out prompts is {after} {last}, and was {before} {first}."]


def moment(update: int) -> str:
    """The time of an evaluation; a resumed run may begin to evaluate later than at the start."""
    return f"after update {update:,}" if update else "at the start"


def of_fine_tuning(record: RunRecord, progress: str) -> list[str]:
    """The loss, in training and on held-out rows."""
    return [_loss_sentence(record, progress), _held_out_sentence(record)]


def of_reward_model(record: RunRecord, progress: str) -> list[str]:
    """The loss, and the accuracy on held-out pairs."""
    return [_loss_sentence(record, progress), _accuracy_sentence(record)]


def of_critic(record: RunRecord, progress: str) -> list[str]:
    """The share of the returns that the critic explains, overall and by third of the responses."""
    return list(filter(None, (_explained_sentence(record, progress), _thirds_sentence(record))))


def _reward_sentence(record: RunRecord, progress: str) -> str:
    score = ends_of(record, "reward/score_mean")
    kl = ends_of(record, "objective/kl")
    if score is None and kl is not None and learns_from_teacher(record):
        return f"{progress}: the KL to the teacher {change_of(kl)} nats per response."
    if score is None:
        return f"{progress}; no response was scored."
    spread = ends_of(record, "reward/score_std")
    cost = f", at a KL of {figure(kl.last)} nats per response to the reference" if kl else ""
    return f"{progress}: the score {change_of(score, slack=0.1 * spread.first if spread else 0.0)}{cost}."


def _behavior_sentence(record: RunRecord) -> str:
    parts = [
        f"the judge {metric.removeprefix('score/')}, which is not trained on, {change_of(ends)}"
        for metric in record.judges
        if (ends := ends_of(record, metric))
    ]
    if not parts and (entropy := ends_of(record, "policy/entropy")):
        parts.append(f"entropy {change_of(entropy)} nats per token")
    if length := ends_of(record, "response/length"):
        parts.append(f"response length {change_of(length)} tokens")
    turns = ends_of(record, "episode/turns")
    completed = ends_of(record, "episode/completed")
    if turns and completed:
        parts.append(f"turns per episode {change_of(turns)}")
        parts.append(f"{completed.last:.0%} of episodes are completed")
    elif stopped := ends_of(record, "response/eos_rate"):
        parts.append(f"{stopped.last:.0%} of responses end with a stop token")
    return joined(parts) or "No other metrics were measured."


def _unused_sentence(record: RunRecord) -> list[str]:
    """Sentence on the sampled responses that were thrown away; empty if all were trained on."""
    unused, sampled, rounds = (sum(numbers_of(record.metrics, f"group/{name}")) for name in COUNTS)
    if not unused:
        return []
    # The last round can find more groups with spread than the update takes.
    surplus, more = (
        (" or their update was complete", f"; there were {rounds:,.0f} additional rounds of sampling")
        if rounds
        else ("", "")
    )
    return [
        f"{unused:,.0f} of {sampled:,.0f} sampled responses ({unused / sampled:.0%}) were thrown away, because all "
        f"responses to their prompt score the same{surplus} "
        f"(ppo.constant_groups={record.choice('ppo.constant_groups')}){more}."
    ]


def _loss_sentence(record: RunRecord, progress: str) -> str:
    loss = ends_of(record, "loss")
    return f"{progress}: the loss {change_of(loss)} nats." if loss else f"{progress}."


def _held_out_sentence(record: RunRecord) -> str:
    loss = ends_of(record, "eval/loss")
    accuracy = ends_of(record, "eval/token_accuracy")
    parts = [f"on held-out rows it {change_of(loss)}"] if loss else ["no rows were held out"]
    if accuracy:
        parts.append(f"{accuracy.last:.0%} of their tokens are the model's most likely ones")
    return joined(parts)


def _accuracy_sentence(record: RunRecord) -> str:
    accuracy = record.summary.get("accuracy")
    longer = record.summary.get("length_accuracy")
    if not isinstance(accuracy, Mapping):
        held_out = ends_of(record, "eval/accuracy")
        return joined([f"its held-out accuracy is {held_out.last:.0%}" if held_out else "no pairs were held out"])
    parts = [f"it ranks {percent(accuracy)} of {record.summary.get('num_pairs', 0):,} held-out pairs correctly"]
    if isinstance(longer, Mapping):
        parts.append(f"picking the longer response gets {share(longer['value'])}")
    return joined(parts)


def _explained_sentence(record: RunRecord, progress: str) -> str:
    explained = record.summary.get("explained_variance")
    latest = ends_of(record, "explained_variance")
    if isinstance(explained, Mapping):
        where = record.summary.get("measured_on", "held-out prompts")
        return f"{progress}: on {where} it explains {percent(explained)} of the variance of the returns."
    if latest is None:
        return f"{progress}."
    return f"{progress}: on the responses of a step it explains {share(latest.last)} of the variance."


def _thirds_sentence(record: RunRecord) -> str:
    thirds = [as_number(each) for each in record.summary.get("explained_by_third") or ()]
    known = [share(each) for each in thirds if each is not None]
    if len(known) != len(thirds) or not known:
        return "" if record.summary else "It is measured on held-out prompts when the training ends."
    *others, last = known
    return f"In the first, middle and last third of the responses it explains {', '.join(others)} and {last}."


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

"""The sentences of the page about a run, by stage."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge_inspect.page.checks import before_and_after
from kedge_inspect.page.numbers import as_number, figure, mean_of, noise, numbers_of
from kedge_inspect.record import RunRecord
from kedge_inspect.resolved import learns_from_teacher

WINDOW = 20
"""First and last values are means over the first and last one part in this many of the run."""

ROUNDING = 1e-6
CERTAIN = 3.0
"""Standard errors from which on a change is more than noise: a table has a dozen changes."""

NEGLIGIBLE = 0.01
"""Share of the larger of two values below which their difference is noise."""

FEWEST = 4
"""Updates from which on a series shows how noisy it is."""

COUNTS = ("unused", "sampled", "resamples")
"""Responses that were not trained on and all of them, and additional rounds of sampling, per update: `group/…`."""


@dataclass(frozen=True)
class Ends:
    """A metric's first and last value, and the standard error of their difference; infinite where it is not known."""

    first: float
    last: float
    error: float = 0.0

    @property
    def is_change(self) -> bool:
        """True if the values differ by more than noise."""
        least = NEGLIGIBLE * max(abs(self.first), abs(self.last))
        return abs(self.last - self.first) > max(least, CERTAIN * self.error)


def ends_of(record: RunRecord, metric: str) -> Ends | None:
    """The first and last value of a metric; None for a run without it."""
    numbers = numbers_of(record.metrics, metric)
    width = max(1, len(numbers) // WINDOW)
    if not numbers:
        return None
    first, last = _snapped(mean_of(numbers[:width]), mean_of(numbers[-width:]))
    return Ends(first, last, math.sqrt(2 / width) * noise(numbers) if len(record.metrics) >= FEWEST else math.inf)


def _snapped(first: float, last: float) -> tuple[float, float]:
    """Rounding errors that are tiny next to the other value become 0."""
    least = ROUNDING * max(abs(first), abs(last))
    return 0.0 if abs(first) < least else first, 0.0 if abs(last) < least else last


def of_ppo(record: RunRecord, progress: str) -> list[str]:
    """The score and the KL; held-out scores; what else changed; responses that were thrown away, if there are any."""
    measured = [_reward_sentence(record, progress), *before_and_after(record), _behavior_sentence(record)]
    return [*measured, *_unused_sentence(record)]


def of_fine_tuning(record: RunRecord, progress: str) -> list[str]:
    """The loss, in training and on held-out rows."""
    return [_loss_sentence(record, progress), _held_out_sentence(record)]


def of_reward_model(record: RunRecord, progress: str) -> list[str]:
    """The loss, and the accuracy on held-out pairs."""
    return [_loss_sentence(record, progress), _accuracy_sentence(record)]


def of_critic(record: RunRecord, progress: str) -> list[str]:
    """The share of the returns that it explains, in all and by third of the responses."""
    return list(filter(None, (_explained_sentence(record, progress), _thirds_sentence(record))))


def of_evaluation(record: RunRecord, progress: str) -> list[str]:
    """Two sentences: the outcome, and whether it tells the two sides apart."""
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
        f"{summary['num_judged']:,} prompts against {against}, judged by {summary['judge']}: a win rate of "
        f"{rate['value']:.0%} ({rate['low']:.0%} to {rate['high']:.0%}), ties counting half."
    )
    if rate["low"] <= 0.5 <= rate["high"]:
        return [first, "The interval includes 50%: this evaluation does not tell the two apart."]
    return [first, f"The judge prefers {summary['model'] if rate['value'] > 0.5 else against}."]


def _solved_sentences(summary: Mapping[str, Any]) -> list[str]:
    """Two sentences: the share of prompts that a policy solves at the first try, and with all responses."""
    most = summary["num_samples"]
    first, last, majority = (
        _share((summary.get(name) or {}).get(str(k))) for name, k in (("pass@k", 1), ("pass@k", most), ("maj@k", most))
    )
    voted = f", and the most frequent answer for {majority}" if majority else ""
    return [
        f"At the first try {summary['model']} solves {first or 'none'} of {summary['num_prompts']:,} prompts, "
        f"judged by {summary['judge']}.",
        *([f"At least one of {most} responses is right for {last}{voted}."] if last else []),
    ]


def no_verdicts(scores: Collection[float], judge: str) -> list[str]:
    """A sentence on pass@k by a judge whose scores go beyond 0 to 1, as a reward model's do; else none."""
    low = min(scores, default=0.0)
    high = max(scores, default=1.0)
    if low >= 0 and high <= 1:
        return []
    return [
        f"Right is a score of 1 or more, and {judge} gives {figure(low)} to {figure(high)}: unless these are verdicts "
        "of right or wrong, pass@k means little."
    ]


def _share(interval: Mapping[str, float] | None) -> str:
    return f"{interval['value']:.0%} ({interval['low']:.0%} to {interval['high']:.0%})" if interval else ""


def of_generation(record: RunRecord, progress: str) -> list[str]:
    """One or two sentences about the responses and their scores."""
    summary = record.summary
    count = len(record.results)
    if not summary:
        total = record.progress[-1]["total"] if record.progress else None
        of = f" of {total:,}" if total else ""
        return [f"{'So far' if record.state == 'running' else 'Stopped after'} {count:,}{of} responses."]
    best = f", each the best of {summary['best_of']}" if "best_of" in summary else ""
    first = (
        f"{summary['num_responses']:,} responses to {summary['num_prompts']:,} prompts{best}, "
        f"{summary['length']:.3g} tokens long on average; {summary['eos_rate']:.0%} end with a stop token."
    )
    score = summary.get("score")
    if not isinstance(score, Mapping):
        return [first]
    limits = "" if score["low"] is None else f" ({score['low']:.3g} to {score['high']:.3g})"
    single = summary.get("score_of_one")
    one = f"; that of a single response is {single['value']:.3g}" if isinstance(single, Mapping) else ""
    return [first, f"Their mean score by {summary.get('reward', 'the reward')} is {score['value']:.3g}{limits}{one}."]


def why_no_result(record: RunRecord) -> str:
    """The reason why an evaluation has no result."""
    if record.state == "running":
        return "The evaluation is running. Its result comes at the end."
    return "The evaluation stopped before it had a result."


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
    mode: object = record.setting("ppo.constant_groups")
    mode = "resample" if isinstance(mode, dict) else mode  # {resample: rounds}
    return [
        f"{unused:,.0f} of {sampled:,.0f} sampled responses ({unused / sampled:.0%}) were thrown away, because all "
        f"responses to their prompt score the same{surplus} "
        f"(ppo.constant_groups={mode}){more}."
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
    parts = [
        f"it ranks {accuracy['value']:.0%} of {record.summary.get('num_pairs', 0):,} held-out pairs correctly"
        f" ({accuracy['low']:.0%} to {accuracy['high']:.0%})"
    ]
    if isinstance(longer, Mapping):
        parts.append(f"picking the longer response gets {longer['value']:.0%}")
    return joined(parts)


def _explained_sentence(record: RunRecord, progress: str) -> str:
    explained = record.summary.get("explained_variance")
    latest = ends_of(record, "explained_variance")
    if isinstance(explained, Mapping):
        share = f"{explained['value']:.0%}"
        if explained["low"] is not None:  # null with a single prompt
            share += f" ({explained['low']:.0%} to {explained['high']:.0%})"
        where = record.summary.get("measured_on", "held-out prompts")
        return f"{progress}: on {where} it explains {share} of the variance of the returns."
    if latest is None:
        return f"{progress}."
    return f"{progress}: on the responses of a step it explains {latest.last:.0%} of the variance."


def _thirds_sentence(record: RunRecord) -> str:
    thirds = [as_number(share) for share in record.summary.get("explained_by_third") or ()]
    known = [f"{share:.0%}" for share in thirds if share is not None]
    if len(known) != len(thirds) or not known:
        return "" if record.summary else "It is measured on held-out prompts when the training ends."
    *others, last = known
    return f"In the first, middle and last third of the responses it explains {', '.join(others)} and {last}."


def change_of(ends: Ends, slack: float = 0.0) -> str:
    """`rose from 1 to 5`, or `stayed near 5` for a change within `slack` or the noise."""
    first = figure(ends.first)
    last = figure(ends.last)
    if first == last or not ends.is_change or abs(ends.last - ends.first) < slack:
        return f"stayed near {last}"
    return f"{'rose' if ends.last > ends.first else 'fell'} from {first} to {last}"


def joined(parts: Sequence[str]) -> str:
    """The parts as one sentence; empty without parts."""
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}, and {parts[-1]}" if parts else ""
    return f"{text[:1].upper()}{text[1:]}." if text else ""

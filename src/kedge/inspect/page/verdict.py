"""What a run did, in two sentences and a table: the first thing that the page says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kedge.inspect.page.curves import items_per_update
from kedge.inspect.page.numbers import as_figure, mean_of, rounded
from kedge.inspect.record import RunRecord

__all__ = ["describe_run", "final_figures"]

WINDOW = 20
"""The first and the last figure of a run are means over its first and last twentieth."""

ROUNDING = 1e-6


@dataclass(frozen=True)
class Ends:
    """A metric's first and last figure."""

    first: float
    last: float


@dataclass(frozen=True)
class Row:
    """A metric of the table: its label, its unit, and which way is good where there is such a way."""

    metric: str
    label: str
    unit: str = ""
    good: Literal["up", "down", ""] = ""


PPO_ROWS = (
    Row("reward/score_mean", "Score", good="up"),
    Row("reward/total", "Score less KL cost", good="up"),
    Row("objective/kl", "KL to the reference", "nats per response"),
    Row("policy/entropy", "Entropy", "nats per token"),
    Row("policy/clip_fraction", "Clip fraction", "share"),
    Row("policy/approx_kl", "Approximate KL of an update", "nats per token"),
    Row("policy/grad_norm", "Gradient norm"),
    Row("value/explained_variance", "Explained variance", "share", "up"),
    Row("value/loss", "Value loss", good="down"),
    Row("response/length", "Response length", "tokens"),
    Row("response/eos_rate", "EOS rate", "share", "up"),
    Row("response/repetition", "Repetition", "share", "down"),
    Row("tokens_per_second", "Tokens per second", "1/s", "up"),
)
SUPERVISED_ROWS = (
    Row("loss", "Loss", "nats", "down"),
    Row("eval/loss", "Loss, held out", "nats", "down"),
    Row("accuracy", "Accuracy", "share", "up"),
    Row("eval/accuracy", "Accuracy, held out", "share", "up"),
    Row("token_accuracy", "Accuracy of tokens", "share", "up"),
    Row("eval/token_accuracy", "Accuracy of tokens, held out", "share", "up"),
    Row("grad_norm", "Gradient norm"),
    Row("tokens_per_second", "Tokens per second", "1/s", "up"),
)


def final_figures(record: RunRecord) -> list[dict[str, Any]]:
    """The table's rows: each metric's first and last figure."""
    rows = PPO_ROWS if record.stage == "ppo" else SUPERVISED_ROWS
    judged = tuple(Row(metric, f"Judge {metric.removeprefix('score/')}", good="up") for metric in record.judges)
    found = ((row, _ends(record, row.metric)) for row in (*rows[:1], *judged, *rows[1:]))
    return [
        {"label": row.label, "unit": row.unit, "good": row.good, **rounded(vars(ends))} for row, ends in found if ends
    ]


def describe_run(record: RunRecord) -> list[str]:
    """Two sentences in plain words."""
    if not record.metrics:
        return [f"{_progress(record)}.", "There are no figures yet."]
    if record.stage == "ppo":
        return [_reward_sentence(record), _behaviour_sentence(record)]
    if record.stage == "reward":
        return [_course_sentence(record), _accuracy_sentence(record)]
    return [_course_sentence(record), _held_out_sentence(record)]


def _ends(record: RunRecord, metric: str) -> Ends | None:
    figures = [figure for row in record.metrics if (figure := as_figure(row.get(metric))) is not None]
    width = max(1, len(figures) // WINDOW)
    return _snapped(mean_of(figures[:width]), mean_of(figures[-width:])) if figures else None


def _snapped(first: float, last: float) -> Ends:
    """Rounding's leftovers beside a real figure are 0."""
    least = ROUNDING * max(abs(first), abs(last))
    return Ends(*(0.0 if abs(figure) < least else figure for figure in (first, last)))


def _progress(record: RunRecord) -> str:
    name = {"ppo": "PPO", "sft": "Fine-tuning", "reward": "The reward model's training"}.get(record.stage, "The run")
    step = "update" if record.stage == "ppo" else "step"
    count, total = len(record.metrics), record.setting("ppo.num_updates") if record.stage == "ppo" else None
    of = f" of {total:,}" if isinstance(total, int) else ""
    if record.state == "running":
        return f"{name} is at {step} {count:,}{of}"
    if record.state == "stopped":
        return f"{name} stopped after {step} {count:,}{of}"
    each = items_per_update(record)
    responses = f", {count * each:,} responses" if each and record.stage == "ppo" else ""
    return f"{name} ran {count:,} {step}s ({duration(_seconds(record))}{responses})"


def _seconds(record: RunRecord) -> float:
    return sum(as_figure(row.get("time/update")) or 0.0 for row in record.metrics)


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _reward_sentence(record: RunRecord) -> str:
    score, kl = _ends(record, "reward/score_mean"), _ends(record, "objective/kl")
    if score is None:
        return f"{_progress(record)}, and no response was scored."
    spread = _ends(record, "reward/score_std")
    price = f", for a KL of {kl.last:.3g} nats per response to the reference" if kl else ""
    return f"{_progress(record)}: the score {_went(score, slack=0.1 * spread.first if spread else 0.0)}{price}."


def _behaviour_sentence(record: RunRecord) -> str:
    told = [
        f"the judge {metric.removeprefix('score/')}, which training never saw, {_went(ends)}"
        for metric in record.judges
        if (ends := _ends(record, metric))
    ]
    if not told and (entropy := _ends(record, "policy/entropy")):
        told.append(f"entropy {_went(entropy)} nats per token")
    if length := _ends(record, "response/length"):
        told.append(f"responses {_went(length)} tokens")
    if stopped := _ends(record, "response/eos_rate"):
        told.append(f"{stopped.last:.0%} of them end by themselves")
    return _sentence(told) or "Nothing else was measured."


def _course_sentence(record: RunRecord) -> str:
    loss = _ends(record, "loss")
    return f"{_progress(record)}: the loss {_went(loss)} nats." if loss else f"{_progress(record)}."


def _held_out_sentence(record: RunRecord) -> str:
    loss, accuracy = _ends(record, "eval/loss"), _ends(record, "eval/token_accuracy")
    told = [f"on held-out rows it {_went(loss)}"] if loss else ["nothing was held out to measure on"]
    if accuracy:
        told.append(f"{accuracy.last:.0%} of their tokens are those that the model thinks most likely")
    return _sentence(told)


def _accuracy_sentence(record: RunRecord) -> str:
    accuracy, longer = record.summary.get("accuracy"), record.summary.get("length_accuracy")
    if not isinstance(accuracy, Mapping):
        held_out = _ends(record, "eval/accuracy")
        return _sentence([f"its held-out accuracy is {held_out.last:.0%}" if held_out else "nothing was held out"])
    told = [
        f"it puts {accuracy['value']:.0%} of {record.summary.get('num_pairs', 0):,} held-out pairs into the right order"
        f" ({accuracy['low']:.0%} to {accuracy['high']:.0%})"
    ]
    if isinstance(longer, Mapping):
        told.append(f"taking the longer answer gets {longer['value']:.0%}")
    return _sentence(told)


def _went(ends: Ends, slack: float = 0.0) -> str:
    first, last = f"{ends.first:.3g}", f"{ends.last:.3g}"
    if first == last or abs(ends.last - ends.first) < slack:
        return f"stayed near {last}"
    return f"{'rose' if ends.last > ends.first else 'fell'} from {first} to {last}"


def _sentence(parts: Sequence[str]) -> str:
    joined = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}, and {parts[-1]}" if parts else ""
    return f"{joined[:1].upper()}{joined[1:]}." if joined else ""

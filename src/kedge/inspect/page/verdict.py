"""The verdict: two sentences and a table of first and last values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kedge.inspect.page.curves import items_per_update
from kedge.inspect.page.evaluation import describe_evaluation
from kedge.inspect.page.generation import describe_generation
from kedge.inspect.page.numbers import as_number, mean_of, noise, numbers_of, rounded
from kedge.inspect.page.wording import figure, typographic
from kedge.inspect.record import RunRecord
from kedge.inspect.resolved import KL_COSTS, charges_kl

__all__ = ["describe_run", "first_and_last"]

WINDOW = 20
"""First and last values are means over the first and last one part in this many of the run."""

ROUNDING = 1e-6
CERTAIN = 3.0
"""Standard errors from which on a change is more than noise: a table has a dozen changes."""

NEGLIGIBLE = 0.01
"""Part of the larger of two values below which their difference means nothing."""

COUNTS = ("unused", "sampled", "resamples")
"""Responses that were not trained on and all of them, and additional rounds of sampling, per update: `group/…`."""

FEWEST = 4
"""Values from which on a series shows how noisy it is."""


@dataclass(frozen=True)
class Ends:
    """A metric's first and last value, and the standard error of their difference."""

    first: float
    last: float
    error: float = 0.0

    @property
    def is_change(self) -> bool:
        """Whether the values differ by more than noise."""
        least = NEGLIGIBLE * max(abs(self.first), abs(self.last))
        return abs(self.last - self.first) > max(least, CERTAIN * self.error)


@dataclass(frozen=True)
class Row:
    """A metric of the table: label, unit, and the direction that is good, if there is one."""

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
    Row("group/constant", "Prompts without spread", "share"),
    Row("tokens_per_second", "Tokens per second", "1/s"),
)
SUPERVISED_ROWS = (
    Row("loss", "Loss", "nats", "down"),
    Row("eval/loss", "Loss, held out", "nats", "down"),
    Row("accuracy", "Accuracy", "share", "up"),
    Row("eval/accuracy", "Accuracy, held out", "share", "up"),
    Row("token_accuracy", "Accuracy of tokens", "share", "up"),
    Row("eval/token_accuracy", "Accuracy of tokens, held out", "share", "up"),
    Row("grad_norm", "Gradient norm"),
    Row("tokens_per_second", "Tokens per second", "1/s"),
)
CRITIC_ROWS = (
    Row("explained_variance", "Explained variance", "share", "up"),
    Row("eval/explained_variance", "Explained variance, held out", "share", "up"),
    Row("loss", "Loss", "variances of the returns", "down"),
    Row("eval/loss", "Loss, held out", "variances of the returns", "down"),
    *SUPERVISED_ROWS[-2:],
)
CONTROL_ROWS = (
    Row("episode/return_mean", "Return of the last 100 episodes", good="up"),
    Row("eval/return_mean", "Return of the most likely actions", good="up"),
    Row("episode/length_mean", "Episode length", "steps"),
    Row("policy/entropy", "Entropy", "nats per step"),
    Row("policy/clip_fraction", "Clip fraction", "share"),
    Row("policy/distance_moved", "KL of an update", "nats per step"),
    Row("value/explained_variance", "Explained variance", "share", "up"),
    Row("tokens_per_second", "Steps per second", "1/s"),
)
ROWS = {"ppo": PPO_ROWS, "critic": CRITIC_ROWS, "control": CONTROL_ROWS}


def first_and_last(record: RunRecord) -> list[dict[str, Any]]:
    """Rows of the table: first and last value of each metric.

    `change` is `better` or `worse` if the metric has a good direction and moved by more than noise, or else empty.
    """
    rows = ROWS.get(record.stage, SUPERVISED_ROWS)
    if not charges_kl(record):
        rows = tuple(row for row in rows if row.metric not in KL_COSTS)
    judged = tuple(Row(metric, f"Judge {metric.removeprefix('score/')}", good="up") for metric in record.judges)
    found = ((row, _ends(record, row.metric)) for row in (*rows[:1], *judged, *rows[1:]))
    return [
        {
            "label": row.label,
            "unit": row.unit,
            **rounded({"first": ends.first, "last": ends.last}),
            "change": _judged(row, ends, len(record.metrics)),
        }
        for row, ends in found
        if ends
    ]


def describe_run(record: RunRecord) -> list[str]:
    """One or two sentences about the run, and one more each if responses were thrown away and if it ended early."""
    if record.stage == "evaluate":
        return describe_evaluation(record)
    if record.stage == "generate":
        return describe_generation(record)
    if not record.metrics:
        return [f"{_progress(record)}.", "No metrics yet."]
    ended = [f"It ended early: {typographic(record.ended_early)}."] if record.ended_early else []
    if record.stage == "ppo":
        return [_reward_sentence(record), _behavior_sentence(record), *_unused_sentence(record), *ended]
    if record.stage == "control":
        return [*_return_sentences(record), *ended]
    if record.stage == "reward":
        return [_loss_sentence(record), _accuracy_sentence(record), *ended]
    if record.stage == "critic":
        return [*filter(None, (_explained_sentence(record), _thirds_sentence(record))), *ended]
    return [_loss_sentence(record), _held_out_sentence(record), *ended]


def _ends(record: RunRecord, metric: str) -> Ends | None:
    numbers = numbers_of(record.metrics, metric)
    width = max(1, len(numbers) // WINDOW)
    if not numbers:
        return None
    first, last = _snapped(mean_of(numbers[:width]), mean_of(numbers[-width:]))
    return Ends(first, last, math.sqrt(2 / width) * noise(numbers))


def _snapped(first: float, last: float) -> tuple[float, float]:
    """Rounding errors that are tiny next to the other value become 0."""
    least = ROUNDING * max(abs(first), abs(last))
    return 0.0 if abs(first) < least else first, 0.0 if abs(last) < least else last


def _judged(row: Row, ends: Ends, length: int) -> str:
    if not row.good or not ends.is_change or length < FEWEST:
        return ""
    return "better" if (ends.last > ends.first) == (row.good == "up") else "worse"


NAMES = {
    "ppo": "PPO",
    "sft": "Fine-tuning",
    "reward": "Reward model training",
    "critic": "The training of the critic",
    "control": "Training",
}


def _progress(record: RunRecord) -> str:
    name = NAMES.get(record.stage, "The run")
    step = "update" if record.stage in ("ppo", "control") else "step"
    count, total = len(record.metrics), record.num_updates
    of = "" if total is None else f" of {total:,}"
    if record.state == "running":
        return f"{name} is at {step} {count:,}{of}"
    if record.state == "stopped":
        return f"{name} stopped after {step} {count:,}{of}"
    each = items_per_update(record)
    units = {"ppo": "responses", "control": "steps"}
    items = f", {count * each:,} {units[record.stage]}" if each and record.stage in units else ""
    return f"{name} ran {count:,}{of if record.ended_early else ''} {step}s ({duration(_seconds(record))}{items})"


def _seconds(record: RunRecord) -> float:
    return sum(numbers_of(record.metrics, "time/update"))


def duration(seconds: float) -> str:
    """A time in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _reward_sentence(record: RunRecord) -> str:
    score, kl = _ends(record, "reward/score_mean"), _ends(record, "objective/kl")
    if score is None:
        return f"{_progress(record)}; no response was scored."
    spread = _ends(record, "reward/score_std")
    cost = f", at a KL of {figure(kl.last)} nats per response to the reference" if kl else ""
    return f"{_progress(record)}: the score {_change(score, slack=0.1 * spread.first if spread else 0.0)}{cost}."


def _behavior_sentence(record: RunRecord) -> str:
    parts = [
        f"the judge {metric.removeprefix('score/')}, which is not trained on, {_change(ends)}"
        for metric in record.judges
        if (ends := _ends(record, metric))
    ]
    if not parts and (entropy := _ends(record, "policy/entropy")):
        parts.append(f"entropy {_change(entropy)} nats per token")
    if length := _ends(record, "response/length"):
        parts.append(f"response length {_change(length)} tokens")
    if stopped := _ends(record, "response/eos_rate"):
        parts.append(f"{stopped.last:.0%} of responses end with a stop token")
    return _sentence(parts) or "No other metrics were measured."


def _unused_sentence(record: RunRecord) -> list[str]:
    """How many of the sampled responses were thrown away; none if all were trained on."""
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
        f"(ppo.constant_groups={record.setting('ppo.constant_groups')}){more}."
    ]


def _return_sentences(record: RunRecord) -> list[str]:
    """What a control run reached."""
    total, name = _ends(record, "episode/return_mean"), record.setting("control.env")
    if total is None:
        return [f"{_progress(record)} in {name}; no episode has ended."]
    parts = [f"entropy {_change(entropy)} nats per step"] if (entropy := _ends(record, "policy/entropy")) else []
    if length := _ends(record, "episode/length_mean"):
        parts.append(f"an episode's length {_change(length)} steps")
    if evaluated := _ends(record, "eval/return_mean"):
        parts.append(f"the most likely actions return {figure(evaluated.last)}")
    return [f"{_progress(record)} in {name}: the return of an episode {_change(total)}.", _sentence(parts)]


def _loss_sentence(record: RunRecord) -> str:
    loss = _ends(record, "loss")
    return f"{_progress(record)}: the loss {_change(loss)} nats." if loss else f"{_progress(record)}."


def _held_out_sentence(record: RunRecord) -> str:
    loss, accuracy = _ends(record, "eval/loss"), _ends(record, "eval/token_accuracy")
    parts = [f"on held-out rows it {_change(loss)}"] if loss else ["no rows were held out"]
    if accuracy:
        parts.append(f"{accuracy.last:.0%} of their tokens are the model's most likely ones")
    return _sentence(parts)


def _accuracy_sentence(record: RunRecord) -> str:
    accuracy, longer = record.summary.get("accuracy"), record.summary.get("length_accuracy")
    if not isinstance(accuracy, Mapping):
        held_out = _ends(record, "eval/accuracy")
        return _sentence([f"its held-out accuracy is {held_out.last:.0%}" if held_out else "no pairs were held out"])
    parts = [
        f"it ranks {accuracy['value']:.0%} of {record.summary.get('num_pairs', 0):,} held-out pairs correctly"
        f" ({accuracy['low']:.0%} to {accuracy['high']:.0%})"
    ]
    if isinstance(longer, Mapping):
        parts.append(f"picking the longer response gets {longer['value']:.0%}")
    return _sentence(parts)


def _explained_sentence(record: RunRecord) -> str:
    explained, latest = record.summary.get("explained_variance"), _ends(record, "explained_variance")
    if isinstance(explained, Mapping):
        share = f"{explained['value']:.0%} ({explained['low']:.0%} to {explained['high']:.0%})"
        where = record.summary.get("measured_on", "held-out prompts")
        return f"{_progress(record)}: on {where} it explains {share} of the variance of the returns."
    if latest is None:
        return f"{_progress(record)}."
    return f"{_progress(record)}: on the responses of a step it explains {latest.last:.0%} of the variance."


def _thirds_sentence(record: RunRecord) -> str:
    thirds = [as_number(share) for share in record.summary.get("explained_by_third") or ()]
    known = [f"{share:.0%}" for share in thirds if share is not None]
    if len(known) != len(thirds) or not known:
        return "" if record.summary else "It is measured on held-out prompts when the training ends."
    *others, last = known
    return f"In the first, middle and last third of the responses it explains {', '.join(others)} and {last}."


def _change(ends: Ends, slack: float = 0.0) -> str:
    first, last = figure(ends.first), figure(ends.last)
    if first == last or abs(ends.last - ends.first) < max(slack, CERTAIN * ends.error):
        return f"stayed near {last}"
    return f"{'rose' if ends.last > ends.first else 'fell'} from {first} to {last}"


def _sentence(parts: Sequence[str]) -> str:
    joined = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}, and {parts[-1]}" if parts else ""
    return f"{joined[:1].upper()}{joined[1:]}." if joined else ""

"""The rows of the data that a run could not use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.needs import TRAINED, Needs
from kedge.inspect.doctor.remedies import scale, set_to
from kedge.inspect.record import RunRecord

__all__ = ["ROWS_DROPPED"]

MANY, FAR_TOO_MANY = 0.05, 0.2
"""Share of a source's rows. One in twenty is the default of data.max_rejected_fraction, so a run above it was told to
continue; where a fifth is missing, the rest is another data set: without its long rows, or without one of its files."""

MOST_REASONS = 3
"""Reasons that are named."""

LIMITS = ("data.max_prompt_tokens", "data.max_length")


def _dropped(run: RunRecord) -> Symptom | None:
    shares = {role: _share(usage) for role, usage in run.data.items() if isinstance(usage, Mapping)}
    many = [role for role, share in shares.items() if share >= MANY]
    if not many:
        return None
    reasons = dict.fromkeys(reason for role in many for reason in run.data[role]["dropped"])
    return Symptom(
        "warning" if max(shares.values()) >= FAR_TOO_MANY else "note",
        "; ".join(f"{shares[role]:.0%} of the {role} were dropped ({_in_words(run.data[role])})" for role in many),
        tuple(_keep_more(run, list(reasons))),
        "see rejected.jsonl for the rows" if any(not _limits_in(reason) for reason in reasons) else "",
    )


def _share(usage: Mapping[str, Any]) -> float:
    dropped = usage.get("dropped")
    return sum(dropped.values()) / max(usage.get("rows") or 0, 1) if isinstance(dropped, Mapping) else 0.0


def _in_words(usage: Mapping[str, Any]) -> str:
    reasons = list(usage["dropped"].items())
    more = f", {len(reasons) - MOST_REASONS} more reasons" if len(reasons) > MOST_REASONS else ""
    return f"{usage['rows']:,} rows: " + ", ".join(f"{n:,} {reason}" for reason, n in reasons[:MOST_REASONS]) + more


def _keep_more(run: RunRecord, reasons: list[str]) -> Iterator[Remedy]:
    exceeded = [field for field in LIMITS if any(field in _limits_in(reason) for reason in reasons)]
    for field in exceeded:
        yield scale(run, field, 2.0)
    if exceeded and run.setting("data.truncate") == "never":
        yield set_to(run, "data.truncate", "keep_end", why="to cut long prompts instead (keep_start keeps their start)")


def _limits_in(reason: str) -> list[str]:
    """The fields that a reason such as `prompt longer than data.max_prompt_tokens=512` names."""
    return re.findall(r"data\.\w+", reason)


ROWS_DROPPED = Rule(
    "rows_dropped",
    "Many rows of the data could not be used, and those that remain may differ from them: long prompts, for example, "
    "are often the difficult ones.",
    (),
    _dropped,
    Needs(updates=0, stages=TRAINED, fits=lambda run: bool(run.data)),
)

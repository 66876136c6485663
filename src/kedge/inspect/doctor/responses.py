"""How responses end, and what they answer."""

from __future__ import annotations

import re

from kedge.inspect.doctor.courses import TREND, course, figure
from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.remedies import change, scale
from kedge.inspect.record import RunRecord

__all__ = ["DUPLICATED_PROMPTS", "STOPS_AT_ONCE", "TOO_FEW_EOS", "TRUNCATED_AT_CAP", "all_are_cut", "stop_is_asked_for"]

CUT = 0.1
"""Share of responses at the cap that are worth a word: N+ has 2 to 5 %."""

FEW_STOP, NONE_STOP = 0.5, 0.1
"""Share of responses that stop, where most or nearly all of the scores are those of a missing stop token."""

AT_ONCE, SHRUNK = 4.0, 0.25
"""Tokens of a response, stop token included, that is next to none, in themselves and in what there were."""

ALIKE, MOST_ALIKE = 0.8, 0.4
"""Share of an update's prompts that differ. A file that holds fewer prompts than an update has them more than once."""


def stop_is_asked_for(run: RunRecord) -> bool:
    """Whether a response without its stop token has a score of its own: `Rollout.eos_score` in the configuration."""
    asked = run.setting("rollout.missing_eos_score")
    if asked != "auto":
        return asked is not None
    terms = run.config.get("reward")
    sources = [str(term.get("source")) for term in terms] if isinstance(terms, list) else []
    return any(re.fullmatch(r".+:[^\W\d][\w.]*", source) is None for source in sources)


def all_are_cut(run: RunRecord) -> bool:
    """Whether nearly every response has the score of a missing stop token, from the first update on."""
    stops = course(run, "response/eos_rate")
    return stop_is_asked_for(run) and stops is not None and max(stops.first, stops.late) < NONE_STOP


def _truncated(run: RunRecord) -> Symptom | None:
    stops, longest = course(run, "response/eos_rate"), course(run, "response/length_max")
    if stops is None or longest is None or stops.late > 1 - CUT:
        return None
    asked = stop_is_asked_for(run)
    severity = "serious" if asked and max(stops.first, stops.late) < FEW_STOP else "warning"
    return Symptom(
        severity if asked or stops.first > NONE_STOP else "note",
        f"{1 - stops.late:.0%} of the responses are cut at {longest.late:g} tokens ({stops.late_span}), "
        f"{1 - stops.first:.0%} at first",
        (scale(run, "rollout.max_new_tokens", 2.0),),
    )


def _few_stop(run: RunRecord) -> Symptom | None:
    stops = course(run, "response/eos_rate")
    if stops is None or stops.late > FEW_STOP:
        return None
    asked = stop_is_asked_for(run)
    remedy = (
        Remedy("rollout.missing_eos_score", "too_high", "lower rollout.missing_eos_score")
        if asked
        else change("rollout.missing_eos_score", -1, "so that stopping pays")
    )
    return Symptom(
        "serious" if asked and stops.late < NONE_STOP else "warning" if asked or stops.first > NONE_STOP else "note",
        f"{stops.late:.0%} of the responses stop ({stops.late_span}), {stops.first:.0%} at first"
        + ("; the others have the score of a missing stop token" if asked else ""),
        (remedy, scale(run, "rollout.max_new_tokens", 2.0)),
        "see that the demonstrations end with the stop token and that it is not taken for padding",
    )


def _stop_at_once(run: RunRecord) -> Symptom | None:
    length = course(run, "response/length", least=TREND)
    if length is None or length.late > min(AT_ONCE, SHRUNK * length.first):
        return None
    return Symptom(
        "serious",
        f"responses are {figure(length.late)} tokens long ({length.late_span}), {figure(length.first)} at first",
        (Remedy("rollout.missing_eos_score", "too_low", "raise rollout.missing_eos_score"),),
    )


def _duplicated(run: RunRecord) -> Symptom | None:
    distinct = course(run, "prompt/distinct")
    if distinct is None or distinct.late > ALIKE:
        return None
    return Symptom(
        "serious" if distinct.late < MOST_ALIKE else "warning",
        f"of an update's prompts {distinct.late:.0%} differ ({distinct.late_span})",
        (
            Remedy("data.prompts", "switch", "give data.prompts more prompts, each once"),
            scale(run, "rollout.num_prompts", 0.5),
        ),
    )


DUPLICATED_PROMPTS = Rule(
    "duplicated_prompts",
    "The same prompts are asked again within an update: fewer situations to learn from than the batch's size says, "
    "and those are learnt by heart.",
    ("prompt/distinct",),
    _duplicated,
)

TOO_FEW_EOS = Rule(
    "too_few_eos",
    "The policy does not come to an end. It has never learnt the stop token, it has unlearnt it, or there is no "
    "room for it.",
    ("response/eos_rate",),
    _few_stop,
)

TRUNCATED_AT_CAP = Rule(
    "truncated_at_cap",
    "Responses are cut in the middle: their score is that of a fragment.",
    ("response/eos_rate", "response/length_max"),
    _truncated,
)

STOPS_AT_ONCE = Rule(
    "stops_at_once",
    "The policy has learnt that stopping is all there is to it.",
    ("response/length",),
    _stop_at_once,
)

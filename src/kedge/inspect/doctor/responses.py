"""Prompts, and how responses end."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.needs import Needs
from kedge.inspect.doctor.remedies import adjust, scale, set_to
from kedge.inspect.doctor.trends import MIN_LEVEL, MIN_TREND, Series, fmt, read, rose
from kedge.inspect.record import RunRecord

__all__ = [
    "DUPLICATED_PROMPTS",
    "STOPS_AT_ONCE",
    "TOO_FEW_EOS",
    "TRUNCATED_AT_CAP",
    "eos_is_scored",
    "nearly_all_truncated",
    "num_responses",
    "num_sampled",
    "selected_by_score",
    "unscored_share",
]

TRUNCATED = 0.1
"""Share of truncated responses worth reporting: N+ has 2 to 5 %."""

FEW_STOP, NONE_STOP = 0.5, 0.1
"""Share of responses that stop, below which most or nearly all scores are the one for a missing stop token."""

TINY, SHRUNK = 4.0, 0.25
"""Length of nearly empty responses: in tokens, stop token included, and relative to the first update."""

REPEATED, MOSTLY_REPEATED = 0.8, 0.4
"""Share of distinct prompts in an update. A file with fewer prompts than an update needs repeats them."""


SELECTED = 0.1
"""Share of unscored responses above which the others are no fair sample of the policy."""


def eos_is_scored(run: RunRecord) -> bool:
    """Whether a response without a stop token gets a score of its own, as `RolloutConfig.eos_score` decides."""
    score = run.setting("rollout.missing_eos_score")
    if score != "auto":
        return score is not None
    terms = run.config.get("reward")
    sources = [str(term.get("source")) for term in terms if term.get("weight") != 0] if isinstance(terms, list) else []
    return any(re.fullmatch(r".+:[^\W\d][\w.]*", source) is None for source in sources)


def nearly_all_truncated(run: RunRecord) -> bool:
    """Whether nearly every response has the score for a missing stop token, from the first update on."""
    stops = read(run, "response/eos_rate")
    return eos_is_scored(run) and stops is not None and max(stops.first, stops.late) < NONE_STOP


def unscored_share(run: RunRecord) -> float:
    """Share of the responses that were left out of the updates because they have no score."""
    unscored = read(run, "reward/unscored", at_least=1)
    return sum(unscored.values) / num_sampled(run, unscored.updates) if unscored else 0.0


def selected_by_score(run: RunRecord) -> str:
    """States that the measured responses are a selection, no fair sample of the policy; empty if they are not."""
    share = unscored_share(run)
    return f"{share:.0%} of the responses have no score and were not measured" if share > SELECTED else ""


def num_responses(run: RunRecord) -> int:
    """Responses per update, which determine the error of a mean score."""
    return (run.setting("rollout.num_prompts") or 1) * (run.setting("rollout.num_responses") or 1)


def num_sampled(run: RunRecord, updates: Sequence[int]) -> float:
    """Responses that were sampled in these updates: more than trained on, if groups without spread were resampled."""
    sampled = read(run, "group/sampled", at_least=1)
    known = dict(zip(sampled.updates, sampled.values, strict=True)) if sampled else {}
    return sum(known.get(update, num_responses(run)) for update in updates)


def _truncated(run: RunRecord) -> Symptom | None:
    stops, longest = read(run, "response/eos_rate"), read(run, "response/length_max")
    if stops is None or longest is None:
        return None
    scored, longer = eos_is_scored(run), (scale(run, "rollout.max_new_tokens", 2.0),)
    if stops.late > 1 - TRUNCATED:
        return _fitted_to_cap(stops, longest, longer) if scored else None
    severity = "serious" if scored and max(stops.first, stops.late) < FEW_STOP else "warning"
    return Symptom(
        severity if scored or stops.first > NONE_STOP else "note",
        f"{1 - stops.late:.0%} of the responses are truncated at {longest.late:g} tokens ({stops.late_span}), "
        f"{1 - stops.first:.0%} in the first update",
        longer,
    )


def _fitted_to_cap(stops: Series, longest: Series, longer: tuple[Remedy, ...]) -> Symptom | None:
    """What a limit did that most responses reached at first: the policy was paid for being shorter."""
    if stops.first >= FEW_STOP:
        return None
    return Symptom(
        "note",
        f"{1 - stops.first:.0%} of the responses were truncated at {longest.first:g} tokens in the first update, and "
        f"the policy has learned to stop before that: {stops.late:.0%} do ({stops.late_span})",
        longer,
    )


def _few_stop(run: RunRecord) -> Symptom | None:
    stops = read(run, "response/eos_rate")
    if stops is None or stops.late > FEW_STOP:
        return None
    scored = eos_is_scored(run)
    remedy = (
        adjust(run, "rollout.missing_eos_score", "too_high")
        if scored
        else set_to(run, "rollout.missing_eos_score", -1, why="to make stopping score higher")
    )
    return Symptom(
        "serious" if scored and stops.late < NONE_STOP else "warning" if scored or stops.first > NONE_STOP else "note",
        f"{stops.late:.0%} of the responses stop ({stops.late_span}), {stops.first:.0%} in the first update"
        + ("; the rest get the score for a missing stop token" if scored else ""),
        (remedy, scale(run, "rollout.max_new_tokens", 2.0)),
        "check that the demonstrations end with the stop token and that it is not masked as padding",
    )


def _stop_at_once(run: RunRecord) -> Symptom | None:
    length = read(run, "response/length", at_least=MIN_TREND)
    if length is None or length.late > min(TINY, SHRUNK * length.first):
        return None
    seen = f"responses have shrunk from {fmt(length.first)} to {fmt(length.late)} tokens ({length.late_span})"
    score, stops = read(run, "reward/score_mean", at_least=MIN_TREND), read(run, "response/eos_rate")
    if not rose(score):
        # Nothing was learned: something broke the policy.
        return Symptom("serious", f"{seen}; the score does not rise", (scale(run, "ppo.learning_rate", 1 / 3),))
    if eos_is_scored(run) and stops is not None and stops.first < 1 - TRUNCATED:
        return Symptom("serious", f"{seen}; the score rises", (adjust(run, "rollout.missing_eos_score", "too_low"),))
    advice = "change the reward, in which a nearly empty response scores best: no setting makes up for it"
    return Symptom("serious", f"{seen}; the score rises", (), advice)


def _duplicated(run: RunRecord) -> Symptom | None:
    distinct = read(run, "prompt/distinct")
    if distinct is None or distinct.late > REPEATED:
        return None
    return Symptom(
        "serious" if distinct.late < MOSTLY_REPEATED else "warning",
        f"only {distinct.late:.0%} of an update's prompts are distinct ({distinct.late_span})",
        (
            Remedy("data.prompts", "switch", "add prompts to data.prompts and remove duplicates"),
            scale(run, "rollout.num_prompts", 0.5),
        ),
    )


DUPLICATED_PROMPTS = Rule(
    "duplicated_prompts",
    "The same prompts appear several times within an update. The effective batch is smaller than its size suggests, "
    "and the policy memorizes these prompts.",
    ("prompt/distinct",),
    _duplicated,
    Needs(("prompt/distinct",), MIN_LEVEL),
)

TOO_FEW_EOS = Rule(
    "too_few_eos",
    "The policy rarely ends its responses: it never learned the stop token, has unlearned it, or runs out of tokens "
    "first.",
    ("response/eos_rate",),
    _few_stop,
    Needs(("response/eos_rate",), MIN_LEVEL),
)

TRUNCATED_AT_CAP = Rule(
    "truncated_at_cap",
    "Responses hit the length limit and are cut off, so the reward scores a fragment.",
    ("response/eos_rate", "response/length_max"),
    _truncated,
    Needs(("response/eos_rate", "response/length_max"), MIN_LEVEL),
)

STOPS_AT_ONCE = Rule(
    "stops_at_once",
    "The policy stops almost immediately. If the score rises, it has learned that a nearly empty response scores "
    "best; if not, steps that are too large have broken it.",
    ("response/length", "response/eos_rate", "reward/score_mean"),
    _stop_at_once,
    Needs(("response/length",), MIN_TREND),
)

"""Data, prompts and responses: rows that were dropped, and how responses end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kedge_base.texts import names_function
from kedge_inspect.doctor.rule import (
    SMALLER_STEPS,
    TRAINED,
    Direction,
    Remedy,
    Symptom,
    adjust,
    instruct,
    rule,
    scale,
    set_to,
)
from kedge_inspect.doctor.series import MIN_LEVEL, MIN_TREND, Series, combine, fmt, read, rose, span
from kedge_inspect.record import RunRecord, is_number

TRUNCATED = 0.1
"""Share of truncated responses that is reported: N+ has 2 to 5%."""

FEW_STOP = 0.5
NONE_STOP = 0.1
"""Share of responses that stop below which nearly all scores are that for a missing stop token."""

TINY = 4.0
SHRUNK = 0.25
"""Length of nearly empty responses: in tokens, stop token included, and relative to the first update."""

NEARLY_CONSTANT = 1e-3
"""Standard deviation of the scores, relative to their mean, that rounding explains."""

REPEATED = 0.8
MOSTLY_REPEATED = 0.4
"""Thresholds of a warning and of a serious finding: the share of distinct prompts in an update. A file with fewer
prompts than an update needs repeats them."""


MORE_TOKENS = scale("rollout.max_new_tokens", 2.0)
MORE_PROMPTS = instruct("data.prompts", "add prompts to data.prompts and remove duplicates")


def eos_is_scored(run: RunRecord) -> bool:
    """True if a response without a stop token gets a separate score, as `RolloutConfig.eos_score` decides."""
    score = run.setting("rollout.missing_eos_score")
    if score != "auto":
        return score not in (None, "mask") and run.setting("rollout.missing_eos_score.subtract") != 0
    terms = run.config.get("reward")
    sources = [str(term.get("source")) for term in terms if term.get("weight") != 0] if isinstance(terms, list) else []
    return not all(map(names_function, sources))


def move_missing_eos_score(run: RunRecord, direction: Direction) -> Remedy:
    """Lower or raise the score of responses without a stop token; set one if the run does not."""
    name = "rollout.missing_eos_score"
    if (subtracted := run.setting(f"{name}.subtract")) and is_number(subtracted):
        return set_to(name, {"subtract": subtracted * (2.0 if direction == "too_high" else 0.5)}, direction)
    if eos_is_scored(run):
        return adjust(name, direction)
    return set_to(name, -1, why="to make stopping score higher")


def nearly_all_truncated(run: RunRecord) -> bool:
    """True if nearly every response has the score for a missing stop token, from the first update on."""
    stops = read(run, "response/eos_rate", at_least=1)
    return eos_is_scored(run) and stops is not None and max(stops.first, stops.late) < NONE_STOP


def scores_are_constant(score: Series, score_std: Series) -> bool:
    """True if all responses of an update score the same, in every update."""
    beyond = combine(lambda std, mean: std if std > NEARLY_CONSTANT * abs(mean) else None, score_std, score)
    return beyond is None


def has_episodes(run: RunRecord) -> bool:
    """True if the policy interacted with an environment."""
    return bool(run.series("episode/turns")[0])


def ending_in_time(run: RunRecord, stops: Series) -> Series:
    """The share of responses that stop, or of episodes that do not run out of tokens in the middle of a turn.

    A turn that reaches `environment.max_turn_tokens` has no stop token either, and is answered.
    """
    cut = read(run, "episode/max_tokens")
    return stops if cut is None else Series(cut.updates, [1 - share for share in cut.values])


def parts_of(run: RunRecord) -> str:
    """The unit of `turn_lengths`: `turns` or `responses`."""
    return "turns" if has_episodes(run) else "responses"


def turn_lengths(run: RunRecord, length: Series) -> Series:
    """Mean length of a turn: the length of an episode also depends on the number of its turns."""
    turns = read(run, "episode/turns")
    return length if turns is None else combine(lambda tokens, count: tokens / max(count, 1.0), length, turns) or length


def num_responses(run: RunRecord) -> float:
    """Responses per update, which determine the error of a mean score."""
    if sampled := read(run, "group/sampled", at_least=1):
        return sampled.late
    return (run.setting("rollout.num_prompts") or 1) * (run.setting("rollout.num_responses") or 1)


def num_sampled(run: RunRecord, updates: Sequence[int]) -> float:
    """Count the responses sampled in these updates, including those that were resampled and not trained on."""
    known = dict(zip(*run.series("group/sampled"), strict=True))
    return sum(known.get(update, num_responses(run)) for update in updates)


@rule(
    "Responses hit the length limit and are cut off, so the reward scores a fragment.",
    needs=("response/eos_rate", "response/length_max"),
    updates=MIN_LEVEL,
    of_reward=True,
)
def truncated_at_cap(run: RunRecord, stops: Series, longest: Series) -> Symptom | None:
    """Seen: `response/eos_rate` is below 1: the rest of the responses hit `rollout.max_new_tokens`. With an
    environment, `episode/max_tokens` and `episode/context_overflow` are above 0.

    Try: Double `rollout.max_new_tokens`. Where the model's context is full, let the environment
    [shorten it](episodes.md#new-contexts).

    Threshold: A tenth of the responses, or of the episodes (N+ has 2 to 5%): a warning. With a separate score for a
    missing stop token, or none of these responses in the update (`mask`), serious if more than half are truncated from
    the first update on. With a score, a note if they were and it is a tenth or fewer at the end. Without either, a note
    if hardly any response stopped at first.
    """
    in_turn = read(run, "episode/max_tokens")
    overflow = read(run, "episode/context_overflow")
    if in_turn and overflow:
        return _episodes_cut(run, in_turn, overflow)
    scored = eos_is_scored(run)
    if stops.late > 1 - TRUNCATED:
        return _fitted_to_cap(stops, longest) if scored else None
    left_out = run.setting("rollout.missing_eos_score") == "mask"
    matters = scored or left_out
    severity = "serious" if matters and max(stops.first, stops.late) < FEW_STOP else "warning"
    return Symptom(
        severity if matters or stops.first > NONE_STOP else "note",
        f"{1 - stops.late:.0%} of the responses are truncated at {longest.late:g} tokens ({stops.late_span}), "
        f"{1 - stops.first:.0%} in the first update{', and left out of it' if left_out else ''}",
        (MORE_TOKENS,),
    )


def _episodes_cut(run: RunRecord, in_turn: Series, overflow: Series) -> Symptom | None:
    """Symptom of episodes that run out of tokens, within a turn or because the next answer no longer fits."""
    cut = combine(lambda one, other: one + other, in_turn, overflow)
    if cut is None or cut.late < TRUNCATED:
        return None
    return Symptom(
        "warning",
        f"{cut.late:.0%} of the episodes run out of tokens ({cut.late_span}), {cut.first:.0%} in the first update: "
        f"both sides together have rollout.max_new_tokens={run.setting('rollout.max_new_tokens')}",
        (MORE_TOKENS,),
        "if the model's context is full, let the environment shorten it" if overflow.late > in_turn.late else "",
    )


def _fitted_to_cap(stops: Series, longest: Series) -> Symptom | None:
    """Symptom of a limit that most responses hit at first, so that the policy learned to write shorter ones."""
    if stops.first >= FEW_STOP:
        return None
    return Symptom(
        "note",
        f"{1 - stops.first:.0%} of the responses were truncated at {longest.first:g} tokens in the first update, and "
        f"the policy has learned to stop before that: {stops.late:.0%} do ({stops.late_span})",
        (MORE_TOKENS,),
    )


STOPS_ARE_LEARNED = "check that the demonstrations end with the stop token and that it is not masked as padding"


def _none_stops(run: RunRecord) -> Symptom | None:
    """Every response so far was truncated and got the score for truncated responses."""
    stops, score, score_std = (
        read(run, name, at_least=1) for name in ("response/eos_rate", "reward/score_mean", "reward/score_std")
    )
    if stops is None or score is None or score_std is None or not eos_is_scored(run):
        return None
    if max(ending_in_time(run, stops).values) > 0 or not scores_are_constant(score, score_std):
        return None
    return Symptom(
        "serious",
        f"all {'episodes' if has_episodes(run) else 'responses'} were cut off and score {fmt(score.late)} "
        f"({span(score.updates)}): there is nothing to learn",
        (MORE_TOKENS,),
        STOPS_ARE_LEARNED,
    )


@rule(
    "The policy rarely ends its responses: it never learned the stop token, has unlearned it, or runs out of tokens "
    "first.",
    needs=("response/eos_rate",),
    early=_none_stops,
    updates=MIN_LEVEL,
    of_reward=True,
)
def too_few_eos(run: RunRecord, stops: Series) -> Symptom | None:
    """Seen: `response/eos_rate` is low. With an environment, `episode/max_tokens` is high.

    Try: Check that the demonstrations end with the stop token and that it is not masked as padding; double
    `rollout.max_new_tokens`; if some responses stop, set or lower `rollout.missing_eos_score`.

    Threshold: Half of the responses: a warning. With a separate score for a missing stop token
    (`rollout.missing_eos_score`) serious below a tenth, and from the first update on if none stops and all score the
    same; without it a note if the policy did not stop at first either.
    """
    if constant := _none_stops(run):
        return constant
    stops = ending_in_time(run, stops)
    if stops.late > FEW_STOP:
        return None
    scored = eos_is_scored(run)
    return Symptom(
        "serious" if scored and stops.late < NONE_STOP else "warning" if scored or stops.first > NONE_STOP else "note",
        f"{stops.late:.0%} of the {'episodes end with a whole turn' if has_episodes(run) else 'responses stop'} "
        f"({stops.late_span}), {stops.first:.0%} in the first update"
        + ("; the rest get the score for a missing stop token" if scored else ""),
        (move_missing_eos_score(run, "too_high"), MORE_TOKENS) if max(stops.values) > 0 else (MORE_TOKENS,),
        STOPS_ARE_LEARNED,
    )


@rule(
    "The policy stops almost immediately. If the score rises, it has learned that a nearly empty response scores "
    "best; if not, steps that are too large have broken it.",
    needs=("response/length",),
    updates=MIN_TREND,
    of_reward=True,
)
def stops_at_once(run: RunRecord, length: Series) -> Symptom | None:
    """Seen: `response/length` has collapsed; with an environment, that of a turn.

    Try: Lower `ppo.learning_rate` to a third if the score does not rise. Otherwise change the reward, or raise
    `rollout.missing_eos_score` if some responses did not stop at first.

    Threshold: At most four tokens, stop token included, and at most a quarter of the first update's length. Serious.
    """
    length = turn_lengths(run, length)
    if length.late > min(TINY, SHRUNK * length.first):
        return None
    seen = f"{parts_of(run)} have shrunk from {fmt(length.first)} to {fmt(length.late)} tokens ({length.late_span})"
    score = read(run, "reward/score_mean", at_least=MIN_TREND)
    stops = read(run, "response/eos_rate")
    if not rose(score):
        # Nothing was learned: something broke the policy.
        return Symptom("serious", f"{seen}; the score does not rise", (SMALLER_STEPS,))
    if eos_is_scored(run) and stops is not None and stops.first < 1 - TRUNCATED:
        return Symptom("serious", f"{seen}; the score rises", (move_missing_eos_score(run, "too_low"),))
    advice = "change the reward, in which a nearly empty response scores best: no setting makes up for it"
    return Symptom("serious", f"{seen}; the score rises", (), advice)


@rule(
    "The same prompts appear several times within an update. The effective batch is smaller than its size suggests, "
    "and the policy memorizes these prompts.",
    needs=("prompt/distinct",),
    updates=MIN_LEVEL,
    fits=lambda run: not has_episodes(run),
)
def duplicated_prompts(run: RunRecord, distinct: Series) -> Symptom | None:
    """Seen: `prompt/distinct` is low.

    Try: Add prompts to `data.prompts` and remove duplicates; halve `rollout.num_prompts`.

    Threshold: 0.8 or less is a warning, below 0.4 serious. Runs with an environment are not checked: with a different
    seed, a prompt opens a different episode.
    """
    if distinct.late > REPEATED:
        return None
    return Symptom(
        "serious" if distinct.late < MOSTLY_REPEATED else "warning",
        f"only {distinct.late:.0%} of an update's prompts are distinct ({distinct.late_span})",
        (MORE_PROMPTS, scale("rollout.num_prompts", 0.5)),
    )


MANY = 0.05
FAR_TOO_MANY = 0.2
"""Thresholds of a note and of a warning: the share of a source's rows that were rejected. One in twenty is the default
of data.max_rejected_fraction, so a run above it was told to continue; where a fifth is missing, the rest is another
data set: without its long rows, or without one of its files."""

MOST_REASONS = 3
"""Maximum number of reasons that are named."""

LIMITS = ("data.max_prompt_tokens", "data.max_length")


@rule(
    "Many rows of the data could not be used, and those that remain may differ from them: long prompts, for example, "
    "are often the difficult ones.",
    updates=0,
    stages=TRAINED,
    fits=lambda run: bool(run.data),
)
def rows_dropped(run: RunRecord) -> Symptom | None:
    """Seen: `data.json` in the run's folder counts many rows that could not be used.

    Try: Raise the limit that the reason names (`data.max_prompt_tokens`, `data.max_length`), or cut long prompts with
    `data.truncate=keep_end`; for other reasons see `rejected.jsonl`.

    Threshold: 5% of the rows of one kind of data is a note, 20% a warning. A run stops by default at
    `data.max_rejected_fraction`, 5%. Every stage.
    """
    shares = {role: _share(usage) for role, usage in run.data.items() if isinstance(usage, Mapping)}
    many = [role for role, share in shares.items() if share >= MANY]
    if not many:
        return None
    reasons = dict.fromkeys(reason for role in many for reason in run.data[role]["dropped"])
    return Symptom(
        "warning" if max(shares.values()) >= FAR_TOO_MANY else "note",
        "; ".join(f"{shares[role]:.0%} of the {role} were dropped ({_in_words(run.data[role])})" for role in many),
        tuple(_keep_more(run, " ".join(reasons))),
        "see rejected.jsonl for the rows" if any("data." not in reason for reason in reasons) else "",
    )


def _share(usage: Mapping[str, Any]) -> float:
    dropped = usage.get("dropped")
    return sum(dropped.values()) / max(usage.get("rows") or 0, 1) if isinstance(dropped, Mapping) else 0.0


def _in_words(usage: Mapping[str, Any]) -> str:
    reasons = list(usage["dropped"].items())
    more = f", {len(reasons) - MOST_REASONS} more reasons" if len(reasons) > MOST_REASONS else ""
    return f"{usage['rows']:,} rows: " + ", ".join(f"{n:,} {reason}" for reason, n in reasons[:MOST_REASONS]) + more


def _keep_more(run: RunRecord, reasons: str) -> Iterator[Remedy]:
    exceeded = [field for field in LIMITS if field in reasons]  # as in `prompt longer than data.max_prompt_tokens=512`
    for field in exceeded:
        yield scale(field, 2.0)
    if exceeded and run.setting("data.truncate") == "never":
        yield set_to("data.truncate", "keep_end", why="to cut long prompts instead (keep_start keeps their start)")

"""Finds answers that are excluded from training by flags of a message or by columns that judge a row's answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kedge.data.fields import Fields, decoded, is_conversation, is_empty_system, is_given, role_of
from kedge.data.forms import MASKS
from kedge.data.records import RowError

_LEARNED = re.compile(
    r"weight|loss(_weight|_scale|_mask)?|learn(able)?|train(ing|able|_on|_on_turn)?|thumbs?_up|"
    r"(is_|kto_)?(tag|label|desirable|chosen|preferred|accept(ed|able)?|approved|correct|right|good|valid|pass(ed)?|"
    r"success(ful)?|solved|resolved|helpful(ness)?|harmless(ness)?|safe|ok|keep|usable|liked?|upvoted?)|"
    r"(\w+_)?(score|rating|reward|quality|grade|accuracy|pass_rate|correctness|verdict|judge?ment|feedback)"
)
"""Names of marks that are positive if the answer should be learned."""
_EXCLUDED = re.compile(
    r"(is_)?(masked|undesirable|rejected|bad|wrong|incorrect|invalid|toxic|harmful|unsafe|disliked?|failed|spam|deleted)|thumbs?_down"
)
"""Names of marks that are 0 if the answer should be learned."""
_MEASURED = re.compile(r"\w+_(score|reward)")
"""Names of numbers that may be low for a good answer, such as toxicity or a reward model's score."""
_BAD = re.compile(
    r"(un|not[ _]?)(desirable|acceptable|safe)|(in|not[ _])correct|bad|poor|wrong|negative|reject(ed)?|fail(ed|ure)?|"
    r"disliked?|(thumbs?[ _]?)?down(voted?)?"
)
_LIKE_A_FLAG = re.compile(r"(?i)(^|_)(weight|loss|learn|train|mask|ignore|exclude|skip|supervise)")


def excluded_answers(fields: Fields) -> set[int]:
    """Find the assistant's messages that must not be learned, as negative indices: −1 is the last message.

    Args:
        fields: A demonstration before its form is changed.

    Raises:
        RowError: A flag is unknown or neither 0 nor 1, or selects a message that is never learned.
    """
    names = ("completion",) if is_given(fields, "completion") else ("messages", "conversations", "conversation")
    for name in (*names, "chosen"):
        value = decoded(fields.get(name))
        entries: Any = [value] if isinstance(value, Mapping) else value
        if is_conversation(entries):
            named = [(entry, f"{name}[{index}]") for index, entry in enumerate(entries)]
            read = [each for each in named if not is_empty_system(*each)]
            return {place - len(read) for place, each in enumerate(read) if _is_excluded(*each)}
    return set()


def _is_excluded(message: Fields, place: str) -> bool:
    """Return True for an answer excluded by its flags."""
    is_answer = role_of(message) == "assistant"
    # A number with any other name, such as `label`, may be the turn's class.
    flags = [key for key, value in message.items() if isinstance(value, (bool, str)) or _LIKE_A_FLAG.search(key)]
    marks = {key: _mark(key, message[key]) for key in flags}
    for key, mark in marks.items():
        is_followed = isinstance(mark, bool) if is_answer else mark is not True
        if is_given(message, key) and _LIKE_A_FLAG.search(key) and not is_followed:
            raise RowError(
                f"field '{place}.{key}' is {message[key]!r:.40}, which kedge cannot follow: it learns the assistant's "
                "messages, without those with 'weight', 'loss', 'loss_mask' or 'train' 0, or 'masked' 1",
                f"messages with a flag {key!r} that kedge cannot follow",
            )
    return is_answer and any(mark is False for mark in marks.values())


def check_judged(fields: Fields, answer: object) -> set[str]:
    """Check that no column, such as KTO's `label`, marks an answer to be learned as bad.

    Args:
        fields: A demonstration.
        answer: Its answer; a column that repeats it does not judge it.

    Returns:
        The columns with a number that does not clearly mean that the answer is good or bad.

    Raises:
        RowError: A column marks the answer as bad.
    """
    columns = [key for key in fields if is_given(fields, key) and str(fields[key]).strip() != str(answer).strip()]
    marks = {key: _mark(key, fields[key]) for key in columns if key not in MASKS or "input_ids" not in fields}
    for key, mark in marks.items():
        if mark is False:
            raise RowError(
                f"field {key!r} is {fields[key]!r:.40}, and kedge would learn this answer: leave such rows out or, if "
                f"the column does not judge answers, rename it: data.columns.demonstrations.{key}_other={key}",
                f"answers that {key!r} calls bad",
            )
    return {key for key, mark in marks.items() if mark not in (None, True)}


def _mark(key: str, entry: object) -> bool | float | None:
    """Interpret a mark: True to learn the answer, False to exclude it, another number if unclear, None if no mark."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])|-", "_", key).lower()  # `trainOnTurn` as `train_on_turn`
    value: Any = decoded(entry.strip().lower()) if isinstance(entry, str) else entry
    if isinstance(value, list):
        value = all(value)
    elif isinstance(value, str) and _BAD.fullmatch(value):
        value = False
    if not isinstance(value, (int, float)):
        return None
    if _MEASURED.fullmatch(name):
        return value + 0  # turns a boolean into a number
    if _EXCLUDED.fullmatch(name):
        return not value if value in (0, 1) else value
    return (value > 0 if value <= 0 or value == 1 else value) if _LEARNED.fullmatch(name) else None

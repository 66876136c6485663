r"""Verifies numbers and mathematics: finds a response's final answer, and compares it with the row's.

A response gives its answer as `#### 42`, else as `\boxed{42}`, else as its last number. Numbers are compared exactly,
as fractions: 42, 42.0, 84/2 and $42 are the same, 0.333 and 1/3 are not.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from kedge_base.errors import RewardError, install_line
from kedge_base.verdict import Verdict
from kedge_tasks.verify.checking import (
    NO_ANSWER,
    RIGHT,
    TOO_SLOW,
    WRONG_FORMAT,
    WRONG_VALUE,
    Expired,
    Graded,
    deadline,
    final_answer,
    read_rows,
    verdicts,
    verifier,
    whole_response,
)
from kedge_tasks.verify.expressions import last_unit, other_lists, same_literal, tidy
from kedge_tasks.verify.quantities import (
    PROSE_UNITS,
    QUANTITY,
    WRONG_UNIT,
    Quantity,
    plain,
    prose,
    read_quantity,
    typed,
    whole_quantity,
)
from kedge_tasks.verify.wording import INSTEAD_OF, NOT, THE_ANSWER_IS

LONGEST_EXPRESSION = 2000

MARKED = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)(\n?)")
BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>[-+]?[0-9][^\s{}$\\]*))")

_ITEM = re.compile(r"^[ \t]*[1-9][.)][ \t]+(?=[A-Z*])", re.MULTILINE)
_SENTENCE = re.compile(r"\n|[.!?](?=\s)|[。！？]")
_STATEMENT = re.compile(
    rf"{THE_ANSWER_IS}(?:[-+*/×÷x().,$ 0-9=]+="
    r"|(?![$ ]*[0-9.,]+ ?=)[$(]*(?:(?:(?!\b(?:since|because|as|so|if|for|check|not)\b|, )[^;:\n=≈(]){1,80}"
    r"(?:=|≈|\bequals\b)){1,4}"
    r"|[$(]*[0-9][^;:\n=(]{0,20}?(?:[-+*×÷]|\b(?:plus|minus|times)\b)[^;:\n=(]{1,40}?"
    r"(?:which (?:is|equals)|that is|i\.e\.))?"
    r"(?:[^;:\n=]{1,40}\bround(?:s|ed)? (?:up |down )?to )?"
)
"""`The answer is`, with a computation that may follow, such as `6 * 7 =`."""
_OTHER = re.compile(rf"(?i)(?:[,;(]\s*(?:and )?not|\b(?:{INSTEAD_OF}))\s+[-$(]*[0-9][0-9.,]*")
"""A number that the response says is not the answer."""
_DENIED = re.compile(
    rf"(?i)(?:\b(?:{NOT})|n['’]t|≠|!=|\\neq?)(?:\s+(?:be|equal|equals|to|exactly|the|answer|is|just)\b)*"
    r"\s*[$(*]*$"
)
_VAGUE = re.compile(
    r"(?i)(?:\b(?:more|less|fewer|greater|higher|lower|larger|smaller) than|\bat (?:least|most)"
    r"|(?:^|[,(]|\b(?:is|are|be|of|for|has|have|takes?|costs?|holds?|earns?|sells?)) ?up to|(?<![-=])[<>]|[≤≥]"
    r"|\\[lg]eq?|[0-9)%] ?(?:\bor\b|\bto\b|±|\+/-|\\pm)|\bbetween\b[^.]*\band|[0-9)] [+*×÷~xX]|[0-9] -)\s*[$(]*$"
)
"""Text before a number that is a bound, one end of a range, or one part of a sum."""
_MEASURE = re.compile(
    r"[0-9] ?(?:h|hours?|hrs?|min|minutes?|days?|weeks?|months?|years?|f[eo]+t|ft|miles?|pounds?|lbs?|dollars?|k?m|kg)"
    r"\.?,?(?: and)?\s*$"
)
_ITS_PART = re.compile(
    r" ?(?:s|min|h|sec|hour|minute|second|day|week|month|in|inche?|feet|foot|ft|oz|ounce|cent|c?m|g)s?\b"
)
"""The second unit of a measure, as in 5 feet 2 inches, but not in 3 weeks 42 pens."""
_MORE = re.compile(r"\s*(?:or|to|±|\\pm|-)\s*[$(]?[0-9]|(?![ACFJLNVWdghlmst])[A-Za-zΑ-Ωα-ω](?![\w°]| \w)")
"""Text after a number that makes it a part of the answer: another number, or a variable, as in 12x, not `3x faster`."""
_REFUSAL = re.compile(
    r"\bI(?: am|['’]m)? (?:do not know|don['’]t know|(?:cannot|can['’]?t|can not|couldn['’]t|could not|unable to"
    r"|not able to) (?:\w+ )?(?:answer|calculate|compute|determine|do|figure|find|give|help|know|provide"
    r"|say|solve|tell|work)\b)"
)
_SOLVED = re.compile(r"(?i)=|\b(?:so|but|thus|hence|therefore)\b")
_LAST_LINE = re.compile(
    rf"[^\n]*{THE_ANSWER_IS}((?:\*\*|\$)?(?:\\[A-Za-z]+|[^A-Za-z]|[A-Za-z](?![A-Za-z]{{2}}))+)"
    r"(?:I hope it is correct\.)?"
)


def marked(text: str, is_whole: bool) -> Quantity | None:
    """The number after the last `####` that has one; in a truncated response, its line must be complete."""
    lines = (line for line, end in reversed(MARKED.findall(text)) if end or is_whole)
    return next(filter(None, map(whole_quantity, lines)), None)


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}`; None without one, and empty if it was not closed."""
    *_, last = None, *BOX.finditer(text)
    if last is None or last["bare"]:
        return last and last["bare"].rstrip(".,;:!?)")
    depth = 1
    for at in range(last.end(), min(len(text), last.end() + LONGEST_EXPRESSION)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[last.end() : at].strip()
    return ""


def final_number(text: str, is_whole: bool) -> Quantity | str:
    """The number that a response gives as its answer, or the reason for not finding one."""
    if number := marked(text, is_whole):
        return number
    found = boxed(text)
    if found is not None and (found or is_whole):
        return whole_quantity(found) or WRONG_FORMAT
    if not is_whole:
        return NO_ANSWER
    if MARKED.match(text.rstrip().rpartition("\n")[2].lstrip()):
        return WRONG_FORMAT  # `#### 41 or 42`: the last number is not the answer
    text = _OTHER.sub("", prose(text))
    return _last_number(_ITEM.sub("", text)) or _last_number(text) or NO_ANSWER


def _last_number(text: str) -> Quantity | str | None:
    """The last number in prose, or the one that its sentence calls the answer; None without numbers."""
    numbers = list(QUANTITY.finditer(text))
    if not numbers:
        return None
    chosen = numbers[-1]
    start = max((end.end() for end in _SENTENCE.finditer(text, 0, chosen.start())), default=0)
    statements = list(_STATEMENT.finditer(text, start, chosen.start()))
    if statements:
        chosen = next(each for each in numbers if each.start() >= statements[-1].end())
    before = text[max(start, chosen.start() - 60) : chosen.start()]
    rest = _REFUSAL.split(text)[-1]
    if _DENIED.search(before) or (rest != text and not statements and not _SOLVED.search(rest)):
        return NO_ANSWER
    if (
        _VAGUE.search(before)
        or (_MEASURE.search(before) and _ITS_PART.match(text, chosen.end()))
        or _MORE.match(text, chosen.end())
    ):
        return WRONG_FORMAT
    return read_quantity(chosen) or WRONG_FORMAT


def _grade_number(text: str, is_whole: bool, reference: Quantity) -> Graded:
    found = final_number(text, is_whole)
    return found if isinstance(found, str) else (found.compared_with(reference), str(found))


def _grade_strictly(text: str, is_whole: bool, reference: Quantity) -> Graded:
    found = marked(text, is_whole)
    if found is None:
        return WRONG_FORMAT if is_whole and QUANTITY.search(text) else NO_ANSWER
    return found.compared_with(reference), str(found)


def _text(answer: object) -> str:
    """An entry of the column, with the digits that a number was written with, so 0.1 is exactly one tenth."""
    return str(answer) if isinstance(answer, (str, int, float)) and not isinstance(answer, bool) else ""


def _gsm8k_answer(answer: object) -> Quantity:
    lines = MARKED.findall(_text(answer))
    found = whole_quantity(lines[-1][0]) if lines else None
    if found is None:
        raise ValueError("a solution that ends with its answer as in GSM8K, '… #### 42'")
    return found


def _number_answer(answer: object) -> Quantity:
    found = whole_quantity(_text(answer))
    if found is None:
        raise ValueError("a number, such as 42, 1/3 or '$1,200.50'")
    return found


def _gsm8k_answers(answer: Sequence[Any]) -> list[Quantity]:
    return read_rows("answer", answer, _gsm8k_answer)


@verifier(_gsm8k_answers)
def gsm8k(completions: list[str], answer: list[str], stopped: list[bool] | None = None) -> list[Verdict]:
    r"""Check whether a response's final number is that of a GSM8K row: after `####`, in `\boxed{}`, or its last number.

    Args:
        completions: Responses as text.
        answer: Solutions as in GSM8K: `… #### 42`.
        stopped: Whether each response ended with a stop token.
    """
    return verdicts(completions, stopped, _gsm8k_answers(answer), _grade_number)


@verifier(_gsm8k_answers)
def gsm8k_strict(completions: list[str], answer: list[str], stopped: list[bool] | None = None) -> list[Verdict]:
    """`gsm8k` for responses that must end like the data's solutions: only `#### 42` counts."""
    return verdicts(completions, stopped, _gsm8k_answers(answer), _grade_strictly)


def _number_answers(answer: Sequence[Any]) -> list[Quantity]:
    return read_rows("answer", answer, _number_answer)


@verifier(_number_answers)
def number(completions: list[str], answer: list[Any], stopped: list[bool] | None = None) -> list[Verdict]:
    """`gsm8k` for a column `answer` that has only the number, as in SVAMP."""
    return verdicts(completions, stopped, _number_answers(answer), _grade_number)


def _expression(answer: object) -> str:
    text = _text(answer)
    found = boxed(text) or text.strip()
    if not found or len(found) > LONGEST_EXPRESSION:
        raise ValueError(r"an expression in LaTeX, or a solution that contains it as \boxed{…}")
    return found


def _expressions(answer: Sequence[Any]) -> list[str]:
    return read_rows("answer", answer, _expression)


@verifier(_expressions)
def math(completions: list[str], answer: list[Any], stopped: list[bool] | None = None) -> list[Verdict]:
    r"""Check whether a response's `\boxed{…}`, or what follows `####`, equals an expression in LaTeX (extra `math`).

    Without either, the content of `<answer>…</answer>` counts, or the text that the last line calls the answer.

    Plain numbers are compared exactly; math-verify compares everything else, with one second for each response.

    Args:
        completions: Responses as text.
        answer: The expressions, or solutions that contain them as `\boxed{…}`.
        stopped: Whether each response ended with a stop token.

    Raises:
        RewardError: math-verify is not installed.
    """
    _math_verify()
    rows = _expressions(answer)
    return verdicts(completions, stopped, rows, _grade_expression, read=whole_response)


def _grade_expression(text: str, is_whole: bool, reference: str) -> Graded:
    read = final_answer(text)
    found = _given_expression(*read, is_whole) if read else None
    if not found:
        return NO_ANSWER
    if len(found) > LONGEST_EXPRESSION:
        return WRONG_FORMAT
    answer, wanted = (re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", each.strip()) for each in (found, reference))
    if answer == wanted:
        return RIGHT, answer
    found, reference = tidy(found), tidy(reference)
    numbers = whole_quantity(found, PROSE_UNITS), whole_quantity(reference, PROSE_UNITS)
    answer = answer if numbers[0] is None else str(numbers[0])
    if numbers[0] is not None and numbers[1] is not None and not _other_variable(found, reference):
        return numbers[0].compared_with(numbers[1]), answer
    return _compared(found, reference), answer


def _given_expression(text: str, is_closed: bool, is_whole: bool) -> str | None:
    if (found := boxed(text)) is not None:
        return found
    if lines := [line.strip() for line, end in MARKED.findall(text) if end or is_whole]:
        return lines[-1]
    if is_closed:
        return text.strip()
    statement = _LAST_LINE.fullmatch(typed(text.rstrip()[-200:].rpartition("\n")[2])) if is_whole else None
    return statement and statement[1].strip(" *$.")


def _other_variable(found: str, reference: str) -> bool:
    """True if both name a variable and not the same one: y = 5 and x = 5, but not y = 5 and 5."""
    names = [re.match(r"\s*([A-Za-z])\s*=", plain(text)) for text in (found, reference)]
    return names[0] is not None and names[1] is not None and names[0][1] != names[1][1]


def _compared(found: str, reference: str) -> str:
    same = same_literal(found, reference)
    if same is not None:
        return RIGHT if same else WRONG_VALUE
    units = last_unit(found), last_unit(reference)
    if all(units) and units[0] != units[1]:
        return WRONG_UNIT
    if other_lists(found, reference) or ("%" in found) != ("%" in reference):
        return WRONG_VALUE
    try:
        with deadline("math"):
            return _compare(found, reference)
    except Expired:
        return TOO_SLOW


@cache
def _math_verify() -> Any:
    """Load and warm up the library: its first call takes a second, which must not count against a response's limit."""
    try:
        import math_verify
    except ImportError as error:
        raise RewardError(f"math needs math-verify: {install_line('math')}") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    half = math_verify.parse("$\\frac{1}{2} + x$", parsing_timeout=None)  # type: ignore[arg-type]
    math_verify.verify(half, half, timeout_seconds=None)
    return math_verify


def _compare(found: str, reference: str) -> str:
    """math-verify's verdict. Its own time limits, which use SIGALRM, are off."""
    library = _math_verify()
    expected, given = (_alternatives(library.parse(f"${text}$", parsing_timeout=None)) for text in (reference, found))
    if not given:
        return WRONG_FORMAT
    # At the default precision, all numbers below a millionth are equal.
    exact = {"float_rounding": 30, "numeric_precision": 50, "allow_set_relation_comp": True}
    return RIGHT if library.verify(expected, given, timeout_seconds=None, **exact) else WRONG_VALUE


def _alternatives(parsed: list[Any]) -> list[Any]:
    """Turn inequalities such as `x < 2 or x > 5` into one set; math-verify parses them as two solutions."""
    from sympy import Union

    parts = parsed[0].args if parsed and getattr(parsed[0], "is_FiniteSet", False) else ()
    is_inequality = parts and all(getattr(each, "rel_op", "==") != "==" for each in parts)
    return [Union(*(each.as_set() for each in parts))] if is_inequality else parsed

r"""Numbers and mathematics: the final answer of a response, and whether it equals the row's.

A response gives its answer as `#### 42`, else as `\boxed{42}`, else as its last number. Numbers are compared exactly,
as fractions: 42, 42.0, 84/2 and $42 are the same, 0.333 and 1/3 are not.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any
from unicodedata import normalize

from kedge.errors import RewardError, install_line
from kedge.rewards.source import Verdict
from kedge.rewards.verify.checking import (
    NO_ANSWER,
    RIGHT,
    TOO_SLOW,
    WRONG_FORMAT,
    WRONG_VALUE,
    Expired,
    after_thoughts,
    deadline,
    read_rows,
    reads_column,
    verdicts,
)

WRONG_UNIT = "wrong unit"

LONGEST_NUMBER = 60
"""Characters. Longer ones are not answers, and arithmetic with a million digits takes minutes."""

LONGEST_EXPRESSION = 2000
MOST_BOXES = 5

# Any run of digits, points and commas, also one that is not a number, such as 1,23 or 3.4.2020: it still is the last
# "number" of a response, so that an earlier one does not pass for the answer. No part can match the same text in two
# ways: the time is linear in the length.
QUANTITY = re.compile(
    r"""
    (?<![A-Za-z0-9^])
    (?P<sign>(?<![0-9)\]}%])[-+])? (?: (?P<currency>[$€£¥₹]) [ ]? (?P<inner_sign>-)? )?
    (?: (?P<whole>[0-9]+) [ ] (?=[0-9]+/[0-9]) )?
    (?P<digits> [0-9]+ (?: [.,:^][0-9]+ )* | \.[0-9]+ )
    (?: [eE] (?P<exponent>[-+]?[0-9]{1,2}) (?![0-9A-Za-z]) )?
    (?: [ ]?/[ ]? (?P<denominator> [0-9]+ (?: [.,][0-9]+ )* ) )?
    (?: [ ]? (?P<percent> % | percent\b ) )?
    (?: [ ] (?P<scale> hundred | thousand | million | billion | trillion ) \b )?
    """,
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)
DIGITS = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?")
SCALES = {"": 1, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

# What may follow the number in `#### 42 apples per day.`: it is an answer, `#### 3. Add the apples` is a heading.
# A lone letter other than a unit is a variable, or stands for thousands or millions.
_WORD = r"[^\W\d_]+(?:[/°][^\W\d_]*|\^[23])?"
_VARIABLE = r"(?! ?(?![ACFJLNVWdghlmst])[A-Za-zΑ-Ωα-ω][.!]?$)"
UNIT_WORDS = re.compile(rf"{_VARIABLE}°?(?: ?{_WORD}(?: {_WORD}){{0,3}})? ?[.!]?")
_SYMBOL = r"(?:[munkcd]?m|in|ft|yd|mi|[mk]?g|lb|oz|t|[mcd]?[lL]|m?s|h|min|hr|k?Hz|N|k?[JWV]|A|mph)(?:\^[23])?"
PROSE_UNITS = re.compile(
    rf"(?:° ?[CF]?| {_SYMBOL}(?:/{_SYMBOL})?| ?[^\W\d_A-Za-zΑ-Ωα-ω]+| [^\W\d_]{{3,}}(?: {_WORD}){{0,3}})?\.?"
)
"""Units that cannot be products of variables or a factorial: after a space, or in another script."""
MARKED = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)(\n?)")
BOX = re.compile(r"\\boxed\s*\{")

_NAME = re.compile(r"(?:[A-Za-z][A-Za-z ]{0,20})?=[ ]*")  # of x = 42
_FRACTION = re.compile(
    r"""
    ([-+][ ]?)? \\[dt]?frac \s*
    (?: \{ \s* (?P<sign>-?) \s* (?P<over>[0-9]+) \s* \} | (?P<digit>[0-9]) ) \s*
    (?: \{ \s* (?P<under>[0-9]+) \s* \} | (?P<last>[0-9]) )
    """,
    re.VERBOSE,
)
_POWER = re.compile(r"(?<=[0-9])[ ]?(?:\\times|\\cdot|×)[ ]?10\^(?:\{([-+]?[0-9]{1,2})\}|([0-9])(?![0-9]))")
_THIN_SPACE = re.compile(r"(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))")
_SPACED = re.compile(r"(?<![0-9.,/^:])([1-9][0-9]{0,2}(?: [0-9]{3})+)(?![0-9/]|[.,][0-9]{3})")
"""Thousands with spaces, as in 12 500."""
_TYPED = str.maketrans({"\u2212": "-", "\u2013": "-", "\u00a0": " ", "\u202f": " "})
_SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁹]+")
_VULGAR = re.compile(r"([0-9]?)(\^?)([¼-¾⅐-⅞])")
_MATH_MODE = re.compile(r"\$(?=\S)([^$\n]{1,200}?)(?<=\S)\$(?![0-9])")


@dataclass(frozen=True)
class Quantity:
    """A number, exact, with `%`, a currency sign or nothing as its unit."""

    value: Fraction
    unit: str = ""

    def __str__(self) -> str:
        """The number as a fraction, with its percent sign; the currency makes no other answer."""
        return f"{self.value}{'%' if self.unit == '%' else ''}"

    def compared_with(self, reference: Quantity) -> str:
        """The verdict on this answer. A unit counts only where the reference has one, except for 50% and 0.5."""
        values = {self.value} | ({self.value / 100} if self.unit == "%" else set())
        if reference.unit == "%":
            values = {self.value} if self.unit == "%" else {100 * self.value} if not self.unit else set()
            same = self.value == reference.value
            return RIGHT if reference.value in values else WRONG_UNIT if same else WRONG_VALUE
        if reference.value not in values:
            return WRONG_VALUE
        return WRONG_UNIT if reference.unit and self.unit not in ("", reference.unit) else RIGHT


def typed(text: str) -> str:
    """Text with ASCII signs for typographic minus, spaces, fractions and powers: `1½ m²` as `1 1/2 m^{2}`."""
    text = _SUPERSCRIPT.sub(lambda power: f"^{{{normalize('NFKC', power[0])}}}", text)
    return _VULGAR.sub(_in_digits, text).translate(_TYPED)


def _in_digits(found: re.Match[str]) -> str:
    before, power, sign = found.groups()
    digits = normalize("NFKC", sign).replace("\u2044", "/")
    if power:
        return f"{before}^{{{digits}}}"
    return f"{before} {digits}" if before else digits


def plain(text: str) -> str:
    r"""Text without markup around numbers: LaTeX fractions and signs, math mode, bold, typographic minus."""
    text = _THIN_SPACE.sub(",", text)
    text = typed(text)
    text = re.sub(r"(?<![0-9])\*\*|\*\*(?![0-9])", "", text)  # not in 2**5
    text = _POWER.sub(lambda power: f"e{power[1] or power[2]}", text.replace("{,}", ","))
    if "\\" in text:
        text = _FRACTION.sub(_as_division, text)
        text = text.replace("\\$", "$").replace("\\%", "%").replace("\\ ", " ")
        text = re.sub(r"\\[,!;:]", "", text)
        text = re.sub(r"[ ]*\\(?:text(?:bf|it)?|math(?:rm|bf|it))\s*\{[ ~]*([^{}]*)\}", r" \1", text)
        text = re.sub(r"\\[()\[\]]", "", text)
        text = re.sub(r"\^(?:\\circ\b|\{\\circ\})", "°", text)
    text = re.sub(r"\^\{([0-9]+)\}", r"^\1", text)
    text = re.sub(r"((?:=|\bis) ?-) (?=[0-9$.])", r"\1", text)
    text = _SPACED.sub(lambda number: number[1].replace(" ", ","), text)
    return _MATH_MODE.sub(r"\1", text)


def _as_division(fraction: re.Match[str]) -> str:
    sign = (fraction[1] or " ").strip() or " "
    over, under = fraction["over"] or fraction["digit"], fraction["under"] or fraction["last"]
    return f"{sign}{fraction['sign'] or ''}{over}/{under}"


def read_quantity(match: re.Match[str]) -> Quantity | None:
    """The number that was matched; None if it is not a well-formed one."""
    parts = match.groupdict(default="")
    numbers = [parts["digits"], parts["denominator"] or "1", parts["whole"] or "0"]
    if len(match[0]) > LONGEST_NUMBER or not all(DIGITS.fullmatch(each) for each in numbers):
        return None
    numerator, denominator, whole = (Fraction(each.replace(",", "")) for each in numbers)
    if not denominator:
        return None
    value = (whole + numerator / denominator) * Fraction(10) ** int(parts["exponent"] or 0)
    value *= SCALES[parts["scale"].lower()]
    is_negative = "-" in (parts["sign"], parts["inner_sign"])
    return Quantity(-value if is_negative else value, "%" if parts["percent"] else parts["currency"])


def whole_quantity(text: str, units: re.Pattern[str] = UNIT_WORDS) -> Quantity | None:
    """The number that a text consists of, with at most its unit in words; None if it is anything else."""
    text = plain(text).strip(" \t\r\n*_`")
    text = text[name.end() :] if (name := _NAME.match(text)) else text
    text = re.sub(r"^- (?=[0-9$.])", "-", text)
    match = QUANTITY.match(text)
    return read_quantity(match) if match and units.fullmatch(text, match.end()) else None


def marked(text: str, is_whole: bool) -> str | None:
    """The number after the last `####` that one follows; of a response that was cut off, only with its line's end."""
    lines = [line for line, end in MARKED.findall(text) if (end or is_whole) and whole_quantity(line)]
    return lines[-1] if lines else None


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` that is closed; None without one."""
    for start in [match.end() for match in BOX.finditer(text)][: -1 - MOST_BOXES : -1]:
        depth = 1
        for at in range(start, min(len(text), start + LONGEST_EXPRESSION)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if not depth:
                return text[start:at].strip()
    return None


def final_number(text: str, is_whole: bool) -> Quantity | str:
    """The number that a response gives as its answer, or the reason for not finding one."""
    text = after_thoughts(text)
    found = marked(text, is_whole) or boxed(text)
    if found is not None:
        return whole_quantity(found) or WRONG_FORMAT
    if not is_whole:
        return NO_ANSWER
    if MARKED.match(text.rstrip().rpartition("\n")[2].lstrip()):
        return WRONG_FORMAT  # `#### 41 or 42`: that 42 is its last number does not make it the answer
    numbers = list(QUANTITY.finditer(plain(text)))
    return (read_quantity(numbers[-1]) or WRONG_FORMAT) if numbers else NO_ANSWER


def _judge_number(text: str, is_whole: bool, reference: Quantity) -> str | tuple[str, str]:
    found = final_number(text, is_whole)
    return found if isinstance(found, str) else (found.compared_with(reference), str(found))


def _judge_strictly(text: str, is_whole: bool, reference: Quantity) -> str | tuple[str, str]:
    found = marked(text, is_whole)
    if found is None:
        return WRONG_FORMAT if is_whole and QUANTITY.search(text) else NO_ANSWER
    quantity = whole_quantity(found)
    assert quantity is not None, "it is one of those that can be read"
    return quantity.compared_with(reference), str(quantity)


def _gsm8k_answer(answer: object) -> Quantity:
    lines = MARKED.findall(answer) if isinstance(answer, str) else []
    found = whole_quantity(lines[-1][0]) if lines else None
    if found is None:
        raise ValueError("a solution that ends with its answer as in GSM8K, '… #### 42'")
    return found


def _number_answer(answer: object) -> Quantity:
    # The digits of a float as they are written: 0.1 is a tenth.
    is_text = isinstance(answer, str) or (not isinstance(answer, bool) and isinstance(answer, (int, float)))
    found = whole_quantity(str(answer)) if is_text else None
    if found is None:
        raise ValueError("a number, such as 42, 1/3 or '$1,200.50'")
    return found


@reads_column("answer", _gsm8k_answer)
def gsm8k(completions: list[str], answer: list[str], stopped: list[bool] | None = None) -> list[Verdict]:
    r"""Check whether a response's final number is that of a GSM8K row: after `####`, in `\boxed{}`, or its last number.

    Args:
        completions: Responses as text.
        answer: Solutions as in GSM8K: `… #### 42`.
        stopped: Whether each response ended with a stop token.
    """
    return verdicts(completions, stopped, read_rows("answer", answer, _gsm8k_answer), _judge_number)


@reads_column("answer", _gsm8k_answer)
def gsm8k_strict(completions: list[str], answer: list[str], stopped: list[bool] | None = None) -> list[Verdict]:
    """`gsm8k` for responses that must end as the data's solutions do: only `#### 42` counts."""
    return verdicts(completions, stopped, read_rows("answer", answer, _gsm8k_answer), _judge_strictly)


@reads_column("answer", _number_answer)
def number(completions: list[str], answer: list[Any], stopped: list[bool] | None = None) -> list[Verdict]:
    """`gsm8k` for a column `answer` that has the number alone, as in SVAMP."""
    return verdicts(completions, stopped, read_rows("answer", answer, _number_answer), _judge_number)


def _expression(answer: object) -> str:
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(answer)
    found = (boxed(answer) or answer.strip()) if isinstance(answer, str) else ""
    if not found or len(found) > LONGEST_EXPRESSION:
        raise ValueError(r"an expression in LaTeX, or a solution that contains it as \boxed{…}")
    return found


@reads_column("answer", _expression)
def math(completions: list[str], answer: list[Any], stopped: list[bool] | None = None) -> list[Verdict]:
    r"""Check whether a response's `\boxed{…}`, or what follows `####`, equals an expression in LaTeX (extra `math`).

    So does the whole of an `<answer>…</answer>` without either.

    Plain numbers are compared exactly; math-verify compares all else, with one second for each response.

    Args:
        completions: Responses as text.
        answer: The expressions, or solutions that contain them as `\boxed{…}`.
        stopped: Whether each response ended with a stop token.

    Raises:
        RewardError: math-verify is not installed.
    """
    _math_verify()
    return verdicts(completions, stopped, read_rows("answer", answer, _expression), _judge_expression)


def _judge_expression(text: str, is_whole: bool, reference: str) -> str | tuple[str, str]:
    tagged = after_thoughts(text)
    found = boxed(tagged)
    if found is None:
        lines = [line.strip() for line, end in MARKED.findall(tagged) if end or is_whole]
        found = lines[-1] if lines else tagged.strip() if f"<answer>{tagged}</answer>" in text else None
    if not found:
        return NO_ANSWER
    if len(found) > LONGEST_EXPRESSION:
        return WRONG_FORMAT
    answer = "".join(found.split())
    if answer == "".join(reference.split()):
        return RIGHT, answer
    numbers = whole_quantity(found, PROSE_UNITS), whole_quantity(reference, PROSE_UNITS)
    answer = answer if numbers[0] is None else str(numbers[0])
    if numbers[0] is not None and numbers[1] is not None and not _other_variable(found, reference):
        return numbers[0].compared_with(numbers[1]), answer
    return _compared(found, reference), answer


def _other_variable(found: str, reference: str) -> bool:
    """True for y = 5 beside x = 5, but not beside 5."""
    names = [name[0].rstrip("= ") for text in (found, reference) if (name := _NAME.match(plain(text)))]
    return len(names) == 2 and all(len(name) == 1 for name in names) and names[0] != names[1]


def _compared(found: str, reference: str) -> str:
    if _brackets(found) != _brackets(reference) or ("%" in found) != ("%" in reference):
        return WRONG_VALUE
    try:
        with deadline("math"):
            return _compare(found, reference)
    except Expired:
        return TOO_SLOW


@cache
def _math_verify() -> Any:
    """The library, loaded and warm: its first call takes a second, which no response's time limit is to contain."""
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
    expected, given = (library.parse(f"${typed(text)}$", parsing_timeout=None) for text in (reference, found))
    if not given:
        return WRONG_FORMAT
    return RIGHT if library.verify(expected, given, timeout_seconds=None) else WRONG_VALUE


def _brackets(text: str) -> tuple[str, str]:
    """The brackets around a list: math-verify takes the pair (1, 2) for the solutions 1 and 2."""
    text = re.sub(r"\\left|\\right|\\[{}]|\s", "", text)
    ends = text[:1], text[-1:]
    return ends if "," in text and ends[0] in "([" and ends[1] in ")]" else ("", "")

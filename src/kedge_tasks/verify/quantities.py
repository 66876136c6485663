r"""Parses numbers in text: their many notations, exact values, and units."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final
from unicodedata import decimal, normalize

from kedge_tasks.verify.checking import RIGHT, WRONG_VALUE
from kedge_tasks.verify.wording import ANSWER, IS

WRONG_UNIT = "wrong unit"

LONGEST_NUMBER = 60
"""Maximum characters of a number. Longer ones are not answers, and arithmetic with a million digits takes minutes."""

# Any run of digits, points and commas, even if it is not a number, such as 1,23 or 3.4.2020: it still counts as the
# last "number" of a response, so that an earlier one is not mistaken for the answer. No part can match the same text in
# two ways, so the time is linear in the length.
QUANTITY = re.compile(
    r"""
    (?<![A-Za-z0-9^])
    (?P<sign>(?<![0-9)\]}%])[-+])? (?: (?P<currency>[$€£¥₹]) [ ]? (?P<inner_sign>-)? )?
    (?: (?P<whole>[0-9]+) [ ] (?=[0-9]+/[0-9]) )?
    (?P<digits> [0-9]+ (?: [.,:^][0-9]+ | -[0-9]+ (?![0-9/]) )* | \.[0-9]+ )
    (?: [eE] (?P<exponent>[-+]?[0-9]{1,2}) (?![0-9A-Za-z]) )?
    (?: [ ]?/[ ]? (?P<denominator> [0-9]+ (?: [.,][0-9]+ )* ) )?
    (?: [ ]? (?P<percent> % | percent\b ) )?
    (?: [ ] (?P<scale> hundred | thousand | million | billion | trillion ) \b )?
    """,
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)
DIGITS = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?")
SCALES = {"": 1, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

# What may follow the number in `#### 42 apples per day.`, an answer, unlike `#### 3. Add the apples`, a heading.
# A lone letter that is not a unit is a variable, or stands for thousands or millions.
_WORD = r"[^\W\d_]+(?:[/°][^\W\d_]*|\^[23])?"
_VARIABLE = r"(?! ?(?![ACFJLNVWdghlmst])[A-Za-zΑ-Ωα-ω][.!]?$)"
UNIT_WORDS = re.compile(rf"{_VARIABLE}(?: ?[$€£¥₹¢°])?(?: ?(?:(?:sq|cu)\. )?{_WORD}(?: {_WORD}){{0,7}})? ?[.!]?")
_SYMBOL = r"(?:[munkcd]?m|in|ft|yd|mi|[mk]?g|lb|oz|t|[mcd]?[lL]|m?s|h|min|hr|k?Hz|N|k?[JWV]|A|mph)(?:\^[23])?"
PROSE_UNITS = re.compile(
    rf"(?:° ?[CF]?| {_SYMBOL}(?:/{_SYMBOL})?| ?[^\W\d_A-Za-zΑ-Ωα-ω]+| [^\W\d_]{{3,}}(?: {_WORD}){{0,3}})?\.?"
)
"""Units that cannot be products of variables or a factorial: after a space, or in another script."""

_NAMES = (
    "mm millimeter millimetre|cm centimeter centimetre|dm decimeter|m meter metre|km kilometer kilometre|"
    "inch inche in|foot feet ft|yd yard|mile mi|mg milligram|g gram|kg kilogram kilo|lb|oz ounce|t ton tonne|"
    "ml milliliter millilitre|cl|l liter litre|gal gallon|ms millisecond|s second sec|min minute|h hour hr|"
    "d day|week wk|month|year yr|¢ cent|$ dollar usd|€ euro eur|£ gbp|¥ yen yuan jpy|₹ rupee inr|° degree deg|"
    "rad radian|°c celsius °celsius|°f fahrenheit °fahrenheit|mph|hz|j joule|n newton|w watt|kw kilowatt|v volt"
)
UNITS: Final = {
    name + plural: group.split()[0] for group in _NAMES.split("|") for name in group.split() for plural in ("", "s")
}
"""The recognized units, by each of their names. Other words, as in 42 apples, are ignored."""
_MEASURE = re.compile(
    r" ?(?:(?P<shape>square|sq|cubic|cu)\.? )?(?:degrees? (?=celsius|fahrenheit|[cf]\b))?"
    r"(?P<name>° ?[cf]\b|in\b(?! ?\w)|(?!in\b)[^\W\d_]+|[$€£¥₹¢°])(?:\^?(?P<power>[23]))?(?![\w^])"
    r"(?:(?: ?/ ?| per )(?P<per>[^\W\d_]+(?:\^?[23])?))?"
)

_NAME = re.compile(r"(?:[A-Za-z][A-Za-z ]{0,20})?=[ ]*")  # in `x = 42`
_LEAD = re.compile(  # in `The answer is 42`, `Total: 42`, `40 + 2 = 42`
    rf"(?:[^\n.:=]{{0,40}}{ANSWER}{IS}|[A-Za-z]{{3,}}[A-Za-z ]{{0,30}}:|[-+*/×÷x().,$ 0-9=]+=)[ ]*"
)
_FRACTION = re.compile(
    r"""
    (?:(?<=[0-9])[ ]+(?=\\))? (?:(?<![0-9][ ])([-+])[ ]?)? \\[dtc]?frac \s*
    (?: \{ \s* (?P<sign>-\s*)? (?P<over>[0-9]+) \s* \} | (?P<digit>[0-9]) ) \s*
    (?: \{ \s* (?P<under>[0-9]+) \s* \} | (?P<last>[0-9]) )
    """,
    re.VERBOSE,
)
_POWER = re.compile(
    r"(?:(?<=[0-9]) ?(?:\\times|\\cdot|[*×·⋅]) ?|(?<![\w.,^/)}])(?P<alone>))"
    r"10(?:\^|\*\*)(?:\{ ?(?P<power>[-+]?[0-9]{1,2}) ?\}|(?P<bare>[-+]?[0-9]{1,2}))(?![0-9^])"
)
_THIN_SPACE = re.compile(r"(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))")
_SPACED = re.compile(r"(?<![0-9.,/^:])([1-9][0-9]{0,2}(?: [0-9]{3})+)(?![0-9/]|[.,][0-9]{3})")
"""Thousands with spaces, as in 12 500."""
_LETTERS = str.maketrans(
    {"ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}", "ℕ": r"\mathbb{N}", "ℂ": r"\mathbb{C}", "º": "°"}
)
_TYPED = str.maketrans(dict(zip("\u2010\u2011\u2012\u2013\u2212\u2044\u2215٫٬٪", "-----//.,%", strict=True)))
INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff①-⒛]")
"""Characters that belong to no word or number: invisible ones, and the circled numbers of notes."""
_SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁻]+")
_SUBSCRIPT = re.compile("[₀-₉]+")
_VULGAR = re.compile(r"([0-9]?)(\^?)([¼-¾⅐-⅞])")
_MATH_MODE = re.compile(r"\$(?=\S)([^$\n]{1,200}?)(?<=\S)\$(?![0-9])")
_TEXT = re.compile(r"(?<! )[ ]*\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox)\s*\{([^{}]*)\}")


@dataclass(frozen=True)
class Quantity:
    """A number, exact, and its unit: `%`, a currency's sign, one of `UNITS` such as `cm^2`, or nothing."""

    value: Fraction
    unit: str = ""

    def __str__(self) -> str:
        """The number as a fraction, with a percent sign if it has one; other units do not change the answer."""
        return f"{self.value}{'%' if self.unit == '%' else ''}"

    def compared_with(self, reference: Quantity) -> str:
        """Compare this answer with the reference. Units count only if the reference has one, except in 50% and 0.5."""
        values = {self.value} | ({self.value / 100} if self.unit == "%" else set())
        if reference.unit == "%":
            values = {self.value} if self.unit == "%" else {100 * self.value} if not self.unit else set()
            same = self.value == reference.value
            return RIGHT if reference.value in values else WRONG_UNIT if same else WRONG_VALUE
        if reference.value not in values:
            return WRONG_VALUE
        return WRONG_UNIT if reference.unit and self.unit not in ("", reference.unit) else RIGHT


def typed(text: str) -> str:
    """Text with ASCII signs for typographic ones: `１½ m²` as `1 1/2 m^{2}`, and any script's digits as 0 to 9."""
    if text.isascii():
        return text
    text = _THIN_SPACE.sub(",", INVISIBLE.sub("", text))
    text = _SUPERSCRIPT.sub(lambda power: f"^{{{normalize('NFKC', power[0])}}}", text)
    text = _SUBSCRIPT.sub(lambda index: f"_{{{normalize('NFKC', index[0])}}}", text)
    text = _VULGAR.sub(_in_digits, text).translate(_LETTERS)
    text = re.sub(r"，(?!\d{3}(?!\d))", ", ", text)  # between numbers, not in one
    text = normalize("NFKC", text).translate(_TYPED)
    return re.sub(r"(?![0-9])\d", lambda digit: str(decimal(digit[0])), text)


def _in_digits(found: re.Match[str]) -> str:
    before, power, sign = found.groups()
    digits = normalize("NFKC", sign).replace("\u2044", "/")
    if power:
        return f"{before}^{{{digits}}}"
    return f"{before} {digits}" if before else digits


def plain(text: str) -> str:
    r"""Text without markup around numbers: LaTeX fractions and signs, math mode, bold, typographic minus."""
    text = re.sub(r"(?<![0-9])\*\*|\*\*(?![0-9])", "", typed(text))  # not in 2**5
    text = text.replace("{,}", ",").replace("US$", "$")
    text = _POWER.sub(_as_exponent, text)
    if "\\" in text:
        text = re.sub(r" ?\\[,!;:]|(?<=[0-9])~(?=\\)", "", text.replace("\\ ", " "))
        text = _FRACTION.sub(_as_division, text).replace("\\$", "$").replace("\\%", "%")
        text = _TEXT.sub(lambda words: " " + words[1].lstrip(" ~"), text)
        text = re.sub(r"\\[()\[\]]", "", text)
        text = re.sub(r"\^(?:\\circ\b|\{\\circ\})", "°", text)
    text = re.sub(r"\^\{([0-9]+)\}", r"^\1", text)
    text = re.sub(r"((?:=|\bis) ?-) (?=[0-9$.])", r"\1", text)
    text = _SPACED.sub(lambda number: number[1].replace(" ", ","), text)
    return _MATH_MODE.sub(r"\1", text)


def _as_exponent(ten: re.Match[str]) -> str:
    return f"{'' if ten['alone'] is None else 1}e{ten['power'] or ten['bare']}"


def _as_division(fraction: re.Match[str]) -> str:
    sign = fraction[1] or " "
    over, under = fraction["over"] or fraction["digit"], fraction["under"] or fraction["last"]
    return f"{sign}{(fraction['sign'] or '').strip()}{over}/{under}"


def prose(text: str) -> str:
    """`plain` text with `minus 4` as -4, `2 x 10^3` as 2e3, and `$2M` and `1.5k` in words; in mathematics, letters are
    variables.
    """
    text = plain(re.sub(r"(?<=[0-9]) ?[xX] ?(?=10\D)", "×", text))
    text = re.sub(r"(?<![0-9%)] )\b(?i:minus|negative) (?=[$0-9.])", "-", text)
    text = re.sub(r"(?<=[0-9])[kK](?![\w/^])", " thousand", text)
    return re.sub(r"(?<=[0-9])M(?![\w/^])", " million", text)


def unit_at(text: str, at: int = 0) -> str:
    """The unit at a place in a text, such as cm^2 or km/h; empty if it is not one of `UNITS`."""
    match = _MEASURE.match(text[at : at + 60].lower())
    name = UNITS.get(match["name"].replace(" ", ""), "") if match else ""
    if not match or not name or name in "$€£¥₹¢":
        return name
    power = {"s": "2", "c": "3"}.get((match["shape"] or " ")[0], match["power"] or "")
    return name + power + UNITS.get(match["per"], match["per"] or "")


def read_quantity(match: re.Match[str]) -> Quantity | None:
    """Parse a matched number; None if it is malformed."""
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
    unit = "%" if parts["percent"] else parts["currency"] or unit_at(match.string, match.end())
    return Quantity(-value if is_negative else value, unit)


def whole_quantity(text: str, units: re.Pattern[str] = UNIT_WORDS) -> Quantity | None:
    """Parse a text that is only a number, possibly with its unit in words; None if it is anything else.

    Args:
        text: The text.
        units: The allowed text after the number; `PROSE_UNITS` where letters are variables.
    """
    text = (prose if units is UNIT_WORDS else plain)(text).strip(" \t\r\n*_`'\"“”‘’")
    text = text[lead.end() :] if (lead := _LEAD.match(text) or _NAME.match(text)) else text
    text = text.strip(" ()[]{}*'\"") if "," not in text else text
    text = re.sub(r"^- (?=[0-9$.])", "-", text)
    match = QUANTITY.match(text)
    return read_quantity(match) if match and units.fullmatch(text, match.end()) else None

r"""Handles mathematical expressions as texts: their notation, and cases that math-verify misreads."""

from __future__ import annotations

import re

from kedge_tasks.verify.quantities import UNITS, plain, typed, unit_at

_MARKUP = re.compile(
    r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:underline|mathbf|mathit|boldsymbol|bm|large|Large|displaystyle)(?![A-Za-z])"
    r"|\\begin\{array\}\{[^{}]*\}((?:[^&\\]|\\(?!\\|end))*)\\end\{array\}"
    r"|\\[bB]igg?[lr]?(?![A-Za-z])|\\mathrm(?=\{[ie]\})"
)
_FORMS = (
    (r"\\colon(?![A-Za-z])", ":"),
    (r"(?<![\\A-Za-z])(pi|exp|sqrt|sin|cos|tan|log|ln|infty)(?![A-Za-z])", r"\\\1"),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\(sin|cos|tan)\s*[({]?\s*([0-9.]+)\s*(?:\^\{?\\circ\}?|°)\s*[)}]?", r"\\\1(\2\\pi/180)"),
    (r"\\sqrt\s*\{-([0-9]+)\}", r"i\\sqrt{\1}"),
    (r"(?<=[0-9}])i(?![A-Za-z])", " i"),  # i is the imaginary unit only on its own
    (r"\\([lg]eq)(?:slant|q)", r"\\\1"),
    (r"\\varnothing|∅", r"\\emptyset"),
    (r"\\R(?![A-Za-z])", r"\\mathbb{R}"),
    (r"\\\{\s*[A-Za-z]\s*(?:\\mid|\\vert|[|:])((?:[^{}]|\\[{}])*[<>=](?:[^{}])*)\\\}", r"\1"),
    (r"^\{([^{}]*)\}$", r"\1"),
)
"""Forms that math-verify cannot parse, each with an equivalent that it can."""
_REPEATING = re.compile(r"(?<![0-9.])([0-9]{0,9})\.([0-9]{0,9})\\(?:overline|bar|dot)\s*\{?([0-9]{1,9})\}?")
_LITERALS = (
    re.compile(r'"\(([A-Z])\).*'),
    re.compile(r'"?([A-Z]{3,}|[A-Za-z]{4,})'),
    re.compile(r"([0-9A-F]+)_([0-9]+)"),
    re.compile(r'([0-9]{1,2}):([0-5][0-9])"?((?i:[ap]m)?)'),
    re.compile(r'([0-9]{1,2})()"?((?i:[ap]m))'),
)
_MEASURES = re.compile(r'([0-9.]+)"?([A-Za-z]+)"?,?')
_TRAILING = re.compile(
    r"(?:^|(?<=[ )}0-9]))(?:(?:square|sq|cubic|cu)\.? )?[A-Za-z°¢]+(?:\^[23])?(?:(?:/| per )[A-Za-z]+)?$"
)
_NO_LIST = re.compile(r"[<>≤≥]|\\(?:[lg](?:eq?|t)|neq?|cup|setminus|backslash|mathbb|R)(?![a-z])")


def tidy(text: str) -> str:
    r"""Strip an expression's colors and fonts, and rewrite it in forms that math-verify parses: `pi/6` as `\pi/6`."""
    text = _REPEATING.sub(_as_fraction, _MARKUP.sub(r"\1", typed(text)))
    for form, read in _FORMS:
        text = re.sub(form, read, text.strip())
    if "\\pm" in text:
        text = text.replace("\\pm", "+") + ", " + text.rpartition("=")[2].replace("\\pm", "-")
    return text


def _as_fraction(repeating: re.Match[str]) -> str:
    whole, fixed, period = repeating.groups()
    over = int(whole + fixed + period) - int(whole + fixed or "0")
    return rf"\frac{{{over}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"


def same_literal(found: str, reference: str) -> bool | None:
    """Compare two answers literally; None if they are expressions, or of different kinds.

    Literals are options, words, clock times, digits in a base, and measures of several parts: math-verify reads letters
    as a product, and ignores bases, units, a.m. and p.m.
    """
    texts = [re.sub(r"[{}\s~.]|\band\b", "", re.sub(r"\\text\w*|\\mathrm", '"', each)) for each in (found, reference)]
    for kind in _LITERALS:
        if (one := kind.fullmatch(texts[0])) and (two := kind.fullmatch(texts[1])):
            parts = zip(one.groups(), two.groups(), strict=True)  # a.m. and p.m. are optional
            return all(not a or not b or a.casefold().lstrip("0") == b.casefold().lstrip("0") for a, b in parts)
    measures = [
        [(value, UNITS.get(unit.lower())) for value, unit in _MEASURES.findall(each)]
        for each in texts
        if re.fullmatch(f"(?:{_MEASURES.pattern}){{2,}}", each)
    ]
    is_known = len(measures) == 2 and all(unit for _, unit in measures[1])
    return measures[0] == measures[1] if is_known else None


def last_unit(text: str) -> str:
    """The unit at the end of an expression; empty without one."""
    end = _TRAILING.search(plain(text).rstrip(" ."))
    return unit_at(end[0]) if end else ""


def other_lists(found: str, reference: str) -> bool:
    """True if the brackets around two lists differ: math-verify reads the pair (1, 2) as the solutions 1 and 2.

    Brackets of an interval do not count if the other answer writes it as an inequality.
    """
    if _NO_LIST.search(found + reference):
        return False
    texts = [re.sub(r"\\left|\\right|\\[{}]|\s", "", each) for each in (found, reference)]
    texts = [re.sub(r"^[^=\[(]*(?:=|\\in(?![a-z]))", "", each) for each in texts]
    one, other = (re.fullmatch(r"([\[(]).*,.*([\])])", each) for each in texts)
    return (one and one.groups()) != (other and other.groups())

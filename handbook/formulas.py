"""TeX formulas become MathML when the site is built, so that pages need no script and no font from elsewhere."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)

MINUS = "&#x02212;"
BEFORE_A_SIGN = ("&#x0003D;", "&#x00028;", "&#x0002C;", "&#x02190;", "&#x000B7;", "&#x022C5;")
"""= ( , ← ·: a minus sign after one of these belongs to what follows, and gets no space."""


def with_formulas(page: str) -> str:
    """The page with the formulas that pymdownx.arithmatex marked as MathML."""
    page = INLINE.sub(lambda found: mathml(html.unescape(found[1])), page)
    return BLOCK.sub(lambda found: mathml(html.unescape(found[1]), block=True), page)


def mathml(tex: str, *, block: bool = False) -> str:
    """A formula as MathML."""
    # The minus sign of the generated pages' numbers.
    tex = tex.strip().replace("−", "-")
    code = convert(tex, display="block" if block else "inline")
    code = re.sub(r"<mo>([a-z]{2,})</mo>", r"<mi>\1</mi>", code)
    code = re.sub(rf"((?:{'|'.join(BEFORE_A_SIGN)})</mo>)<mo>({MINUS})</mo>", r'\1<mo form="prefix">\2</mo>', code)
    # Browsers set no space between the name of a function and an argument without brackets.
    return re.sub(r"(<mi>[a-z]{2,}</mi>)(?=<m(?!o\b))", r'\1<mspace width="0.17em"/>', code)

"""What is asked for, as a program checks it: one sentence of at most 15 words."""

import re


def one_short_sentence(completions, **columns):
    """1 for a single finished sentence of 3 to 15 words, else 0; and why."""
    reasons = [what_it_is(text.strip()) for text in completions]
    return [{"score": float(reason == "right"), "reason": reason} for reason in reasons]


def what_it_is(text):
    """`right`, or the first thing that is wrong with it; the report counts these."""
    if not re.search(r"[.!?]$", text):
        return "not finished"
    if re.search(r"[.!?\n]", text[:-1]):
        return "several sentences"
    num_words = len(text.split())
    return "too short" if num_words < 3 else "too long" if num_words > 15 else "right"

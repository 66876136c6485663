"""What is asked for, as a program checks it: one sentence of at most 15 words."""

import re


def one_short_sentence(completions, **columns):
    """1 for a single finished sentence of 3 to 15 words, else 0."""

    def fits(text):
        return re.fullmatch(r"[^.!?\n]+[.!?]", text) and 3 <= len(text.split()) <= 15

    return [float(bool(fits(text.strip()))) for text in completions]

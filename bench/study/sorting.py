"""The world of the sorting task: digits are sorted on a scratchpad, and only the last line is checked.

    503921:0|53921,1|5392,2|539,3|59,5|9,9|=012359

Each step takes the smallest digit out and copies the rest. A slip in the middle decides the end, and nothing but the
end is scored, so that credit has to find its way back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kedge.models.untrained import END_TOKEN, PAD_TOKEN

NUM_DIGITS: Final = 6
SLIP: Final = 0.2
"""Share of the demonstrations' steps with a slip: a third of them end right."""
START = ":"
TAKEN = "|"
STEP = ","
ANSWER = "="


def numbers(count: int, *, seed: int, without: Sequence[str] = ()) -> list[str]:
    """Distinct prompts of six random digits and a colon.

    Args:
        count: Number of prompts; with the left-out ones well below the million that exist.
        seed: Of the draws.
        without: Prompts that must not occur.
    """
    draw = random.Random(seed)
    taken = set(without)
    found: dict[str, None] = {}
    while len(found) < count:
        prompt = "".join(draw.choices("0123456789", k=NUM_DIGITS)) + START
        if prompt not in taken:
            found[prompt] = None
    return list(found)


def scratchpad(digits: str, slips: random.Random | None = None) -> str:
    """The written-out selection sort of the digits.

    Args:
        digits: The digits to sort.
        slips: Draws slips: a step takes a digit that is not the smallest, or copies a digit wrong. The steps after it
            are right for the digits there. None draws none.
    """
    rest = digits
    taken = ""
    steps = []
    while rest:
        at = rest.index(min(rest))
        if slips is not None and len(rest) > 1 and slips.random() < SLIP:
            at, rest = _slipped(rest, at, slips)
        taken += rest[at]
        rest = rest[:at] + rest[at + 1 :]
        steps.append(f"{taken[-1]}{TAKEN}{rest}")
    return STEP.join(steps) + ANSWER + taken


def _slipped(rest: str, smallest: int, draw: random.Random) -> tuple[int, str]:
    """The place of the digit that a wrong step takes, and the digits with which it continues; no slip sorts rightly."""
    larger = [at for at, digit in enumerate(rest) if digit > rest[smallest]]
    if larger and draw.random() < 0.5:
        return draw.choice(larger), rest
    at = draw.choice([at for at in range(len(rest)) if at != smallest])
    digit = draw.choice([digit for digit in "0123456789" if digit != rest[at]])
    return smallest, rest[:at] + digit + rest[at + 1 :]


def demonstrations(prompts: Sequence[str], *, seed: int) -> list[dict[str, str]]:
    """A scratchpad with slips per prompt.

    Args:
        prompts: The prompts.
        seed: Of the slips.
    """
    draw = random.Random(seed)
    return [{"prompt": each, "completion": scratchpad(each.rstrip(START), draw)} for each in prompts]


def verify(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """1 if what follows the last equals sign is the sorted digits, else 0; the steps are not looked at."""
    return [
        float(text.rpartition(ANSWER)[2] == "".join(sorted(prompt.rstrip(START))))
        for prompt, text in zip(prompts, completions, strict=True)
    ]


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of a scratchpad."""
    characters = [PAD_TOKEN, END_TOKEN, *"0123456789", START, TAKEN, STEP, ANSWER]
    tokenizer = Tokenizer(models.WordLevel({each: number for number, each in enumerate(characters)}, END_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD_TOKEN, eos_token=END_TOKEN, padding_side="left"
    )

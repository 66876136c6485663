"""Instructions that a program can check: at most 50 words, no commas, three bullets, ….

The column `instructions` lists the instructions of a row, each with its kind and parameters: `{"kind": "max_words",
"count": 50}`. Every function below that is decorated with `@instruction` is a kind: its name, the sentence for the
prompt, and whether a response follows it. `instruction_text` returns the sentence, so that prompts use the same table.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kedge_base.errors import RewardError
from kedge_base.thoughts import answer_of
from kedge_base.verdict import Verdict
from kedge_tasks.verify.checking import (
    NO_ANSWER,
    RIGHT,
    Graded,
    decoded,
    json_value,
    read_rows,
    verdicts,
    verifier,
    whole_response,
)
from kedge_tasks.verify.quantities import INVISIBLE

EXAMPLE = '{"kind": "max_words", "count": 50}'

Alphabet = Literal["Arabic", "Cyrillic", "Devanagari", "Greek", "Hangul", "Hebrew", "Hiragana", "Latin", "Thai"]


@dataclass(frozen=True)
class Kind:
    """One kind of instruction.

    Attributes:
        text: The sentence for the prompt, with its parameters in braces.
        follows: Whether a response follows it, given the parameters.
    """

    text: str
    follows: Callable[..., bool]

    @cached_property
    def types(self) -> dict[str, Any]:
        """The type of each parameter."""
        hints = get_type_hints(self.follows)
        return {name: kind for name, kind in hints.items() if name not in ("response", "return")}

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters, which must be those of this kind.

        Raises:
            ValueError: One is missing, unknown, or of another type.
        """
        kind = self.follows.__name__
        given = {name: value for name, value in given.items() if value is not None}  # Parquet fills the others in
        if unknown := sorted(set(given) - set(self.types)):
            known = ", ".join(self.types) or "none"
            raise ValueError(f"the parameters of {kind!r} ({known}), without {unknown[0]!r}")
        for name, wanted in self.types.items():
            if not _is(given.get(name), wanted):
                raise ValueError(f"{name!r} of {kind!r} to be {_described(wanted)}")
        return given


KINDS: dict[str, Kind] = {}
"""Every kind by its name."""


def instruction(text: str) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    """Decorate a check to register it as a kind of instruction with this sentence."""

    def register(follows: Callable[..., bool]) -> Callable[..., bool]:
        KINDS[follows.__name__] = Kind(text, follows)
        return follows

    return register


def instruction_text(kind: str, **parameters: Any) -> str:
    """The sentence that gives an instruction in a prompt.

    Args:
        kind: Its kind.
        parameters: Its parameters.

    Raises:
        RewardError: There is no such kind, or it has other parameters.
    """
    try:
        known, given = _read_one({"kind": kind, **parameters})
    except ValueError as error:
        raise RewardError(f"instruction {kind!r}: expected {error}") from error
    return known.text.format(**{name: _listed(value) for name, value in given.items()})


def _read(entry: object) -> list[tuple[Kind, dict[str, Any]]]:
    entry = decoded(entry)
    if not isinstance(entry, (list, tuple)) or not entry:
        raise ValueError(f"a list of instructions such as {EXAMPLE}")
    return [_read_one(each) for each in entry]


def _wanted(instructions: Sequence[Any]) -> list[list[tuple[Kind, dict[str, Any]]]]:
    return read_rows("instructions", instructions, _read)


@verifier(_wanted)
def instructions(completions: list[str], instructions: list[Any], stopped: list[bool] | None = None) -> list[Verdict]:
    """Check whether a response follows all instructions of its row; the reason is `right` or the first broken kind.

    Args:
        completions: Responses as text.
        instructions: For each a list of instructions, see `KINDS`.
        stopped: Whether each response ended with a stop token.
    """
    shares = instructions_partial(completions, instructions, stopped)
    return [Verdict(float(each == 1), each.reason) for each in shares]


@verifier(_wanted)
def instructions_partial(
    completions: list[str], instructions: list[Any], stopped: list[bool] | None = None
) -> list[Verdict]:
    """Score the share of its instructions that a response follows; reasons as in `instructions`."""
    return verdicts(completions, stopped, _wanted(instructions), _grade, read=whole_response)


def _grade(response: str, is_whole: bool, wanted: list[tuple[Kind, dict[str, Any]]]) -> Graded:
    text = INVISIBLE.sub("", answer_of(response) or "").strip()  # such characters would hide a word
    if not words(text) or not is_whole:  # a text without words, such as a period, would follow `no_commas`
        return NO_ANSWER
    broken = [kind.follows.__name__ for kind, parameters in wanted if not kind.follows(text, **parameters)]
    return Verdict(1 - len(broken) / len(wanted), broken[0] if broken else RIGHT)


def _read_one(entry: object) -> tuple[Kind, dict[str, Any]]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("kind"), str):
        raise ValueError(f"each instruction to be like {EXAMPLE}")
    kind = KINDS.get(entry["kind"])
    if kind is None:
        raise ValueError(f"one of these kinds instead of {entry['kind']!r}: {', '.join(sorted(KINDS))}")
    return kind, kind.checked({name: value for name, value in entry.items() if name != "kind"})


def _is(value: object, wanted: Any) -> bool:
    if get_origin(wanted) is Literal:
        return value in get_args(wanted)
    if get_origin(wanted) is list:
        return isinstance(value, (list, tuple)) and bool(value) and all(_is(each, str) for each in value)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool) and value > 0
    return isinstance(value, str) and bool(value.strip())


def _described(wanted: Any) -> str:
    if get_origin(wanted) is Literal:
        return f"one of {', '.join(get_args(wanted))}"
    return {int: "a whole number above 0", str: "a text"}.get(wanted, "a list of texts")


def _listed(value: Any) -> Any:
    return ", ".join(f'"{each}"' for each in value) if isinstance(value, (list, tuple)) else value


# How texts are counted

ABBREVIATIONS = (
    *("mr", "mrs", "ms", "dr", "prof", "st", "vs", "e.g", "i.e", "approx", "fig", "jr", "sr", "a.m", "p.m", "ph.d"),
)
_END = re.compile(r"(?<![.!?…])[.!?…]+(?:(?=\s|$)|[\"'”’)\]*_]+(?=\s*$|\s+[^a-z\s]))|[。！？]+")


def words(text: str) -> list[str]:
    """The words, in lower case; don't and well-known are one each."""
    return re.findall(r"\w+(?:['’-]\w+)*", text.lower())


def split_sentences(text: str) -> list[str]:
    """The sentences: up to `.`, `!` or `?` before a space, except after abbreviations, initials and list numbers, and
    in a quotation after which the sentence continues in lower case.
    """
    found = []
    start = 0
    for end in _END.finditer(text):
        before = text[max(start, end.start() - 20) : end.start()]
        last = before.split()[-1:] or [""]
        is_short = last[0].lower().strip("(") in ABBREVIATIONS or re.fullmatch(r"(?:[A-Z]\.)*[A-Z]", last[0])
        is_number = re.search(r"(?:^|\n)[ \t]*[0-9]{1,3}$", before)
        if end[0] == "." and (is_short or is_number):
            continue
        found.append(text[start : end.end()])
        start = end.end()
    return [each.strip() for each in [*found, text[start:]] if words(each)]


def split_paragraphs(text: str) -> list[str]:
    """The blocks between blank lines."""
    return [block for block in re.split(r"\n\s*\n", text) if block.strip()]


def lines_with(text: str, start: str) -> list[str]:
    """The matches of a pattern at the beginnings of lines."""
    return re.findall(rf"^[ \t]*{start}[ \t]+\S", text, re.MULTILINE)


def occurrences(text: str, phrase: str) -> int:
    """How often a word or phrase occurs, as whole words in any case."""
    pattern = r"\s+".join(map(re.escape, phrase.split()))
    return len(re.findall(rf"(?<!\w){pattern}(?!\w)", text, re.IGNORECASE))


# Length


@instruction("Use at most {count} words.")
def max_words(response: str, count: int) -> bool:
    return len(words(response)) <= count


@instruction("Use at least {count} words.")
def min_words(response: str, count: int) -> bool:
    return len(words(response)) >= count


@instruction("Use at most {count} characters.")
def max_characters(response: str, count: int) -> bool:
    return len(response) <= count


@instruction("Answer in exactly {count} sentences.")
def sentences(response: str, count: int) -> bool:
    return len(split_sentences(response)) == count


@instruction("No sentence may have more than {count} words.")
def short_sentences(response: str, count: int) -> bool:
    return all(len(words(each)) <= count for each in split_sentences(response))


@instruction("Write exactly {count} paragraphs, separated by blank lines.")
def paragraphs(response: str, count: int) -> bool:
    return len(split_paragraphs(response)) == count


# Words


@instruction("Use all of these words: {words}.")
def contains(response: str, words: list[str]) -> bool:
    return all(occurrences(response, each) for each in words)


@instruction("Do not use any of these words: {words}.")
def avoids(response: str, words: list[str]) -> bool:
    return not any(occurrences(response, each) for each in words)


@instruction('Use the word "{word}" at least {count} times.')
def keyword_count(response: str, word: str, count: int) -> bool:
    return occurrences(response, word) >= count


@instruction('The letter "{letter}" must occur at least {count} times.')
def letter_count(response: str, letter: str, count: int) -> bool:
    return response.lower().count(letter.lower()) >= count


@instruction('Begin with exactly these words: "{text}"')
def starts_with(response: str, text: str) -> bool:
    return re.match(rf"{re.escape(text.strip())}(?!(?<=\w)\w)", response) is not None


@instruction('End with exactly these words: "{text}"')
def ends_with(response: str, text: str) -> bool:
    return re.search(rf"(?<!\w(?=\w)){re.escape(text.strip())}\Z", response) is not None


@instruction('First repeat this request word for word, then answer it: "{request}"')
def repeat_prompt(response: str, request: str) -> bool:
    start = " ".join(request.split()).strip('"')
    whole = " ".join(response.split()).lstrip('"')
    return whole.startswith(start) and bool(words(whole[len(start) :]))


# Letters and punctuation


@instruction("Write everything in lower case.")
def lower_case(response: str) -> bool:
    return response.islower()  # unlike Chinese, which has no capitals


@instruction("Write everything in capital letters.")
def upper_case(response: str) -> bool:
    return response.isupper()


@instruction("Write at least {count} words in capital letters only.")
def capital_words(response: str, count: int) -> bool:
    return sum(each.isupper() and len(each) > 1 for each in re.findall(r"\w+", response)) >= count


@instruction("Write with letters of the {alphabet} alphabet only.")
def alphabet(response: str, alphabet: Alphabet) -> bool:
    letters = [unicodedata.name(each, "") for each in response if each.isalpha()]
    return bool(letters) and all(alphabet.upper() in name for name in letters)


@instruction("Do not use any commas.")
def no_commas(response: str) -> bool:
    return not any(unicodedata.name(each, "").endswith("COMMA") for each in response)


@instruction("Put the whole answer in double quotation marks.")
def quoted(response: str) -> bool:
    return len(response) > 2 and response[0] in '"“' and response[-1] in '"”'


# Form


@instruction("Answer with exactly {count} bullet points, each on a line that begins with a hyphen.")
def bullets(response: str, count: int) -> bool:
    return len(lines_with(response, "[-*•]")) == count


@instruction("Include a numbered list with exactly {count} entries: 1., 2., …")
def numbered_list(response: str, count: int) -> bool:
    numbers = re.findall(r"^[ \t]*(\d+)[.)][ \t]+\S", response, re.MULTILINE)
    return [int(each) for each in numbers if len(each) < 9] == list(range(1, count + 1))


@instruction("Begin with a title: a first line that starts with # and a space.")
def title(response: str) -> bool:
    return bool(re.match(r"# +\S", response))


@instruction("Divide the answer into exactly {count} sections, each under a heading that starts with ## and a space.")
def sections(response: str, count: int) -> bool:
    return len(lines_with(response, "##")) == count


@instruction("Set at least {count} passages in bold, between pairs of asterisks: **like this**.")
def highlighted(response: str, count: int) -> bool:
    return len(re.findall(r"\*\*(?!\s)[^*\n]+(?<!\s)\*\*", response)) >= count


@instruction("Answer with one JSON value and nothing else.")
def json(response: str) -> bool:
    inner = re.fullmatch(r"```(?i:json)?[ \t\r]*\n(.*)\n```", response, re.DOTALL)
    try:
        json_value(inner[1] if inner else response)
    except (ValueError, RecursionError):
        return False
    return True


@instruction("Put the code in exactly one block between lines of three backticks.")
def code_block(response: str) -> bool:
    parts = re.split(r"^[ \t]*```[^\n]*$", response, flags=re.MULTILINE)
    return len(parts) == 3 and bool(parts[1].strip())


@instruction("Give two different answers, separated by a line with three hyphens.")
def two_answers(response: str) -> bool:
    parts = [words(part) for part in re.split(r"^[ \t]*---[ \t]*$", response, flags=re.MULTILINE)]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


@instruction('Add a postscript at the end: a last paragraph that starts with "P.S."')
def postscript(response: str) -> bool:
    last = split_paragraphs(response)[-1].strip()
    return "\n" in response and last.startswith("P.S.") and bool(words(last[len("P.S.") :]))


@instruction("Leave at least {count} blanks in square brackets, such as [name].")
def placeholders(response: str, count: int) -> bool:
    return sum(bool(words(each)) for each in re.findall(r"\[([^\[\]\n]+)\](?!\()", response)) >= count

"""Verifies texts: choices, exact and normalized matches, patterns, tags, and JSON."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from unicodedata import normalize

from kedge_base.errors import RewardError, install_line
from kedge_base.thoughts import MARKS, answer_of
from kedge_base.verdict import Verdict
from kedge_tasks.verify.answers import boxed
from kedge_tasks.verify.checking import (
    NO_ANSWER,
    PARTLY,
    RIGHT,
    Expired,
    Graded,
    deadline,
    decoded,
    json_value,
    read_rows,
    verdicts,
    verifier,
    whole_response,
)
from kedge_tasks.verify.quantities import INVISIBLE, typed
from kedge_tasks.verify.wording import ANSWER, INSTEAD_OF, NOT, PARTICLES, VERBS

WRONG_CHOICE = "wrong choice"
SEVERAL = "several answers"
WRONG_TEXT = "wrong text"
NO_MATCH = "no match"
NOT_JSON = "not JSON"
WRONG_SCHEMA = "against the schema"


# Multiple choice

_END = r"(?=[)\]\"'”’]*[.!,;。]?[ \t]*(?:$|\n))"
_LETTER = (
    r"[\"'“‘]?(?:[(\[]\s?([A-Za-z])\s?[)\]]|(?!I\s+[a-z])([A-Z])(?![A-Za-zÀ-ɏ0-9_+#*]|['’][a-z]|-[a-z])|"
    rf"([a-z]){_END})[)\]]?[\"'”’]?"
)
"""A lower-case letter counts only in brackets or at the end: "the answer is a city" names no option."""
_GAP = r"\s{0,4}"
_IS = (
    rf"(?i:{_GAP}(?:(?:{VERBS}|are|be)(?: la\b)?(?![^\W_])"
    rf"|(?:would|must|should|has to|(?:seems|appears) to)(?= be)|{PARTICLES}|[:=]|-{{1,2}}>?|—)){{0,2}}"
    rf"(?i:{_GAP}(?:definitely|probably|(?:most )?likely|clearly|indeed|that|letter|option|choice|选项)\b){{0,2}}"
)
_STATED = tuple(
    re.compile(each)
    for each in (
        rf"(?:{ANSWER}[\"']?|(?i:\b(?:correct|right) (?:option|one)\b)|选项?)"
        r"(?i:\s+(?:(?:to|for)\b[^.\n:=]{0,60}?|[^\W\d_]{3,12}))?"
        rf"{_IS}[\s,]{{0,4}}{_LETTER}",
        rf"(?i:\b(?:choice|option|choose|pick|select|go(?:ing)? (?:with|for)|say))\b{_IS}{_GAP}{_LETTER}",
        r"(?i:\b(?:therefore|thus|hence|so|that['’]?s|it['’]?s|(?:it|that|this)(?= )|must(?= be))|而是),?"
        rf"{_IS}{_GAP}{_LETTER}{_END}",
        rf"{_LETTER}\s+(?i:(?:is|must be|would be|seems|looks)(?: clearly| definitely| the| my)*"
        r" (?:correct|right|true|best|answer)\b)",
        rf"^{_LETTER},?\s+(?:because|since)\b",
    )
)
"""Ways to state a choice, in order of precedence: "the answer is B" overrides "option A is wrong"."""
_NOT = (
    rf"(?i:\b(?:{NOT}|{INSTEAD_OF}|(?:is|does|would|should|can?|do|are)n['’]?t)\b)"
    r"|不(?:是|[能应该]*选)|而非"
)
_DENIED = re.compile(
    rf"(?:{_NOT})\s*(?:\b\w+\s+){{0,2}}?{_LETTER}(?:{_GAP},?{_GAP}\bbut(?: rather)?\b)?"
    rf"|{_LETTER}\s+(?i:(?:is|was|are|would|does|can|must|seems|looks)(?:n['’]?t|\s+(?:not|(?:\w+\s)?"
    r"(?:wrong|incorrect|false|impossible|out))\b))"
)
_ALTERNATIVE = re.compile(rf"{_GAP}(?:,|/|&|\bor\b|\band\b){_GAP}(?:or\s|and\s|option\s)?{_LETTER}")
_LIST = re.compile(rf"{_LETTER}(?:{_ALTERNATIVE.pattern})*[.!。\s]*")
_FIRST = re.compile(_LETTER)
_LINE = re.compile(r"^[ \t]*[(\[]?([A-Z])(?:[)\].:]+(?=[ \t]|$)|[ \t]*$)", re.MULTILINE)
_MENTIONED = re.compile(r"\(([A-Z])\)")
_FORMAT = re.compile(
    r"[_`$]|\[(?=\[)|(?<=\])\]|^#+|\\[()]|\\(?:text|math)\w*\s*(?=\{)|\\boxed\s*(?=\{)|[{}]", re.MULTILINE
)
_BOLD = re.compile(r"(?<!\*)\*{1,3}([^*\n]{1,200})\*{1,3}")
_DIGIT = re.compile(r"(?<![\w.,$-])[0-9](?![\w%]|[.,][0-9])")
_LABEL = re.compile(r"[(\[]?([A-Za-z0-9])[)\]]?[.:]?(?:\s+(.*))?")
_SEVERAL = re.compile(r"\s*[A-Z](?:(?:\s*[,;/&]\s*|\s+and\s+)[A-Z])+\s*")
_BOOLEANS: Mapping[str, str] = {"true": "yes", "false": "no"}


@dataclass(frozen=True)
class Choice:
    """A row's right options, and the text of each option; empty if only the label is known.

    Attributes:
        right: Their letters.
        options: Texts by letter.
        letters: The letter for each label that is a digit.
    """

    right: frozenset[str]
    options: Mapping[str, str]
    letters: Mapping[str, str]


def check_choice(answer: Sequence[Any], choices: Sequence[Any] | None = None) -> list[Choice]:
    """Read the columns `answer` and `choices`."""
    return read_rows("answer", answer, _read_choice, choices)


def _read_choice(answer: Any, choices: Any) -> Choice:
    options = _options(choices)
    letters = dict(zip(options, string.ascii_uppercase, strict=False)) if all(map(str.isdigit, options)) else {}
    options = {letters.get(label, label): text for label, text in options.items()}
    listed = re.findall("[A-Z]", answer) if _SEVERAL.fullmatch(str(answer)) else decoded(answer)
    entries = listed if isinstance(listed, (list, tuple)) and listed else [answer]
    return Choice(frozenset(_right(each, options, letters) for each in entries), options, letters)


def _right(answer: Any, options: Mapping[str, str], letters: Mapping[str, str]) -> str:
    """Resolve an answer to its letter: a label, with or without its text, an option's text, or its index from 0."""
    text = str(answer).strip()
    names = _normalized(text), _BOOLEANS.get(text.casefold())
    same = [letter for letter, option in options.items() if _normalized(option) in names]
    if label := _LABEL.fullmatch(text):
        letter = letters.get(label[1], label[1].upper())
        is_known = letter in options or (not options and letter.isalpha())
        if is_known and (not label[2] or _normalized(options.get(letter, label[2])) == _normalized(label[2])):
            return letter
    same = same if isinstance(answer, (str, bool)) and len(same) == 1 else []
    if re.fullmatch("[0-9]{1,2}", text) and int(text) < len(options):
        same.append(list(options)[int(text)])  # MMLU counts from 0
    if len(set(same)) > 1:
        raise ValueError(f"a letter: {same[0]} if that is the option's text, {same[1]} if it is its place from 0")
    if not same:
        raise ValueError("a letter such as 'B', or the text of one of the column `choices`")
    return same[0]


def _options(choices: object) -> dict[str, str]:
    """Parse options by label: from a list, a mapping of labels to texts, or ARC's lists of both; also from JSON."""
    if choices is None or choices == "" or choices != choices:  # NaN: a missing cell of a table
        return {}
    choices = decoded(choices)
    if isinstance(choices, Mapping) and {"text", "label"} <= set(choices):
        choices = dict(zip(choices["label"], choices["text"], strict=False))
    if isinstance(choices, (list, tuple)):
        choices = dict(zip(string.ascii_uppercase, choices, strict=False))
    if not isinstance(choices, Mapping):
        raise ValueError("`choices` as a list, or as a mapping of labels to texts")
    options = {
        str(label).strip("()[].: ").upper(): str(text)
        for label, text in choices.items()
        if text is not None  # Parquet fills in the labels of other rows
    }
    if not re.fullmatch("[A-Z]*|[0-9]*", "".join(options)) or max(map(len, options), default=1) > 1:
        raise ValueError(f"options with letters or digits as labels, not {', '.join(options)}")
    return options


@verifier(check_choice)
def choice(
    completions: list[str], answer: list[Any], choices: list[Any] | None = None, stopped: list[bool] | None = None
) -> list[Verdict]:
    r"""Check whether a response chooses the right option: `B`, `(B)`, `B. Paris`, `The answer is B`, `\boxed{B}`.

    Naming several options without saying which is the answer is wrong: `several answers`. If a row has several right
    ones, the response must name all of them and no others.

    Args:
        completions: Responses as text.
        answer: The right label, the option's text, or its place from 0; or a list of them.
        choices: The options: a list of texts, a mapping of labels to texts, or `{"label": […], "text": […]}`.
        stopped: Whether each response ended with a stop token.
    """
    return verdicts(completions, stopped, check_choice(answer, choices), _grade_choice)


def _grade_choice(text: str, is_whole: bool, reference: Choice) -> Graded:
    text = typed(text)
    content = boxed(text)
    found = _chosen(text if content is None else content, reference) if is_whole or content else None
    if not found:
        return NO_ANSWER
    if len(found) > len(reference.right) == 1:
        return SEVERAL
    return RIGHT if found == reference.right else WRONG_CHOICE, "".join(sorted(found))


def _chosen(text: str, reference: Choice) -> set[str]:
    r"""The letters that a response gives as its answer, by the first of the ways below that finds any."""
    text = _DIGIT.sub(lambda digit: reference.letters.get(digit[0], digit[0]), text)
    text = _BOLD.sub(r"\1", _FORMAT.sub("", text)).strip()
    claims = _DENIED.sub("", text)
    for stated in _STATED:
        if statements := list(stated.finditer(claims)):
            return _with_alternatives(claims, statements[-1])
    bare = claims.strip(" ,;:.")
    if (first := _FIRST.match(bare)) and _LIST.fullmatch(bare):
        return _with_alternatives(bare, first)
    lines = [_with_alternatives(claims, line) for line in _LINE.finditer(claims)]
    found = set[str]().union(*lines, _MENTIONED.findall(claims) if not lines else ())
    words = named = f" {_normalized(text)} "
    # Longest first, so that "dark red" does not also count as "red".
    for label, option in sorted(reference.options.items(), key=lambda each: -len(each[1])):
        named = named.replace(f" {_normalized(option)} ", f" ({label}) ")
    return found if found or named == words else _chosen(named, Choice(reference.right, {}, {}))


def _with_alternatives(text: str, statement: re.Match[str]) -> set[str]:
    """The letter in a statement, and the alternatives that follow, as in `A or B`."""
    found = [statement]
    while further := _ALTERNATIVE.match(text, found[-1].end()):
        found.append(further)
    return {each[each.lastindex or 0].upper() for each in found}


# Matches


_PUNCTUATION = re.compile(
    r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))|(?<!\w)#|(?<![\w+])\+(?=[0-9])"
    r"|(?<![0-9])[!-\"$-*,-/:;?@\[-\]_`{-~‘-‟«»…、。]|[!-\"$-*,-/:;?@\[-\]_`{-~‘-‟«»…、。](?![0-9])"
)
"""Punctuation without meaning; between digits, only the thousands separator."""


def _normalized(text: str) -> str:
    """Normalize as SQuAD does: lower case, no punctuation, articles or repeated spaces; -2, 1.5, 3/4 and C++ stay.

    If nothing would be left, less is removed: "A." becomes "a", which differs from "the" and "!".
    """
    whole = text.strip().casefold()
    text = re.sub(r"(?<!\w)-(?=\.?[0-9])", "−", typed(text).casefold())
    text = re.sub(r"(?<![^\W0-9])\.(?=[0-9])", "·", text)
    text = _PUNCTUATION.sub("", text)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text).split()) or " ".join(text.split()) or whole


def _exact(text: str) -> str:
    return normalize("NFC", text.strip())


def _texts(answer: object) -> list[str]:
    entries = list(answer) if isinstance(answer, (list, tuple)) else [answer]
    texts = [str(each) for each in entries if isinstance(each, (str, int, float)) and str(each).strip()]
    if not texts or len(texts) < len(entries):
        raise ValueError("a text, or a list of texts of which each is right")
    listed = decoded(answer)
    if isinstance(answer, str) and isinstance(listed, list) and all(isinstance(each, str) for each in listed):
        texts += filter(str.strip, listed)  # a list in a CSV cell; its text may also be the answer itself
    return texts


def _answers(answer: Sequence[Any]) -> list[list[str]]:
    return read_rows("answer", answer, _texts)


def _grade_text(form: Callable[[str], str]) -> Callable[[str, bool, list[str]], Graded]:
    def grade(text: str, is_whole: bool, answers: list[str]) -> Graded:
        if not text.strip() or not is_whole:
            return NO_ANSWER
        return RIGHT if form(text) in map(form, answers) else WRONG_TEXT, form(text)

    return grade


@verifier(_answers)
def exact(completions: list[str], answer: list[Any], stopped: list[bool] | None = None) -> list[Verdict]:
    """Check whether a response is the answer, or one of several, apart from spaces around it."""
    return verdicts(completions, stopped, _answers(answer), _grade_text(_exact))


@verifier(_answers)
def normalized(completions: list[str], answer: list[Any], stopped: list[bool] | None = None) -> list[Verdict]:
    """`exact` without regard to case, punctuation, articles and repeated spaces."""
    return verdicts(completions, stopped, _answers(answer), _grade_text(_normalized))


@verifier(_answers)
def f1(completions: list[str], answer: list[Any], stopped: list[bool] | None = None) -> list[Verdict]:
    """Score the words that a response shares with the answer, from 0 to 1: the F1 of SQuAD, the best of all answers.

    F1 = 2 · shared words / (words of the response + words of the answer), each word as often as it occurs in both.
    Words are compared as by `normalized`; their order does not count.

    Source: Rajpurkar et al. 2016 (arXiv 1606.05250), section 6.1.
    """
    return verdicts(completions, stopped, _answers(answer), _grade_words)


def _grade_words(text: str, is_whole: bool, answers: list[str]) -> Graded:
    if not text.strip() or not is_whole:
        return NO_ANSWER
    found, *wanted = (Counter(_normalized(each).split()) for each in (text, *answers))
    score = max(2 * (found & each).total() / (found + each).total() for each in wanted)
    return Verdict(score, RIGHT if score == 1 else PARTLY if score else WRONG_TEXT, _normalized(text))


# Patterns and tags


def _expression(entry: object) -> re.Pattern[str]:
    try:
        if isinstance(entry, str) and entry:
            with deadline("pattern"):
                return re.compile(entry)
    except Expired as error:
        raise ValueError("a regular expression that compiles within a second") from error
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"a regular expression ({error})") from error
    raise ValueError("a regular expression")


def _patterns(pattern: Sequence[Any]) -> list[re.Pattern[str]]:
    return read_rows("pattern", pattern, _expression)


CONTINUATIONS = ("0a\n" * 50, "a 0\n" * 50)
"""Possible continuations of a truncated response, which must match with each of them."""


@verifier(_patterns)
def pattern(completions: list[str], pattern: list[str], stopped: list[bool] | None = None) -> list[Verdict]:
    r"""Check whether a regular expression is found in a response (`\A…\Z` for the whole of it), within a second.

    Thoughts are only searched if the expression names their tag.
    """
    return verdicts(completions, stopped, _patterns(pattern), _grade_pattern, read=whole_response)


def _grade_pattern(text: str, is_whole: bool, expression: re.Pattern[str]) -> str:
    named = expression.pattern.replace("\\", "")
    answer = text if any(mark in named for pair in MARKS for mark in pair) else answer_of(text)
    if answer is None:
        return NO_ANSWER
    texts = [answer] if is_whole else [answer, *(answer + more for more in CONTINUATIONS)]
    with deadline("pattern"):
        return RIGHT if all(map(expression.search, texts)) else NO_MATCH if is_whole else NO_ANSWER


def _check_tags(names: Sequence[str] = ("think", "answer")) -> None:
    if isinstance(names, str) or not names or not all(isinstance(name, str) and name for name in names):
        raise RewardError(f"tags: names={names!r}: expected a list of names, such as [think, answer]")


@verifier(_check_tags)
def tags(
    completions: list[str],
    prompts: list[str] | None = None,
    stopped: list[bool] | None = None,
    *,
    names: Sequence[str] = ("think", "answer"),
) -> list[Verdict]:
    """Check whether a response is `<think>…</think><answer>…</answer>`: each tag once, in order, with text inside only.

    The first tag may be the end of the prompt, where chat templates put it.

    Args:
        completions: Responses as text.
        prompts: The prompts as text.
        stopped: Whether each response ended with a stop token.
        names: The tags.
    """
    _check_tags(names)
    opening = f"<{names[0]}>"
    whole = [
        opening + text if prompt.rstrip().endswith(opening) and not text.startswith(opening) else text
        for text, prompt in zip(completions, prompts or [""] * len(completions), strict=True)
    ]
    return verdicts(whole, stopped, [names] * len(whole), _grade_tags, read=whole_response)


def _grade_tags(text: str, is_whole: bool, names: Sequence[str]) -> str:
    expected = [tag for name in names for tag in (f"<{name}>", f"</{name}>")]
    tag = re.compile("|".join(map(re.escape, expected)))
    found = tag.findall(text)
    if found != expected:
        missing = set(expected) - set(found)
        return NO_ANSWER if missing and not is_whole else "missing tag" if missing else "tags out of order"
    parts = [bool(INVISIBLE.sub("", part).strip()) for part in tag.split(text)]
    if not all(parts[1::2]):
        return "empty tag"
    return "text outside the tags" if any(parts[::2]) else RIGHT


# JSON


def check_schema(schema: Sequence[Any]) -> list[Any]:
    """Read the column `schema`, as validators.

    Raises:
        RewardError: jsonschema is not installed, or a schema cannot be used.
    """
    try:
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry, Resource
        from referencing.exceptions import Unresolvable
        from referencing.jsonschema import DRAFT202012
    except ImportError as error:
        raise RewardError(f"json_schema needs jsonschema: {install_line('schema')}") from error

    def validator(entry: object) -> Any:
        try:
            found = json.loads(entry) if isinstance(entry, str) else entry
            if not isinstance(found, dict):
                raise ValueError("a JSON schema, as a mapping or as text")
            kind = validator_for(found, default=Draft202012Validator)
            kind.check_schema(found)
        except (SchemaError, json.JSONDecodeError) as error:
            raise ValueError(f"a JSON schema ({error.args[0]})") from error
        resolver = Registry().resolver_with_root(Resource.from_contents(found, default_specification=DRAFT202012))
        for reference in _references(found):
            try:
                resolver.lookup(reference)
            except Unresolvable as error:
                raise ValueError(f"a JSON schema that contains what it refers to, {reference!r}") from error
        return kind(found, registry=Registry())  # without one, references to other documents would be downloaded

    return read_rows("schema", schema, validator)


def _references(schema: Any) -> Iterator[str]:
    """Yield the references in a schema, except in parts with their own `$id`, to which theirs are relative."""
    if isinstance(schema, dict):
        entries = cast("dict[str, Any]", schema)
        if isinstance(reference := entries.get("$ref"), str):
            yield reference
        for key, entry in entries.items():
            if key not in ("enum", "const", "default", "examples") and not (isinstance(entry, dict) and "$id" in entry):
                yield from _references(entry)
    elif isinstance(schema, list):
        for entry in cast("list[Any]", schema):
            yield from _references(entry)


@verifier(check_schema)
def json_schema(completions: list[str], schema: list[Any], stopped: list[bool] | None = None) -> list[Verdict]:
    """Check whether a response is one JSON value, bare or fenced, that fits the row's schema (extra `schema`)."""
    return verdicts(completions, stopped, check_schema(schema), _grade_json)


_BLOCK = re.compile(r"^[ \t]*```([^`\n]*)\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


def _grade_json(text: str, is_whole: bool, validator: Any) -> str:
    from referencing.exceptions import Unresolvable

    reason = NOT_JSON
    with deadline("json_schema"):
        try:
            blocks = [text for language, text in _BLOCK.findall(text) if language.strip().lower() in ("", "json")]
            if not blocks and not is_whole:
                return NO_ANSWER
            value = json_value(blocks[-1] if blocks else text)
            reason = WRONG_SCHEMA
            return RIGHT if validator.is_valid(value) else WRONG_SCHEMA
        except Unresolvable as error:
            raise RewardError(f"a schema refers to {error.ref!r}, which it does not contain") from error
        except Exception:  # not JSON, or a value that a library cannot handle, such as 1e400
            return reason

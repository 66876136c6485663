"""Texts: choices, exact and normalized matches, patterns, tags, and JSON."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kedge.errors import RewardError, install_line
from kedge.rewards.source import Verdict
from kedge.rewards.verify.answers import boxed
from kedge.rewards.verify.checking import (
    NO_ANSWER,
    RIGHT,
    TOO_SLOW,
    Expired,
    after_thoughts,
    deadline,
    decoded,
    read_rows,
    reads,
    reads_column,
    verdicts,
    without_thoughts,
)

WRONG_CHOICE = "wrong choice"
SEVERAL = "several answers"
WRONG_TEXT = "wrong text"
NO_MATCH = "no match"
NOT_JSON = "not JSON"
WRONG_SCHEMA = "against the schema"


# Multiple choice

_END = r"(?=[\"'”’]?[.!,;]?[ \t]*(?:$|\n))"
_LETTER = rf"[\"'“‘]?(?:[(\[]?([A-Z])(?![\w'’])|[(\[]([a-z])(?=[)\]])|([a-z]){_END})[)\]]?"
"""A small letter only in brackets or at the end: "the answer is a city" names no option."""
_GAP = r"\s{0,4}"
_IS = r"(?:\s{1,4}(?:is|(?:would|must|should|has to) be))?"
_STATED = tuple(
    re.compile(rf"(?i:\b(?:{words}){_IS}{_GAP}[:=]?{_GAP}(?:option\s)?){_LETTER}")
    for words in ("answer|correct option|right option", "choice|option|choose|pick|select|go with")
)
"""Ways to state a choice, the first that occurs: "the answer is B" counts, then, and not "option A is wrong"."""
_ALTERNATIVE = re.compile(rf"{_GAP}(?:,|/|&|\bor\b|\band\b){_GAP}(?:or\s|and\s|option\s)?{_LETTER}")
_LINE = re.compile(r"^[ \t]*[(\[]?([A-Z])(?:[)\].:]+(?:[ \t].*)?)?[ \t]*$", re.MULTILINE)
_MENTIONED = re.compile(r"\(([A-Z])\)")


@dataclass(frozen=True)
class Choice:
    """The right label of a row, and the text of each option; empty if only the label is known."""

    right: str
    options: Mapping[str, str]


def check_choice(answer: Sequence[Any], choices: Sequence[Any] | None = None) -> list[Choice]:
    """Read the columns `answer` and `choices`."""
    return read_rows("answer", answer, _read_choice, choices)


def _read_choice(answer: Any, choices: Any) -> Choice:
    options = _options(choices)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(options):
        return Choice(list(options)[answer], options)  # MMLU counts from 0
    if isinstance(answer, str):
        label = answer.strip().strip("().").upper()
        if label in options or (not options and re.fullmatch("[A-Z]", label)):
            return Choice(label, options)
        same = [label for label, text in options.items() if _normalized(text) == _normalized(answer)]
        if len(same) == 1:
            return Choice(same[0], options)
        if not same and re.fullmatch("[0-9]{1,2}", answer.strip()):  # a cell of a table in text
            return _read_choice(int(answer), options)
    raise ValueError("a letter such as 'B', or the text of one of the column `choices`")


def _options(choices: object) -> dict[str, str]:
    """Options by label, from a list, or a mapping of labels to texts, or ARC's lists of both; also as JSON."""
    if choices is None or choices == "" or choices != choices:  # also the NaN of a table
        return {}
    choices = decoded(choices)
    if isinstance(choices, Mapping) and {"text", "label"} <= set(choices):
        choices = dict(zip(choices["label"], choices["text"], strict=False))
    if isinstance(choices, (list, tuple)):
        choices = dict(zip(string.ascii_uppercase, choices, strict=False))
    if not isinstance(choices, Mapping):
        raise ValueError("`choices` as a list, or as a mapping of labels to texts")
    options = {str(label).upper(): str(text) for label, text in choices.items()}
    if not all(re.fullmatch("[A-Z]", label) for label in options):
        raise ValueError(f"options with letters as labels, not {', '.join(options)}")
    return options


@reads(check_choice)
def choice(
    completions: list[str], answer: list[Any], choices: list[Any] | None = None, stopped: list[bool] | None = None
) -> list[Verdict]:
    r"""Check whether a response chooses the right option: `B`, `(B)`, `B. Paris`, `The answer is B`, `\boxed{B}`.

    Naming several options without saying which is the answer is wrong: `several answers`.

    Args:
        completions: Responses as text.
        answer: The right label, the option's text, or its place from 0.
        choices: The options: a list of texts, a mapping of labels to texts, or `{"label": […], "text": […]}`.
        stopped: Whether each response ended with a stop token.
    """
    return verdicts(completions, stopped, check_choice(answer, choices), _judge_choice)


def _judge_choice(text: str, is_whole: bool, reference: Choice) -> str | tuple[str, str]:
    text = after_thoughts(text)
    found = _chosen(boxed(text) or text, reference.options)
    if len(found) != 1:
        return SEVERAL if found else NO_ANSWER
    [label] = found
    return RIGHT if label == reference.right else WRONG_CHOICE, label


def _chosen(text: str, options: Mapping[str, str]) -> set[str]:
    r"""The labels that a response gives as its answer, by the first of these ways in which it names any."""
    text = re.sub(r"[*_`$#]|\\text\s*(?=\{)|\\boxed\s*(?=\{)|[{}]", "", text).strip()
    for stated in _STATED:
        if statements := list(stated.finditer(text)):
            return _with_alternatives(text, statements[-1])
    if re.fullmatch(r"[(\[]?[a-zA-Z][)\].!]*", text):
        return {text.strip("()[].!").upper()}
    found = set(_LINE.findall(text)) or set(_MENTIONED.findall(text))
    if found or not options:
        return found
    words = f" {_normalized(text)} "
    named = {label: f" {_normalized(option)} " for label, option in options.items() if _normalized(option)}
    named = {label: option for label, option in named.items() if option in words}
    # "dark red" is not also an answer "red".
    return {
        label
        for label, option in named.items()
        if not any(option in other and option != other for other in named.values())
    }


def _with_alternatives(text: str, statement: re.Match[str]) -> set[str]:
    """The label of a statement, and those that follow as in `A or B`."""
    found = {_letter(statement)}
    at = statement.end()
    while (further := _ALTERNATIVE.match(text, at)) is not None:
        found.add(_letter(further))
        at = further.end()
    return found


def _letter(match: re.Match[str]) -> str:
    return str(match[1] or match[2] or match[3]).upper()


# Matches


def _normalized(text: str) -> str:
    """Lower case, without punctuation, articles and repeated spaces, as SQuAD compares answers; -2 and 1.5 stay.

    So does what would be nothing without it: "A." is "a", and not the same as "the" and "!".
    """
    whole = text.strip().casefold()
    text = re.sub(r"(?<!\w)-(?=\.?[0-9])", "−", text.casefold())
    text = re.sub(r"(?<![^\W0-9])\.(?=[0-9])", "·", text)
    text = "".join(each for each in text if each not in string.punctuation)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text).split()) or " ".join(text.split()) or whole


def _texts(answer: object) -> list[str]:
    entries = list(answer) if isinstance(answer, (list, tuple)) else [answer]
    texts = [str(each) for each in entries if isinstance(each, (str, int, float)) and str(each).strip()]
    if not texts or len(texts) < len(entries):
        raise ValueError("a text, or a list of texts of which each is right")
    listed = decoded(answer)
    if isinstance(answer, str) and isinstance(listed, list) and all(isinstance(each, str) for each in listed):
        texts += filter(str.strip, listed)  # a cell of a table in text; the list itself may be the answer, too
    return texts


def _judge_text(form: Callable[[str], str]) -> Callable[[str, bool, list[str]], str | tuple[str, str]]:
    def judge(text: str, is_whole: bool, answers: list[str]) -> str | tuple[str, str]:
        if not text.strip() or not is_whole:
            return NO_ANSWER
        text = after_thoughts(text)
        return RIGHT if form(text) in map(form, answers) else WRONG_TEXT, form(text)

    return judge


@reads_column("answer", _texts)
def exact(completions: list[str], answer: list[Any], stopped: list[bool] | None = None) -> list[Verdict]:
    """Check whether a response is the answer, or one of several, apart from spaces around it."""
    return verdicts(completions, stopped, read_rows("answer", answer, _texts), _judge_text(str.strip))


@reads_column("answer", _texts)
def normalized(completions: list[str], answer: list[Any], stopped: list[bool] | None = None) -> list[Verdict]:
    """`exact` without regard to case, punctuation, articles and repeated spaces."""
    return verdicts(completions, stopped, read_rows("answer", answer, _texts), _judge_text(_normalized))


# Patterns and tags


def _expression(entry: object) -> re.Pattern[str]:
    try:
        if isinstance(entry, str) and entry:
            return re.compile(entry)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"a regular expression ({error})") from error
    raise ValueError("a regular expression")


@reads_column("pattern", _expression)
def pattern(completions: list[str], pattern: list[str], stopped: list[bool] | None = None) -> list[Verdict]:
    r"""Check whether a regular expression is found in a response (`\A…\Z` for the whole of it), within a second.

    Thoughts are part of the response only to an expression that names their tag.
    """
    return verdicts(completions, stopped, read_rows("pattern", pattern, _expression), _judge_pattern)


def _judge_pattern(text: str, is_whole: bool, expression: re.Pattern[str]) -> str:
    if "think>" not in expression.pattern:
        text = without_thoughts(text)
    try:
        with deadline("pattern"):
            return RIGHT if expression.search(text) else NO_MATCH if is_whole else NO_ANSWER
    except Expired:
        return TOO_SLOW


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
    opening = f"<{names[0]}>"
    opened = [text.rstrip().endswith(opening) for text in prompts or [""] * len(completions)]
    whole = [opening + text if is_open else text for text, is_open in zip(completions, opened, strict=True)]
    return verdicts(whole, stopped, [names] * len(whole), _judge_tags)


def _judge_tags(text: str, is_whole: bool, names: Sequence[str]) -> str:
    parts = [part for part in re.split(r"(</?[A-Za-z][\w-]*>)", text) if part.strip()]
    expected = [tag for name in names for tag in (f"<{name}>", f"</{name}>")]
    found = [part for part in parts if part in expected]
    if found != expected:
        missing = set(expected) - set(found)
        return NO_ANSWER if missing and not is_whole else "missing tag" if missing else "tags out of order"
    at = [index for index, part in enumerate(parts) if part in expected]
    for opens, closes in zip(at[::2], at[1::2], strict=True):
        if closes == opens + 1:
            return "empty tag"
    inside = sum(closes - opens + 1 for opens, closes in zip(at[::2], at[1::2], strict=True))
    return RIGHT if inside == len(parts) else "text outside the tags"


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
        except SchemaError as error:
            raise ValueError(f"a JSON schema ({error.message})") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"a JSON schema ({error})") from error
        resolver = Registry().resolver_with_root(Resource.from_contents(found, default_specification=DRAFT202012))
        for reference in _references(found):
            try:
                resolver.lookup(reference)
            except Unresolvable as error:
                raise ValueError(f"a JSON schema that contains what it refers to, {reference!r}") from error
        return kind(found, registry=Registry())  # without one, references to other documents would be downloaded

    return read_rows("schema", schema, validator)


def _references(schema: Any) -> Iterator[str]:
    """The references in a schema with no part of another name, which they are relative to."""
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


@reads(check_schema)
def json_schema(completions: list[str], schema: list[Any], stopped: list[bool] | None = None) -> list[Verdict]:
    """Check whether a response is one JSON value, bare or fenced, that fits the row's schema (extra `schema`)."""
    return verdicts(completions, stopped, check_schema(schema), _judge_json)


def _judge_json(text: str, is_whole: bool, validator: Any) -> str:
    from referencing.exceptions import Unresolvable

    text = after_thoughts(text)
    blocks = re.findall(r"^[ \t]*```(?i:json)?[ \t\r]*\n(.*?)^[ \t]*```", text, re.DOTALL | re.MULTILINE)
    try:
        with deadline("json_schema"):
            value = json.loads(blocks[-1] if blocks else text, parse_constant=_no_constant)
            return RIGHT if validator.is_valid(value) else WRONG_SCHEMA
    except Expired:
        return TOO_SLOW
    except Unresolvable as error:
        raise RewardError(f"a schema refers to {error.ref!r}, which it does not contain") from error
    except (ValueError, RecursionError):
        return NOT_JSON if is_whole else NO_ANSWER


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")

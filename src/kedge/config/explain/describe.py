"""Describes fields and values: accepted values, formatted values, and suggestions for unknown names."""

import difflib
import json
import types
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kedge.config.libraries import foreign_answer
from kedge.config.schema.field import Choice, field_doc, forms
from kedge.config.schema.root import Config
from kedge.config.schema.section import Section, parameters_of
from kedge_base.stage import registered_stages
from kedge_base.texts import printable, shortened

_PLAIN = {
    float: "a number",
    int: "a whole number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    Any: "any value",
}
_SOURCES = "a source or a list of sources"
_SCHEDULES = "a mapping of fields to {update: value}"
_MAX_LENGTH = 60

# Names that users expect for a field, in addition to the libraries' names in `kedge.config.libraries`.
_SYNONYMS = {
    "beta": "ppo.kl_coef",
    "ent_coef": "ppo.entropy_coef",
    "n_steps": "ppo.num_updates",
    "on_reward_error": "reward_functions.on_error",
    "reward_retries": "reward_functions.retries",
    "reward_timeout": "reward_functions.timeout",
    "target_kl": "ppo.early_stop_kl",
    "whiten": "ppo.whiten_advantages",
}


USUAL = {
    "algo": "preset",
    "algorithm": "preset",
    "annotator": "labeler",
    "epochs": "num_epochs",
    "group_size": "num_responses",
    "judge": "labeler",
    "labeler": "judge",
    "lr": "learning_rate",
    "n": "num_responses",
    "policy": "model",
    "steps": "num_updates",
}
"""Short names that users expect, and the field that each means, without its section."""


def section_type(name: str) -> type[Section] | None:
    """The section with this name, such as `ppo` or `rollout.vllm`, or None."""
    section: type[Section] = Config
    for part in name.split("."):
        field = section.model_fields.get(part)
        inner = None if field is None else _section(field)
        if inner is None:
            return None
        section = inner
    return section


@cache
def all_fields() -> Iterable[tuple[str, FieldInfo]]:
    """Every field with its dotted name, in the order of the schema."""
    return [*fields_of(Config)]


def fields_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The fields of a section and of the sections in it, with their dotted names."""
    for name, field in section.model_fields.items():
        inner = _section(field)
        if inner is None:
            yield f"{prefix}{name}", field
        else:
            yield from fields_of(inner, f"{prefix}{name}.")


CHANGED_FIRST = (
    *("rollout.num_prompts", "rollout.num_responses", "rollout.max_new_tokens", "rollout.temperature"),
    *("rollout.missing_eos_score", "rollout.engine", "ppo.num_updates", "ppo.learning_rate", "ppo.num_epochs"),
    *("ppo.num_minibatches", "ppo.clip_range", "ppo.kl_coef", "ppo.kl_in", "ppo.entropy_coef", "ppo.advantage"),
    *("ppo.critic", "ppo.critic_learning_rate", "ppo.eval_every", "adapter.kind", "runtime.micro_batch_tokens"),
)
"""The twenty settings of PPO that people change first."""


def groups_of(section: type[Section]) -> dict[str, list[str]]:
    """The names of a section's fields by the title of their group; fields without one have an empty title."""
    parts = [base for base in reversed(section.__bases__) if issubclass(base, Section) and base.model_fields]
    groups = {(part.__doc__ or "").strip(): list(part.model_fields) for part in parts}
    grouped = [name for names in groups.values() for name in names]
    alone = [name for name in section.model_fields if name not in grouped]
    return {**groups, "": alone} if alone else groups


def _section(field: FieldInfo) -> type[Section] | None:
    """The section type of a field, or None."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) and not parameters_of(kind) else None


def find_field(dotted: str) -> FieldInfo | None:
    """The field, or the parameter of one's value, with this dotted name; None for another name."""
    # `data.columns.prompt` is an entry of a field.
    fields, (name, _, part) = dict(all_fields()), dotted.rpartition(".")
    found = fields.get("data.columns" if dotted.startswith("data.columns.") else dotted)
    return parameters_of(fields[name].annotation).get(part) if found is None and name in fields else found


def fields_named(name: str) -> list[str]:
    """The fields that a bare name can mean: kedge's own, or else those of registered stages."""
    owners = [dotted for dotted, _ in all_fields() if dotted.partition(".")[2] == name]
    added = tuple(f"{section}." for stage in registered_stages() for section in stage.adds_sections)
    return [dotted for dotted in owners if not dotted.startswith(added)] or owners


def choices_of(field: FieldInfo | None) -> list[str]:
    """The texts that a field accepts by name: its choices, true and false, null."""
    return [] if field is None else list(dict.fromkeys(_texts(field.annotation)))


def _texts(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif annotation is bool:
        yield from ("true", "false")
    elif annotation is type(None):
        yield "null"
    else:
        for part in get_args(annotation):
            yield from _texts(part)


def field_advice(dotted: str, direction: str) -> str:
    """The effect of a value that is `too_high` or `too_low`, from the field's documentation; otherwise empty."""
    field = find_field(dotted)
    if field is None or direction not in ("too_high", "too_low"):
        return ""
    return getattr(field_doc(field), direction)


def accepts(field: FieldInfo) -> str:
    """Describe the values that a field accepts: `a whole number ≥ 1, or null`."""
    text = field_doc(field).text
    own = {_PLAIN[str]: text, **({} if text == "text" else {_SOURCES: text, _SCHEDULES: text})}
    kinds = [own.get(kind, kind) for kind in _kinds(field.annotation)]
    head = _limited(kinds[0], field.metadata)
    return ", or ".join([", ".join([head, *kinds[1:-1]]), *kinds[1:][-1:]])


def _limited(kind: str, bounds: Iterable[Any]) -> str:
    """Describe a kind of value with its bounds: `a number ≥ 0 and ≤ 1`."""
    signs = {Gt: ">", Ge: "≥", Lt: "<", Le: "≤"}
    limits = [
        f"{signs[type(item)]} {written(getattr(item, type(item).__name__.lower()))}"
        for item in bounds
        if type(item) in signs
    ]
    return f"{kind} {' and '.join(limits)}" if limits else kind


def _kinds(annotation: Any) -> Iterator[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        for part in arguments:
            yield from _kinds(part)
    elif origin is Annotated and arguments[0] == list[str]:
        yield "a list of names"
    elif origin is Annotated:
        yield _limited(next(_kinds(arguments[0])), arguments[1:])
    elif origin is Literal:
        yield from (str(choice) for choice in arguments)
    elif origin is Choice:
        yield from (kind for form in forms(annotation) for kind in _kinds(form))
    elif origin is list and get_origin(arguments[0]) is Literal:
        yield f"any of {', '.join(_kinds(arguments[0]))}"
    elif origin is list and get_origin(arguments[0]) in (Union, types.UnionType):
        yield "a list of these"
    elif origin is dict and get_origin(arguments[1]) is dict:
        yield _SCHEDULES
    elif origin is dict and get_origin(arguments[0]) is Literal:
        yield f"{{{' or '.join(get_args(arguments[0]))}: {' or '.join(_kinds(arguments[1]))}}}"
    elif origin is tuple:
        yield f"[{', '.join(kind for part in arguments for kind in _kinds(part))}]"
    elif origin is dict:
        yield f"a mapping of names to {' or '.join(_kinds(arguments[1]))}"
    elif origin is list and (arguments[0] is float or get_origin(arguments[0]) is Annotated):
        yield "a list of numbers"
    elif origin is list:
        yield _SOURCES
    elif inner := parameters_of(annotation):
        named = [(name, accepts(field).replace(", or ", " or ")) for name, field in inner.items()]
        yield named[0][1]
        yield f"{{{', '.join(f'{name}: {values}' for name, values in named)}}}"
    else:
        yield _PLAIN[annotation]


def written(value: object) -> str:
    """Format a value as in a configuration file, truncated if long."""
    if isinstance(value, float):
        return f"{value:g}"
    text = value if isinstance(value, str) and value else _as_json(value)
    return shortened(printable(text), _MAX_LENGTH)


def _as_json(value: object) -> str:
    try:
        return json.dumps(value, default=_jsonable, ensure_ascii=False)
    except (ValueError, RecursionError):  # the value contains itself, or has more digits than Python prints
        return "a value too long or too deep to show"


def _jsonable(value: object) -> object:
    return value.model_dump() if isinstance(value, BaseModel) else str(value)


def unknown(name: str, known: Iterable[str], *, kind: str = "a field", stage: str | None = None) -> str:
    """Describe a name that is not in the schema: give the counterpart of another library's name, or the closest names.

    Args:
        name: The name as given, dotted or bare.
        known: The dotted names that may be meant.
        kind: The kind of name that was expected, such as `a setting of ppo`.
        stage: The stage to which the name was passed.
    """
    return foreign_answer(name, stage) or f"{written(name)} is not {kind}{suggestion(name, known)}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?` for a mistyped dotted name, or nothing if no known name is close.

    The last part counts more than the section: `rollout.clip_range` suggests ppo.clip_range.
    """
    names = list(known)
    last = name.rpartition(".")[2]
    owners = {candidate.rpartition(".")[2]: candidate for candidate in reversed(names)}
    same = [candidate for candidate in names if candidate.rpartition(".")[2] == last]
    meant = f"{name.rpartition('.')[0]}.{USUAL.get(last)}"
    if not same and meant in names:
        return f"; did you mean {meant}?"
    if not same and (answer := foreign_answer(last)):
        return f"; {answer}"
    guesses = [
        *(candidate for candidate in same if candidate == f"reward_model.{last}" and name.startswith("reward.")),
        *same,
        *([_SYNONYMS[last]] if last in _SYNONYMS else []),
        *(candidate for candidate in names if len(last) > 2 and candidate.rpartition(".")[2].startswith(last)),
        *difflib.get_close_matches(name, names, n=1, cutoff=0.7),
        *(owners[match] for match in difflib.get_close_matches(last, owners, n=1, cutoff=0.6)),
    ]
    return f"; did you mean {guesses[0]}?" if guesses else ""

"""Shell completions of FIELD=VALUE."""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from kedge.config.explain.describe import all_fields, find_field, written
from kedge.config.loading.names import full_name
from kedge.config.schema.field import field_doc
from kedge.errors import ConfigError
from kedge.stages.stage import find_stage

__all__ = ["completions"]


def completions(incomplete: str, stage: str | None = None) -> list[tuple[str, str]]:
    """Candidates for an override that starts with a text, each with a description.

    Args:
        incomplete: `num_up`, `ppo.`, `ppo.policy_loss=`.
        stage: The stage whose fields have bare names; None completes dotted names only.
    """
    name, sign, value = incomplete.partition("=")
    if sign:
        return [(f"{name}={choice}", "") for choice in _choices(name, stage) if choice.startswith(value)]
    named: dict[str, str] = {}
    if name or stage is None:  # all dotted names are too many to choose from
        named = {dotted: field_doc(field).meaning for dotted, field in all_fields() if dotted.startswith(name)}
    if "." not in name and stage is not None:
        named |= {bare: meaning for bare, meaning in _bare(stage) if bare.startswith(name)}
    # Two candidates for a single match: a shell would put a space behind the only one.
    ends = ("=",) if len(named) != 1 else ("=", f"={written(_default(next(iter(named)), stage))}")
    return [(f"{field}{end}", meaning) for field, meaning in named.items() for end in ends]


def _bare(stage: str) -> Iterator[tuple[str, str]]:
    """The names that the stage accepts without a section, each with its meaning."""
    for group in find_stage(stage).sections:
        for dotted, field in all_fields():
            section, _, bare = dotted.partition(".")
            if section in group and _resolved(bare, stage) == dotted:
                yield bare, field_doc(field).meaning


def _resolved(name: str, stage: str | None) -> str | None:
    try:
        return full_name(name, stage)
    except ConfigError:
        return None


def _default(name: str, stage: str | None) -> Any:
    field = find_field(_resolved(name, stage) or name)
    return None if field is None else field.default


def _choices(name: str, stage: str | None) -> list[str]:
    field = find_field(_resolved(name, stage) or name)
    return [] if field is None else list(dict.fromkeys(_texts(field.annotation)))


def _texts(annotation: Any) -> Iterator[str]:
    """The texts that a type allows: the choices of a Literal, true and false, null."""
    if get_origin(annotation) is Literal:
        yield from (str(choice) for choice in get_args(annotation))
    elif annotation is bool:
        yield from ("true", "false")
    elif annotation is type(None):
        yield "null"
    else:
        for part in get_args(annotation):
            yield from _texts(part)

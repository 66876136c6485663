"""Resolves names of fields as users write them: dotted, or bare if only one section has the field."""

import os
from collections.abc import Mapping, Sequence

from kedge.config.explain.describe import (
    USUAL,
    all_fields,
    choices_of,
    fields_named,
    find_field,
    section_type,
    unknown,
)
from kedge.config.libraries import foreign_answer
from kedge.config.schema.root import Config
from kedge.config.schema.update.former import ANSWERS, PARTS
from kedge_base.errors import ConfigError
from kedge_base.packages import warn_of_old
from kedge_base.stage import find_stage, registered_stages


def initial_critic(critic: str | None) -> dict[str, str | None]:
    """Convert `--critic` and `kedge.ppo(critic=…)` to a setting: the kind of critic, or the model that it starts from.

    Raises:
        ConfigError: The text is the name of a choice, and a folder has the same name.
    """
    kinds, starts = (choices_of(find_field(name)) for name in ("ppo.critic", "ppo.critic_init"))
    if critic in (*kinds, *starts) and os.path.isdir(critic):
        raise ConfigError(f"{critic} is the name of a folder and of a kind of critic; write ./{critic} for the folder")
    return {"ppo.critic" if critic in kinds and critic not in starts else "ppo.critic_init": critic}


def full_name(name: str, stage: str | None = None, *, value: object = None) -> str:
    """The dotted name of a field; dotted names and names at the top level are returned unchanged.

    A name of both a section and a field, such as `critic`, is the field, unless its value is a mapping with keys that
    the field does not accept.

    Args:
        name: As the user wrote it.
        value: The value that it is given.
        stage: The stage in whose sections a bare name is looked up, group by group; None for all sections.

    Raises:
        ConfigError: The bare name is unknown or ambiguous, or the stage does not exist.
    """
    groups = _ALL_SECTIONS if stage is None else find_stage(stage).sections
    sections = [section for group in groups for section in group]
    formers = (
        [name] if "." in name else [f"{section}.{name}" for section in ("ppo", "checkpoint") if section in sections]
    )
    for former in (former for former in formers if former in PARTS):
        warn_of_old(name, PARTS[former])
        return former
    if "." in name or find_field(name) is not None:
        head, _, part = name.partition(".")
        owners = _owners(head, groups) if part and section_type(head) is None else []
        return f"{owners[0]}.{part}" if len(owners) == 1 and "." in owners[0] else name
    if section_type(name) is not None and (name not in _SHADOWED or _is_section(name, value, groups)):
        return name
    unread = () if stage is None else find_stage(stage).unread
    owners = [dotted for dotted in _owners(name, groups) if dotted not in unread]
    if len(owners) > 1:
        raise ConfigError(f"{name} is a field of several sections; write {' or '.join(owners)}")
    if owners:
        return owners[0]
    if name in ANSWERS and any("ppo" in group for group in groups):
        raise ConfigError(f"{name} is now {ANSWERS[name]}; write that")
    kind = f"a setting of {stage}" if stage else "a field"
    if meant := _owners(USUAL.get(name, ""), groups):
        raise ConfigError(f"{name} is not {kind}; did you mean {' or '.join(meant)}?")
    elsewhere, answer = fields_named(name), foreign_answer(name, stage)
    if elsewhere and not (answer and any(f" {section}." in answer for group in groups for section in group)):
        raise ConfigError(f"{name} is not {kind}; the field is {' or '.join(elsewhere)}")
    raise ConfigError(unknown(name, _known(groups), kind=kind, stage=stage))


def _is_section(name: str, value: object, groups: Sequence[Sequence[str]]) -> bool:
    names = {word for owner in _owners(name, groups) for word in choices_of(find_field(owner))}
    return isinstance(value, Mapping) and not (value and value.keys() <= names)


def _owners(name: str, groups: Sequence[Sequence[str]]) -> list[str]:
    """The fields that a bare name can mean: those of the first group with this name, or the one at the top level."""
    if find_field(name) is not None:
        return [name]
    for group in groups:
        if owners := [f"{section}.{name}" for section in group if find_field(f"{section}.{name}")]:
            return owners
    return []


_SHADOWED = {dotted.partition(".")[2] for dotted, _ in all_fields()}
"""Names of the sections' fields."""

_ADDED = tuple(name for stage in registered_stages() for name in stage.adds_sections)
_ALL_SECTIONS = (tuple(name for name in Config.model_fields if section_type(name) and name not in _ADDED), _ADDED)


def _known(groups: Sequence[Sequence[str]]) -> list[str]:
    sections = {section for group in groups for section in group}
    fields = [dotted for dotted, _ in all_fields() if dotted.partition(".")[0] in sections or "." not in dotted]
    return [*fields, *sections]

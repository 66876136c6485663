"""Explains fields to users and shells: `kedge config explain`, citations and completions."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic.fields import FieldInfo

from kedge.config.explain.describe import (
    CHANGED_FIRST,
    accepts,
    all_fields,
    choices_of,
    fields_named,
    fields_of,
    find_field,
    groups_of,
    section_type,
    unknown,
    written,
)
from kedge.config.libraries import foreign_answer
from kedge.config.loading.names import full_name
from kedge.config.presets import PRESETS, find_preset
from kedge.config.schema.field import field_doc
from kedge.config.schema.root import Config
from kedge.config.schema.section import Section, parameters_of
from kedge_base.errors import ConfigError
from kedge_base.stage import find_stage
from kedge_base.texts import read_table


def explain(name: str = "") -> str:
    """Explain a field, list the fields of a section, list all sections, or list the fields near a word.

    Args:
        name: `ppo.clip_range`, `ppo`, or a bare name that only one section has (`clip_range`); an argument of TRL,
            OpenRLHF or verl (`eps_clip`); a preset (`grpo`); a word in fields' names or meanings (`kl`); empty for all
            sections.

    Raises:
        ConfigError: No field has this name, or several do.
    """
    if not name:
        return "\n".join(_listing(Config.model_fields))
    section = section_type(name)
    if section is not None:
        answer = foreign_answer(name)
        theirs = [f"{answer}."] if answer else []
        return "\n".join([(section.__doc__ or "").strip(), *theirs, *_groups(name, section)])
    if (field := find_field(name)) is not None:
        return "\n".join(_page(name, field))
    if name in PRESETS:
        return describe_presets(name)
    fields, owners = dict(all_fields()), fields_named(name)
    if len(owners) == 1:
        return "\n".join(_page(owners[0], fields[owners[0]]))
    if owners:
        raise ConfigError(f"{name} is a field of several sections: {', '.join(owners)}")
    if answer := foreign_answer(name):
        mentioned = [
            field for field in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", answer.partition("; ")[2]) if field in fields
        ]
        return "\n".join([f"{answer}.", *(_page(mentioned[0], fields[mentioned[0]]) if mentioned else ())])
    if near := _near(name, fields):
        return "\n".join([f"No field is called {name}. In its name or meaning:", *_listing(near)])
    raise ConfigError(unknown(name, fields))


def _groups(name: str, section: type[Section]) -> Iterator[str]:
    """List the fields of a section by group; for PPO, the most commonly changed fields come first."""
    if name == "ppo":
        yield from ("", "Changed first, here and in other sections:")
        yield from _listing({dotted: field for dotted, field in all_fields() if dotted in CHANGED_FIRST})
    for title, names in groups_of(section).items():
        yield ""
        if title:
            yield f"{title.rstrip('.')}:"
        yield from _listing(
            {dotted: field for dotted, field in fields_of(section) if dotted.partition(".")[0] in names}
        )


def _near(word: str, fields: Mapping[str, FieldInfo]) -> dict[str, FieldInfo]:
    """List the fields whose name contains a word, or whose meaning has a word that starts with it."""
    text = word.lower()
    if len(text) < 2:
        return {}
    named = {name: field for name, field in fields.items() if text in name}
    starts = re.compile(rf"(?<!\w){re.escape(text)}", re.IGNORECASE)
    return named | {name: field for name, field in fields.items() if starts.search(field_doc(field).meaning)}


def describe_presets(name: str | None = None) -> str:
    """List the presets, or the values of one with their sources.

    Raises:
        ConfigError: There is no such preset.
    """
    if name is None:
        width = max(map(len, PRESETS))
        return "\n".join(f"{name:{width}}  {preset.about}" for name, preset in PRESETS.items())
    preset = find_preset(name)
    rows = {dotted: f"{dotted}: {written(cited.value)}" for dotted, cited in preset.values.items()}
    width = max(map(len, rows.values()))
    lines = [f"{row:{width}}  # {preset.values[dotted].source}" for dotted, row in rows.items()]
    return "\n".join([f"# {preset.about}", *lines])


def _listing(fields: Mapping[str, FieldInfo]) -> list[str]:
    heads = {
        name: name if isinstance(field.default, Section) else f"{name} = {written(field.default)}"
        for name, field in fields.items()
    }
    width = max(map(len, heads.values()))
    return [f"{heads[name]:{width}}  {field_doc(field).meaning}" for name, field in fields.items()]


def _page(dotted: str, field: FieldInfo) -> Iterator[str]:
    doc = field_doc(field)
    recipes = {
        preset.name: preset.values[dotted]
        for preset in PRESETS.values()
        if dotted in preset.values and preset.values[dotted].value != field.default
    }
    text = " ".join([doc.meaning, doc.source, *(cited.source for cited in recipes.values())])
    rows = [
        ("accepts", accepts(field)),
        ("default", written(field.default)),
        ("source", doc.source),
        *((name, _parameter(part)) for name, part in parameters_of(field.annotation).items()),
        ("too high", doc.too_high),
        ("too low", doc.too_low),
        *(("preset", f"{name}: {written(cited.value)} ({cited.source})") for name, cited in recipes.items()),
        *(("work", f"{name}: {work}") for name, work in cited_works(text).items()),
    ]
    yield from (dotted, f"  {doc.meaning}")
    yield from (f"  {label:9} {line}" for label, line in rows if line)


def _parameter(field: FieldInfo) -> str:
    doc = field_doc(field)
    effects = f"; too high: {doc.too_high}; too low: {doc.too_low}" if doc.too_high else ""
    default = "none" if field.is_required() else written(field.default)
    return f"{doc.meaning} Default: {default} ({doc.source}{effects})"


SOURCES: dict[str, str] = {row[0]: row[1] for row in read_table(Path(__file__).with_name("works.tsv"))}


def cited_works(text: str) -> dict[str, str]:
    """The works whose short names occur in a text, in the order of `SOURCES`."""
    return {
        name: work
        for name, work in SOURCES.items()
        if re.search(rf"(?<![\w.-]){'(?<!Dr. )' if name == 'GRPO' else ''}{re.escape(name)}(?![\w-]|\+)", text)
    }


def completions(incomplete: str, stage: str | None = None) -> list[tuple[str, str]]:
    """Candidates for an override that starts with a text, each with a description.

    Args:
        incomplete: `num_up`, `ppo.`, `ppo.policy_loss=`.
        stage: Its fields have bare names; None completes dotted names only.
    """
    name, sign, value = incomplete.partition("=")
    if sign:
        choices = choices_of(_field_of(name, stage))
        return [(f"{name}={choice}", "") for choice in choices if choice.startswith(value)]
    named: dict[str, str] = {}
    if name or stage is None:  # all dotted names are too many to choose from
        named = {dotted: field_doc(field).meaning for dotted, field in all_fields() if dotted.startswith(name)}
    if "." not in name and stage is not None:
        named |= {bare: meaning for bare, meaning in _bare(stage) if bare.startswith(name)}
    # Return two candidates for a single match: a shell would add a space after a single one.
    ends = ("=",)
    if len(named) == 1:
        [name] = named
        field = _field_of(name, stage)
        ends = ("=", f"={written(field and field.default)}")
    return [(f"{field}{end}", meaning) for field, meaning in named.items() for end in ends]


def _bare(stage: str) -> Iterator[tuple[str, str]]:
    """The names that the stage accepts without a section, with their meanings."""
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


def _field_of(name: str, stage: str | None) -> FieldInfo | None:
    return find_field(_resolved(name, stage) or name)

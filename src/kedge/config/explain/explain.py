"""The output of `kedge config explain`: the documentation of a field, or the fields of a section."""

import re
from collections.abc import Iterator, Mapping

from pydantic.fields import FieldInfo

from kedge.config.explain.citations import cited_works
from kedge.config.explain.describe import (
    FORMER,
    accepts,
    all_fields,
    fields_named,
    fields_of,
    find_field,
    section_type,
    unknown,
    written,
)
from kedge.config.libraries import foreign_answer
from kedge.config.presets import PRESETS, find_preset
from kedge.config.schema.field import field_doc
from kedge.config.schema.root import Config
from kedge.config.schema.section import Section
from kedge.errors import ConfigError

__all__ = ["describe_presets", "explain"]


def explain(name: str = "") -> str:
    """Explain a field, list the fields of a section, list all sections, or list the fields near a word.

    Args:
        name: `ppo.clip_range`, `ppo`, or a bare name that only one section has (`clip_range`); an argument of TRL,
            OpenRLHF or verl (`eps_clip`); a preset (`grpo`); a word in names or meanings of fields (`kl`); empty for
            all sections.

    Raises:
        ConfigError: Nothing has that name, or several fields do.
    """
    if not name:
        return "\n".join(_listing(Config.model_fields))
    section = section_type(name)
    if section is not None:
        return "\n".join([(section.__doc__ or "").strip(), "", *_listing(dict(fields_of(section)))])
    if (field := find_field(name)) is not None:
        return "\n".join(_page(name, field))
    if name in PRESETS:
        return describe_presets(name)
    fields, owners = dict(all_fields()), fields_named(name)
    if len(owners) == 1:
        return "\n".join(_page(owners[0], fields[owners[0]]))
    if owners:
        raise ConfigError(f"{name} is a field of several sections: {', '.join(owners)}")
    if name in FORMER:
        return f"{name} {FORMER[name]}."
    if answer := foreign_answer(name):
        mentioned = [
            field for field in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", answer.partition("; ")[2]) if field in fields
        ]
        return "\n".join([f"{answer}.", *(_page(mentioned[0], fields[mentioned[0]]) if mentioned else ())])
    if near := _near(name, fields):
        return "\n".join([f"No field is called {name}. In its name or meaning:", *_listing(near)])
    raise ConfigError(unknown(name, fields))


def _near(word: str, fields: Mapping[str, FieldInfo]) -> dict[str, FieldInfo]:
    """The fields whose name contains a word, or whose meaning has a word that starts with it."""
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
    yield dotted
    yield f"  {doc.meaning}"
    yield f"  accepts   {accepts(field)}"
    yield f"  default   {written(field.default)}"
    if doc.source:
        yield f"  source    {doc.source}"
    if doc.too_high:
        yield f"  too high  {doc.too_high}"
    if doc.too_low:
        yield f"  too low   {doc.too_low}"
    for name, cited in recipes.items():
        yield f"  preset    {name}: {written(cited.value)} ({cited.source})"
    text = " ".join([doc.meaning, doc.source, *(cited.source for cited in recipes.values())])
    for name, work in cited_works(text).items():
        yield f"  work      {name}: {work}"

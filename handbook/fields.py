"""The page of all configuration fields, from the schema that the program itself reads."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.fields import FieldInfo

from kedge.config import PRESETS, Config
from kedge.config.explain.citations import SOURCES, cited_works
from kedge.config.explain.describe import accepts, all_fields, section_type, written
from kedge.config.schema.field import knob_of
from kedge.config.schema.root import RewardTerm
from kedge.config.schema.stages import STAGES

__all__ = ["fields_page"]

HEAD = """\
# Every field

What `kedge config explain` tells, on one page: a field's meaning, what it takes, its default and where that comes
from, and what too high and too low values do. A preset is named where it sets another value than the default.
[Configuration](configuration.md) says how values are given, and what to turn when. Short names of papers are spelled
out [at the end](#works).

This page is written by `make docs-pages`, from the source.
"""

COMMON = """\
## At the top

Fields that belong to no section.
"""

TERM = """\
#### A term of `reward`

| key | meaning | takes | default |
|---|---|---|---|
"""


def fields_page() -> str:
    """The page, as Markdown."""
    top = [name for name in Config.model_fields if section_type(name) is None]
    sections = [name for name in Config.model_fields if section_type(name)]
    fields = dict(all_fields())
    parts = [HEAD, COMMON, *(_entry(name, fields[name]) for name in top)]
    for section in sections:
        parts.append(_section_head(section))
        parts += [_entry(name, field) for name, field in fields.items() if name.startswith(f"{section}.")]
    return "\n".join([*parts, _works()])


def _section_head(section: str) -> str:
    about = knob_of(Config.model_fields[section]).meaning
    stages = [stage.name for stage in STAGES.values() if any(section in group for group in stage.sections)]
    readers = f" Read by {_listed(f'`kedge {name}`' for name in stages)}." if stages else ""
    return f"## {section}\n\n{about}{readers}\n"


def _entry(name: str, field: FieldInfo) -> str:
    knob = knob_of(field)
    facts = [
        ("takes", _escaped(accepts(field))),
        ("default", "none: it has to be given" if field.is_required() else f"`{written(field.default)}`"),
        ("source", _escaped(knob.source)),
        ("too high", _escaped(knob.too_high or "")),
        ("too low", _escaped(knob.too_low or "")),
        ("presets", _listed(_preset_values(name, field))),
    ]
    told = "\n".join(f"- **{head}:** {text}" for head, text in facts if text)
    terms = _reward_terms() if name == "reward" else ""
    return f"### `{name}`\n\n{_escaped(knob.meaning)}\n\n{told}\n{terms}"


def _preset_values(name: str, field: FieldInfo) -> Iterator[str]:
    for preset in PRESETS.values():
        cited = preset.values.get(name)
        if cited is not None and cited.value != field.default:
            yield f"`{preset.name}` {_escaped(written(cited.value))}"


def _reward_terms() -> str:
    rows = [
        f"| `{name}` | {_escaped(knob_of(field).meaning)} | {_term_type(name, field)} | {_term_default(field)} |"
        for name, field in RewardTerm.model_fields.items()
    ]
    return "\n".join(["", TERM + "\n".join(rows), ""])


def _term_type(name: str, field: FieldInfo) -> str:
    return "names and values" if name == "settings" else _escaped(accepts(field))


def _term_default(field: FieldInfo) -> str:
    return "–" if field.is_required() else f"`{written(field.default)}`"


def _works() -> str:
    told = " ".join(f"{knob_of(field).meaning} {knob_of(field).source}" for _, field in all_fields())
    cited = cited_works(told)
    rows = [f"| {name} | {_escaped(work)} |" for name, work in SOURCES.items() if name in cited]
    return "\n".join(["## Works", "", "| short name | work |", "|---|---|", *rows, ""])


def _listed(items: Iterator[str]) -> str:
    return ", ".join(items)


def _escaped(text: str) -> str:
    """Text whose stars, bars and angle brackets are no markup; what stands in backticks is left as it is."""
    parts = text.split("`")
    for index in range(0, len(parts), 2):
        for sign in "*|<>[]":
            parts[index] = parts[index].replace(sign, f"\\{sign}")
    return "`".join(parts)

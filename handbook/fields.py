"""Writes docs/fields.md, the reference of all configuration fields, from the schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic.fields import FieldInfo

from kedge.config import Config
from kedge.config.explain.describe import (
    CHANGED_FIRST,
    accepts,
    all_fields,
    groups_of,
    section_type,
    written,
)
from kedge.config.explain.explain import SOURCES, cited_works
from kedge.config.schema.field import field_doc
from kedge.config.schema.rewards import RewardTermConfig
from kedge.config.schema.section import parameters_of
from kedge_base.stage import stages as all_stages

HEAD = """\
# Every field

For anyone who looks for a setting: all fields, with their meaning and default.

`kedge config explain NAME` says more about a field: the values it accepts, the source of the default, the effects of
values that are too high or too low, the presets that change it, and the papers behind them.
[Configuration](configuration.md) explains how to set fields, and which one to change for which symptom. The papers
named on this page are [at the end](#works).
"""

COMMON = """\
## Top level

Fields outside any section.
"""

TERM = """\
#### A term of `reward`

| key | meaning | accepts | default |
|---|---|---|---|
"""

LONG = 100
"""Characters; shorter texts are repeated."""


def fields_page() -> str:
    """The page, as Markdown."""
    top = [name for name in Config.model_fields if section_type(name) is None]
    sections = [name for name in Config.model_fields if section_type(name)]
    fields = dict(all_fields())
    first: dict[str, str] = {}
    for name, field in fields.items():
        first.setdefault(field_doc(field).meaning, name)
    parts = [HEAD, _changed_first(), COMMON, *(_entry(name, fields[name], first) for name in top)]
    for section in sections:
        parts.append(_section_head(section))
        titles = _titles(section)
        for name, field in fields.items():
            if name.startswith(f"{section}."):
                parts += [*([titles[name]] if name in titles else []), _entry(name, field, first)]
    return "\n".join([*parts, _works()])


def _changed_first() -> str:
    links = ", ".join(f"[`{name}`](#{name.replace('.', '')})" for name in CHANGED_FIRST)
    return f"## Changed first\n\nThe settings of PPO that people change first: {links}.\n"


def _titles(section: str) -> dict[str, str]:
    """The titles of a section's groups, each by the first field below it."""
    kind = section_type(section)
    groups = groups_of(kind) if kind else {}
    return {f"{section}.{names[0]}": f"**{title}**\n" for title, names in groups.items() if title}


def _section_head(section: str) -> str:
    about = field_doc(Config.model_fields[section]).meaning
    stages = [
        stage.name
        for stage in all_stages().values()
        if any(section in group for group in (*stage.sections, stage.dotted))
    ]
    readers = f" Read by {_listed(f'`kedge {name}`' for name in stages)}." if stages else ""
    return f"## {section}\n\n{about}{readers}\n"


def _entry(name: str, field: FieldInfo, first: Mapping[str, str]) -> str:
    """The field's section; a long text that an earlier field has already is replaced by that field's name."""
    meaning = field_doc(field).meaning
    if first[meaning] != name and len(meaning) > LONG:
        return f"### `{name}`\n\nAs `{first[meaning]}`. Default: `{written(field.default)}`.\n"
    default = "none; required" if field.is_required() else f"`{written(field.default)}`"
    choices = accepts(field)
    facts = f"Default: {default}"
    if "Literal" in str(field.annotation):
        facts += f"; accepts {_escaped(choices)}"
    terms = _reward_terms() if name == "reward" else ""
    parts = "".join(
        f"- `{part}`: {_escaped(field_doc(inner).meaning)} Default: {_term_default(inner)}.\n"
        for part, inner in parameters_of(field.annotation).items()
    )
    listed = f"\n{parts}" if parts else ""
    return f"### `{name}`\n\n{_escaped(meaning)} {facts}.\n{listed}{terms}"


def _reward_terms() -> str:
    rows = [
        f"| `{name}` | {_escaped(field_doc(field).meaning)} | {_term_type(name, field)} | {_term_default(field)} |"
        for name, field in RewardTermConfig.model_fields.items()
    ]
    return "\n".join(["", TERM + "\n".join(rows), ""])


def _term_type(name: str, field: FieldInfo) -> str:
    return "names and values" if name == "settings" else _escaped(accepts(field))


def _term_default(field: FieldInfo) -> str:
    return "–" if field.is_required() else f"`{written(field.default)}`"


def _works() -> str:
    text = " ".join(field_doc(field).meaning for _, field in all_fields())
    cited = cited_works(text)
    rows = [f"| {name} | {_escaped(work)} |" for name, work in SOURCES.items() if name in cited]
    return "\n".join(["## Works", "", "| short name | work |", "|---|---|", *rows, ""])


def _listed(items: Iterator[str]) -> str:
    return ", ".join(items)


def _escaped(text: str) -> str:
    """The text with Markdown's special characters escaped, except inside backticks."""
    parts = text.split("`")
    for index in range(0, len(parts), 2):
        for sign in "*|[]":
            parts[index] = parts[index].replace(sign, f"\\{sign}")
        # Python-Markdown knows no backslash before an angle bracket.
        parts[index] = parts[index].replace("<", "&lt;").replace(">", "&gt;")
    return "`".join(parts)

"""Generates the page about other libraries: its text, with the tables of `kedge_base.libraries`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from kedge.config.explain.describe import find_field, written
from kedge.config.libraries import lead_of, without_links
from kedge_base.libraries import DEFAULTS, LIBRARIES, OTHER_UNIT

TEXT = Path(__file__).with_name("other-libraries.md")
FROM_TRL = Path(__file__).with_name("from-trl.md")
CALLS = ("step", "generate", "log_stats", "LengthSampler", "create_reference_model")
"""Of the trainer before 0.12, what has no default but is in every script."""


def libraries_page() -> str:
    """docs/other-libraries.md."""
    text = TEXT.read_text(encoding="utf-8")
    for title, rows in LIBRARIES["TRL"].items():
        text = text.replace(f"<!-- table: {title} -->", _counterparts("TRL", rows))
    for library in ("OpenRLHF", "verl", "verl-agent", "AgileRL"):
        parts = [
            f"### {library}: {title.lower()}\n\n{_counterparts(library, rows)}"
            for title, rows in LIBRARIES[library].items()
            if title
        ]
        text = text.replace(f"<!-- tables: {library} -->", "\n\n".join(parts))
    return text


def from_trl_page() -> str:
    """docs/from-trl.md: the arguments of both of TRL's PPO trainers that have a default, with kedge's."""
    text = FROM_TRL.read_text(encoding="utf-8")
    old, new = DEFAULTS["TRL", "ppo before 0.12"], DEFAULTS["TRL", "ppo"]
    changed = {name: value for name, value in old.items() if new.get(name) != value}
    for title, defaults in (("ppo", new), ("ppo before 0.12", changed)):
        rows = list[tuple[str, ...]]()
        for table, counterparts in LIBRARIES["TRL"].items():
            for names, here in counterparts if table else ():
                known = [name for name in names.split() if name in defaults]
                is_of_trainer = table == "PPOTrainer before 0.12" and title != "ppo" and names.split()[0] in CALLS
                if known or is_of_trainer:
                    values = ", ".join(defaults[name] for name in known).replace("null", "–") or "–"
                    rows.append((_names(known or [names.split()[0]]), values, _shortened(here), _default(here)))
        text = text.replace(f"<!-- arguments: {title} -->", _table(("TRL", "default", "kedge", "default"), rows))
    return text


def _shortened(here: str) -> str:
    """A counterpart without defaults, which have columns of their own, and without those of other stages."""
    own = r"\. Default [^;|]*; TRL: [\d.e-]+|[;,]? ?same default, [\d.]+"
    stages = r"[;.] [iI]n sft `[^`]*`(, in reward `[^`]*`)?"
    return without_links(re.sub(f"{own}|{stages}", "", here))


def _default(here: str) -> str:
    """The default of the field that a counterpart starts with, if the argument has its unit."""
    found = find_field(lead_of(here)[0])
    is_same = not lead_of(here)[1] and not OTHER_UNIT.search(here) and "divide" not in here
    return written(found.default) if found is not None and is_same and found.default not in (None, [], ()) else "–"


def _counterparts(library: str, rows: Sequence[tuple[str, str]]) -> str:
    """The table; arguments with the same counterpart share a row, where the first of them is."""
    sharing: dict[str, list[str]] = {}
    for names, here in rows:
        sharing.setdefault(here, []).extend(names.split())
    return _table((library, "kedge"), [(_names(names), here) for here, names in sharing.items()])


def _names(names: Iterable[str]) -> str:
    # Dotted names are not in backticks, which a test would take for fields of kedge.
    return ", ".join(f"<code>{name}</code>" if "." in name else f"`{name}`" for name in names)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(heads)}", *lines[1:]])

"""Counterparts of other libraries' arguments: the library, and the field in kedge."""

import re
from collections.abc import Iterable, Iterator

from kedge_base.libraries import LIBRARIES


def foreign_names() -> Iterator[tuple[str, str, str]]:
    """Every argument of every library: its name, the library, and the counterpart as Markdown."""
    for library, tables in LIBRARIES.items():
        for title, rows in tables.items():
            for names, here in rows:
                for name in names.split():
                    yield name, library, here if title else f"none: {here}"


def foreign_answer(name: str, stage: str | None = None) -> str | None:
    """Describe an argument of another library, or return None: `eps_clip is OpenRLHF's name; here it is
    ppo.clip_range`.

    A dotted name is also found by its last parts (`clip_ratio`, `actor.clip_ratio`), or by the section that it is in
    (`actor.fsdp_config.param_offload`); dashes count as underscores, and Hydra's `+` is ignored. With a stage, the
    counterpart is that of the stage, if the table names one.
    """
    wanted = name.strip().lstrip("-+").replace("-", "_")
    entries = list(foreign_names())
    found = [entry for entry in entries if entry[0] == wanted or entry[0].endswith(f".{wanted}")]
    section = wanted
    while not found and "." in section:
        section = section.rpartition(".")[0]
        found = [entry for entry in entries if entry[0] in (section, f"{section}.*") and "." in entry[0]]
    answers: dict[str, list[tuple[str, str, str]]] = {}
    for entry in found:
        answers.setdefault(_lead(entry[2]), []).append(entry)
    if len(answers) > 1:
        said = (f"{lead} ({_owners(same, full=True)})" for lead, same in answers.items())
        return f"{wanted} is a name of other libraries; here it is {'; '.join(said)}"
    for same in answers.values():
        return f"{wanted} is {_owners(same)} name; {_plain(same[0][2], stage)}"
    return None


def _owners(entries: Iterable[tuple[str, str, str]], *, full: bool = False) -> str:
    """The libraries as possessives, without repetition: `TRL's and verl's`; with `full`, also their arguments."""
    owners = dict.fromkeys(f"{library}'s{f' {name}' if full else ''}" for name, library, _ in entries)
    *first, last = owners
    return ", ".join(owners) if full or not first else f"{', '.join(first)} and {last}"


def _lead(here: str) -> str:
    """The field at the start of a counterpart, or the whole text."""
    field = re.match(r"`([^`]+)`", here)
    return field[1] if field else "nothing" if here.startswith("none") else without_links(here)


def _plain(here: str, stage: str | None) -> str:
    """The counterpart as text without Markdown: `here it is ppo.clip_range`."""
    if stage and (own := re.search(rf"\bin {stage} (`[^`]+`)", here, re.IGNORECASE)):
        here = own[1]
    text = without_links(here)
    lead = "here it is " if text.startswith("`") else "here there is " if text.startswith("none") else "here: "
    return lead + text.replace("`", "")


def lead_of(here: str) -> tuple[str, bool]:
    """The field that a counterpart starts with, and whether one of its values is named; "" if it starts otherwise."""
    found = re.match(r"`([a-z_.]+)(=?)", here)
    return (found[1], bool(found[2])) if found else ("", False)


def without_links(here: str) -> str:
    """The counterpart without references to pages."""
    return re.sub(r"[,;.:]? [sS]ee \[[^\]]*\]\([^)]*\)", "", here)

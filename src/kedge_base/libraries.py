"""Counterparts of other libraries' arguments among kedge's fields: a table for the configuration and for the doctor."""

from __future__ import annotations

from pathlib import Path

from kedge_base.texts import read_table

LIBRARIES: dict[str, dict[str, list[tuple[str, str]]]] = {}
for library, title, names, here in read_table(Path(__file__).with_suffix(".tsv")):
    LIBRARIES.setdefault(library, {}).setdefault(title, []).append((names, here))
"""By library and table: arguments as the library spells them, separated by spaces, and their counterpart as Markdown.

A counterpart that starts with a field in backticks is the answer; "none" means no counterpart. The table without a
title lists arguments without a counterpart, by reason.
"""

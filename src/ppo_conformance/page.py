"""Writes the page of results: a table of libraries and checks, and what differs, from reports of `run --json`."""

from __future__ import annotations

import argparse
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ppo_conformance.protocol import UserError

SHOWN = ("passed", "deviates", "error")
MOST = 4
"""Cases to name for a note."""


def main(options: argparse.Namespace) -> int:
    """Run `ppo-conformance page`."""
    reports = [_read(path) for path in options.reports]
    print(page(reports, _read(options.notes) if options.notes else {}))
    return 0


def page(reports: list[dict[str, Any]], notes: dict[str, list[dict[str, Any]]]) -> str:
    """The table, the libraries with their profiles, and what differs, as Markdown."""
    names = [f"{report['adapter']} {report['version']}" for report in reports]
    ids = sorted({each["check"] for report in reports for each in report["results"]})
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(_cell(report, name) for report in reports)} |" for name in ids]
    lines += ["", "Profiles:", ""]
    for name, report in zip(names, reports, strict=True):
        chosen = ", ".join(f"{choice}: {value}" for choice, value in report["profile"].items())
        lines.append(f"- **{name}**, {report['seconds']:.0f} s: {chosen}")
    lines += ["", "What differs:", ""]
    for report in reports:
        lines += _differences(report, notes.get(report["adapter"], []))
    return "\n".join(lines)


def _cell(report: dict[str, Any], check: str) -> str:
    """The number of cases that passed of those that are offered."""
    statuses = [each["status"] for each in report["results"] if each["check"] == check]
    offered = [status for status in statuses if status in SHOWN]
    passed = offered.count("passed")
    return "–" if not offered else str(passed) if passed == len(offered) else f"**{passed} of {len(offered)}**"


def _differences(report: dict[str, Any], notes: list[dict[str, Any]]) -> list[str]:
    """A paragraph per note with the line that repeats it; then the message of each result without a note."""
    left = {f"{each['check']}:{each['case']}": each for each in report["results"] if each["status"] in SHOWN[1:]}
    shown: list[tuple[Any, ...]] = []
    for note in notes:
        found = {name: each for name, each in left.items() if any(fnmatchcase(name, p) for p in note["checks"])}
        if found:
            left = {name: each for name, each in left.items() if name not in found}
            cases = ", ".join([*found][:MOST]) + (f", … {len(found)} in all" if len(found) > MOST else "")
            shown.append((f"{note['text']} (`{cases}`)", *found.values()))
    shown += [(each["message"], each) for each in left.values()]
    return [f"- **{report['adapter']}**: {text}\n  `{first['reproduce']}`" for text, first, *_ in shown]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error

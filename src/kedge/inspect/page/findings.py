"""The doctor's findings on all runs of a page, grouped by what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kedge.inspect.page.wording import typographic

__all__ = ["grouped_findings"]

SEVERITIES = ("serious", "warning", "note")
TEXTS = ("seen", "means", "try")


def grouped_findings(findings: Sequence[Sequence[Mapping[str, str]] | None]) -> list[dict[str, Any]]:
    """The findings as groups, most severe first.

    Findings with the same field to change, of the same rule, or on the same figures are one group: symptoms of one
    cause, or one problem that several runs have.

    Args:
        findings: Those of each run, or None for a run that was not diagnosed. A finding may name its `field`.

    Returns:
        Groups with the `severity` of their worst finding and their `findings`, the worst first, each with the index of
        its `run`.
    """
    groups: list[list[dict[str, Any]]] = []
    keys: list[set[str]] = []
    for run, found in enumerate(findings):
        for finding in found or ():
            texts = {name: typographic(finding.get(name, "")) for name in TEXTS}
            shown = {"run": run, "rule": finding["rule"], "severity": finding["severity"], **texts}
            own = {
                finding["rule"],
                finding.get("field") or finding["rule"],
                f"{run}: {finding['seen'].partition(';')[0]}",
            }
            place = next((place for place, known in enumerate(keys) if known & own), len(groups))
            if place == len(groups):
                groups.append([])
                keys.append(set())
            groups[place].append(shown)
            keys[place] |= own
    ordered = sorted((sorted(group, key=_rank) for group in groups), key=lambda group: _rank(group[0]))
    return [{"severity": group[0]["severity"], "findings": group} for group in ordered]


def _rank(finding: Mapping[str, Any]) -> int:
    severity = finding["severity"]
    return SEVERITIES.index(severity) if severity in SEVERITIES else len(SEVERITIES)

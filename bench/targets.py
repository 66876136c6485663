"""The benchmark's targets, and whether they are reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Literal

from bench.cases import ALIKE, DEFAULT, PEER, SFT, SHARED, Results
from bench.figures import growths, ratios
from bench.systems import Measurement
from bench.tables import MISSING, PERCENT, Table, in_unit, with_spread


@dataclass(frozen=True)
class Target:
    """A figure with a required value.

    Attributes:
        figure: Its description.
        peer: The system that it is compared with.
        better: Whether more or less is better.
        required: The required minimum or maximum.
        aim: The desired value.
        unit: Unit of the values.
        case: The case it is measured in.
        rounds: Computes its value in each round from the measurements of the case.
    """

    figure: str
    peer: str
    better: Literal["more", "less"]
    required: float
    aim: float
    unit: str
    case: str
    rounds: Callable[[dict[str, list[Measurement]]], list[float]]

    def row(self, results: Results) -> list[str]:
        """Its row of the table, with dashes if it was not measured."""
        sign = "≥" if self.better == "more" else "≤"
        cells = [self.figure, self.peer, f"{sign} {in_unit(self.required, self.unit)}", in_unit(self.aim, self.unit)]
        if self.case not in results:
            return [*cells, MISSING, MISSING]
        values = self.rounds(results[self.case])
        return [*cells, with_spread(values, self.unit), self._verdict(median(values))]

    def _verdict(self, value: float) -> str:
        reached = [value >= goal if self.better == "more" else value <= goal for goal in (self.aim, self.required)]
        return "aim" if reached[0] else "required" if reached[1] else "missed"


TARGETS = [
    Target(
        "variable lengths, like for like: times faster", PEER, "more", 2.0, 2.3, "×", "variable",
        lambda of: ratios(of[PEER], of[ALIKE], "seconds"),
    ),
    Target(
        "variable lengths, default: times faster", PEER, "more", 5.0, 7.0, "×", "variable",
        lambda of: ratios(of[PEER], of[DEFAULT], "seconds"),
    ),
    Target(
        "full lengths, like for like: times faster", PEER, "more", 1.1, 1.2, "×", "full",
        lambda of: ratios(of[PEER], of[ALIKE], "seconds"),
    ),
    Target(
        "variable lengths, default: peak memory", PEER, "less", 0.5, 0.35, "×", "variable",
        lambda of: ratios(of[DEFAULT], of[PEER], "peak_memory"),
    ),
    Target(
        "full lengths, shared trunk, fp32: an update", "FLOP limit 5.0", "less", 5.6, 5.2, " SFT steps", "full",
        lambda of: ratios(of[SHARED], of[SFT], "seconds"),
    ),
    Target(
        "cost of a real token with padding, the worst share", "flat", "less", 0.15, 0.05, PERCENT, "padding",
        lambda of: max((growths(of["0 %"], of[share]) for share in of if share != "0 %"), key=median),
    ),
    Target(
        "start of `kedge ppo` to its first update", MISSING, "less", 10.0, 6.0, " s", "variable",
        lambda of: [run.first_update for run in of[DEFAULT]],
    ),
]  # fmt: skip


def target_table(results: Results) -> Table:
    """The table of required, desired and measured values."""
    header = ["figure", "against", "required", "aim", "measured", "reached"]
    return Table("Targets", header, [target.row(results) for target in TARGETS])

"""The tables of the comparisons, of the scaling cases and of the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.cases import ALIKE, DEFAULT, PADDED_WIDTH, PEER, SFT, SFT_BF16, SHARED, VOCABULARIES, Case
from bench.figures import flop_limit, growths, ratios, seconds_per_token, spread
from bench.processes import BenchError
from bench.systems import PHASES, Job, Measurement

MISSING = "–"
PERCENT = " %"
GIB = 2**30
GPU_HEADER = ["system", "s per update", "real tokens/s", "SFT steps", "share of peak FLOP/s", "peak GiB"]


@dataclass(frozen=True)
class Table:
    """A title, a header and rows of text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The table as Markdown, with aligned columns so that it is readable in a terminal too."""
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        lines = [self.header, ["-" * max(3, width) for width in widths], *self.rows]
        return "\n".join(
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
            for line in lines
        )


def in_unit(value: float, unit: str) -> str:
    """A number with its unit; with ` %` the number is a share and is shown with its sign."""
    return _number(value, unit) + unit


def _number(value: float, unit: str) -> str:
    return f"{100 * value:+.0f}" if unit == PERCENT else f"{value:.2f}"


def with_spread(values: Sequence[float], unit: str) -> str:
    """The median, with the lowest and highest in parentheses if there is more than one round."""
    middle, low, high = spread(values)
    if len(values) == 1:
        return in_unit(middle, unit)
    return f"{in_unit(middle, unit)} ({_number(low, unit)} to {_number(high, unit)})"


def comparison_table(title: str, measured: dict[str, list[Measurement]]) -> Table:
    """Seconds per update, its phases, tokens per second and memory of each system; without the SFT steps."""
    header = ["system", "s per update", "times faster", *PHASES, "real tokens/s", "peak GiB"]
    rows = []
    for name, runs in measured.items():
        if name.startswith("SFT"):
            continue
        parts = [f"{median(run.phases[phase] for run in runs):.2f}" for phase in PHASES]
        faster = MISSING if name == PEER else with_spread(ratios(measured[PEER], runs, "seconds"), "×")
        speed = f"{median(1 / seconds_per_token(run) for run in runs):,.0f}"
        rows.append([name, _median(runs, "seconds"), faster, *parts, speed, _median(runs, "peak_memory")])
    return Table(title, header, rows)


def sft_table(measured: dict[str, list[Measurement]]) -> Table:
    """Cost of an update in SFT steps, and the share of it that the FLOP limit accounts for; fp32 runs only."""
    rows = []
    for name, separate in ((PEER, True), (ALIKE, True), (SHARED, False)):
        steps = ratios(measured[name], measured[SFT], "seconds")
        limit = flop_limit(num_epochs=4, separate_critic=separate)
        share = f"{100 * limit / median(steps):.0f} %"
        rows.append([name, with_spread(steps, ""), f"{limit:.1f}", share])
    title = f"An update in SFT steps (one takes {_median(measured[SFT], 'seconds')} s)"
    return Table(title, ["system", "SFT steps", "FLOP limit", "share of the limit reached"], rows)


def family_table(title: str, measured: dict[str, list[Measurement]]) -> Table:
    """Cost of an update of each algorithm in SFT steps, measured and counted."""
    rows = []
    for name, runs in measured.items():
        if name == SFT:
            continue
        steps = ratios(runs, measured[SFT], "seconds")
        limit = median(run.flop_limit for run in runs)
        share = f"{100 * limit / median(steps):.0f} %"
        cells = [name, with_spread(steps, ""), f"{limit:.2f}", share]
        rows.append([*cells, _median(runs, "seconds"), _median(runs, "peak_memory")])
    header = ["algorithm", "SFT steps", "FLOP limit", "share of the limit reached", "s per update", "peak GiB"]
    return Table(title, header, rows)


def growth_table(title: str, case: Case, measured: dict[str, list[Measurement]]) -> Table:
    """Cost of an update, and per real token, as one quantity grows; the first job is the baseline."""
    header = [
        case.name,
        "real tokens",
        "padding avoided",
        "s per update",
        "ms per real token",
        "against the first",
        "peak GiB",
    ]
    first = next(iter(measured.values()))
    rows = []
    for name, runs in measured.items():
        tokens = median(run.num_tokens for run in runs)
        rows.append([
            name,
            f"{tokens:,.0f}",
            f"{100 * padding_share(case.jobs[name], tokens):.0f} %",
            _median(runs, "seconds"),
            f"{1000 * median(map(seconds_per_token, runs)):.3f}",
            MISSING if runs is first else with_spread(growths(first, runs), PERCENT),
            _median(runs, "peak_memory"),
        ])  # fmt: skip
    return Table(title, header, rows)


def padding_share(job: Job, num_tokens: float) -> float:
    """The share of a rectangle [batch, longest prompt + cap] that an update's real tokens leave empty."""
    return 1 - num_tokens / (job.batch * (job.workload.max_prompt + job.workload.max_response))


def vocabulary_table(title: str, measured: dict[str, list[Measurement]]) -> Table:
    """Peak memory at a small and a large batch, and the size of one tensor with all logits of the difference."""
    sizes = sorted({size for size, _ in VOCABULARIES})
    batches = sorted({batch for _, batch in VOCABULARIES})
    rows = []
    for size in sizes:
        small, large = (median(run.peak_memory for run in measured[f"{size} × {batch}"]) for batch in batches)
        logits = (batches[1] - batches[0]) * PADDED_WIDTH * size * 4 / GIB
        rows.append([f"{size:,}", f"{small:.2f}", f"{large:.2f}", f"{large - small:.2f}", f"{logits:.2f}"])
    header = ["vocabulary", *(f"peak GiB, batch {batch}" for batch in batches), "more", "one fp32 tensor of the logits"]
    return Table(title, header, rows)


def gpu_table(measured: dict[str, list[Measurement]], card: dict[str, Any]) -> Table:
    """Speed, cost in SFT steps, share of the GPU's own rate and memory of each system on a GPU.

    An SFT step takes 6 FLOPs per parameter and token; an update takes that times its limit in SFT steps.
    """
    rows = []
    for name, separate in ((PEER, True), (ALIKE, True), (DEFAULT, False)):
        runs = measured[name]
        limit = flop_limit(num_epochs=4, separate_critic=separate)
        tokens = median(run.num_tokens for run in runs)
        flops = 6 * card["parameters"] * tokens * limit
        share = median(flops / run.seconds / card["flops"] for run in runs)
        speed = f"{median(1 / seconds_per_token(run) for run in runs):,.0f}"
        steps = with_spread(ratios(runs, measured[SFT_BF16], "seconds"), "")
        rows.append(
            [name, _median(runs, "seconds"), speed, steps, f"{100 * share:.0f} %", _median(runs, "peak_memory")]
        )
    return Table(f"On {card['card']}", GPU_HEADER, rows)


def _median(runs: Sequence[Measurement], figure: str) -> str:
    return f"{median(getattr(run, figure) for run in runs):.2f}"


def renewed(page: str, name: str, block: str) -> str:
    """A page with the block between the markers `<!-- NAME:begin -->` and `<!-- NAME:end -->` replaced.

    Raises:
        BenchError: The page has no such markers.
    """
    marks = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    before, begin, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise BenchError(f"the page lacks the markers {marks[0].strip()} and {marks[1]}")
    return f"{before}{begin}{block}\n{end}{after}"

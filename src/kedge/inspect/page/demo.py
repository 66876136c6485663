"""The demo's summary in a report: the gold judge's headlines and its curve over training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kedge.inspect.page import FrontierPoint, Headline

__all__ = ["demo_frontier", "demo_headlines"]

JUDGE = "gold"
INTERVALS = {
    "win_rate_over_sft": "PPO's win rate over SFT",
    "win_rate_over_references": "PPO's win rate over the references",
}
WRITERS = {"sft": "Gold quality of SFT", "ppo": "Gold quality of PPO", "references": "Gold quality of the references"}


def demo_frontier(summary: Mapping[str, Any], run: str) -> list[FrontierPoint]:
    """The gold judge's values along a run; empty for other chains than the demo.

    Args:
        summary: The chain's `summary.json`.
        run: Name of the run's folder.
    """
    return [
        FrontierPoint(
            update=each["update"],
            kl=each["kl"],
            proxy=each["proxy"],
            judges={JUDGE: each["gold"]["value"]},
            low={JUDGE: each["gold"]["low"]},
            high={JUDGE: each["gold"]["high"]},
        )
        for each in summary.get("curves", {}).get(run, ())
    ]


def demo_headlines(summary: Mapping[str, Any]) -> list[Headline]:
    """The demo's results."""
    rates = [Headline(label, **summary[name]) for name, label in INTERVALS.items() if name in summary]
    quality = summary.get("gold_quality", {})
    return [*rates, *(Headline(label, quality[name]) for name, label in WRITERS.items() if name in quality)]

"""The demo's summary as a report shows it: what the gold judge said, of the end and of the way there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kedge.inspect.page import Checkpoint, Headline

__all__ = ["demo_checkpoints", "demo_headlines"]

JUDGE = "gold"
INTERVALS = {
    "win_rate_over_sft": "PPO's win rate over SFT",
    "win_rate_over_references": "PPO's win rate over the references",
}
WRITERS = {"sft": "Gold quality of SFT", "ppo": "Gold quality of PPO", "references": "Gold quality of the references"}


def demo_checkpoints(summary: Mapping[str, Any], run: str) -> list[Checkpoint]:
    """What the judge said of a run's policy on its way.

    Args:
        summary: The demo's `summary.json`, or another chain's, which has nothing of this kind.
        run: Name of the run's folder.
    """
    return [
        Checkpoint(
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
    """How the demo ended, in figures."""
    rates = [Headline(label, **summary[name]) for name, label in INTERVALS.items() if name in summary]
    quality = summary.get("gold_quality", {})
    return [*rates, *(Headline(label, quality[name]) for name, label in WRITERS.items() if name in quality)]

"""Which of a run's metrics the terminal view shows, and what it calls them."""

from __future__ import annotations

from collections.abc import Sequence

from kedge.inspect.record import RunRecord
from kedge.texts import printable

__all__ = ["shown_figures"]

PPO = {
    "score": "reward/score_mean",
    "score less KL cost": "reward/total",
    "KL to the reference": "objective/kl",
    "entropy": "policy/entropy",
    "clip fraction": "policy/clip_fraction",
    "approx. KL": "policy/approx_kl",
    "largest ratio": "policy/ratio_max",
    "gradient norm": "policy/grad_norm",
    "explained variance": "value/explained_variance",
    "value loss": "value/loss",
    "response length": "response/length",
    "EOS rate": "response/eos_rate",
    "repetition": "response/repetition",
    "seconds per update": "time/update",
    "tokens per second": "tokens_per_second",
}
SUPERVISED = {
    "loss": "loss",
    "held-out loss": "eval/loss",
    "accuracy": "accuracy",
    "held-out accuracy": "eval/accuracy",
    "token accuracy": "token_accuracy",
    "held-out tokens": "eval/token_accuracy",
    "gradient norm": "grad_norm",
    "learning rate": "learning_rate",
    "seconds per step": "time/update",
    "tokens per second": "tokens_per_second",
}
MOST_TERMS = 4
LONGEST_LABEL = 18


def shown_figures(record: RunRecord) -> list[tuple[str, Sequence[float]]]:
    """Labels with the course of each metric that the run has; where scores have several terms, each of them."""
    names = dict(SUPERVISED)
    if record.stage == "ppo":
        known = dict.fromkeys(name for row in record.metrics[-1:] for name in row if name.startswith("score/"))
        terms = list(known)[:MOST_TERMS] if len(known) > 1 else []
        first, *others = PPO.items()
        names = dict([first, *((_shortened(term.removeprefix("score/")), term) for term in terms), *others])
    courses = ((label, record.series(name)[1]) for label, name in names.items())
    return [(label, course) for label, course in courses if course]


def _shortened(name: str) -> str:
    text = printable(name)
    return text if len(text) <= LONGEST_LABEL else f"…{text[1 - LONGEST_LABEL :]}"

"""The metrics of the terminal view, with their labels."""

from __future__ import annotations

from collections.abc import Sequence

from kedge.inspect.record import RunRecord
from kedge.inspect.resolved import KL_COSTS, charges_kl
from kedge.system.texts import printable

__all__ = ["labeled_series"]

PPO = {
    "score": "reward/score_mean",
    "score less KL cost": "reward/total",
    "held-out score": "eval/score",
    "held-out win rate": "eval/win_rate",
    "KL to the reference": "objective/kl",
    "entropy": "policy/entropy",
    "clip fraction": "policy/clip_fraction",
    "approx. KL": "policy/approx_kl",
    "largest ratio": "policy/ratio_max",
    "gradient norm": "policy/grad_norm",
    "explained variance": "value/explained_variance",
    "critic: pairs": "critic/pairs_across",
    "pairs, same prompt": "critic/pairs_within",
    "value loss": "value/loss",
    "constant groups": "group/constant",
    "response length": "response/length",
    "EOS rate": "response/eos_rate",
    "repetition": "response/repetition",
    "seconds per update": "time/update",
    "tokens per second": "tokens_per_second",
}
CONTROL = {
    "return": "episode/return_mean",
    "evaluated return": "eval/return_mean",
    "episode length": "episode/length_mean",
    "entropy": "policy/entropy",
    "clip fraction": "policy/clip_fraction",
    "approx. KL": "policy/approx_kl",
    "KL of the update": "policy/distance_moved",
    "share of the step": "trust_region/step",
    "gradient norm": "policy/grad_norm",
    "explained variance": "value/explained_variance",
    "value loss": "value/loss",
    "learning rate": "policy/learning_rate",
    "seconds per update": "time/update",
    "steps per second": "tokens_per_second",
}
SUPERVISED = {
    "loss": "loss",
    "held-out loss": "eval/loss",
    "accuracy": "accuracy",
    "held-out accuracy": "eval/accuracy",
    "explained variance": "explained_variance",
    "held-out explained": "eval/explained_variance",
    "token accuracy": "token_accuracy",
    "held-out tokens": "eval/token_accuracy",
    "gradient norm": "grad_norm",
    "learning rate": "learning_rate",
    "seconds per step": "time/update",
    "tokens per second": "tokens_per_second",
}
MOST_TERMS = 4
LONGEST_LABEL = 18


def labeled_series(record: RunRecord) -> list[tuple[str, Sequence[float]]]:
    """Label and values of each metric that the run has; with several reward terms, also those of each term."""
    names = dict(CONTROL if record.stage == "control" else SUPERVISED)
    if record.stage == "ppo":
        known = dict.fromkeys(name for row in record.metrics[-1:] for name in row if name.startswith("score/"))
        terms = list(known)[:MOST_TERMS] if len(known) > 1 else []
        first, *others = PPO.items()
        names = dict([first, *((_shortened(term.removeprefix("score/")), term) for term in terms), *others])
    hidden = () if charges_kl(record) else KL_COSTS
    series = ((label, record.series(name)[1]) for label, name in names.items() if name not in hidden)
    return [(label, values) for label, values in series if values]


def _shortened(name: str) -> str:
    text = printable(name)
    return text if len(text) <= LONGEST_LABEL else f"…{text[1 - LONGEST_LABEL :]}"

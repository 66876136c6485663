"""Win rates controlled for length and markdown: what remains if both responses are equally long and formatted.

    P(win) = σ(β₀ + Σ β_m·tanh(d_m/s_m)),   controlled win rate = σ(β₀)

d_m: difference of the length, or of the number of headers, list items or bold passages; s_m: its root mean square. A
tie is half a win. The difficulty of a prompt, a term of AlpacaEval 2, is left out, as it is estimated from many models.
The standard error of β₀ is robust (Huber 1967; White 1982): ties vary less than wins and losses.

Sources: Dubois et al. 2024 (arXiv 2404.04475), for length; Chatbot Arena's style control, for markdown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from kedge_base.intervals import CONFIDENCE, Interval, share_interval, student_quantile
from kedge_people.agreement import Comparison
from kedge_people.fitting import fitted
from kedge_people.labels import Labels

COVARIATES = ("length", "headers", "lists", "bold")

CODE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
MARKDOWN = (
    re.compile(r"^ {0,3}#{1,6}[ \t]", re.MULTILINE),
    re.compile(r"^[ \t]*(?:[-*+]|\d{1,9}[.)])[ \t]", re.MULTILINE),
    re.compile(r"\*\*[^*\n]+\*\*|__[^_\n]+__"),
)
"""Headers, list items and bold passages, outside of code."""

ENOUGH_PAIRS = 30
ENOUGH_ON_EACH_SIDE = 5
"""Fewest pairs, and fewest wins, losses, and pairs in which a covariate does not favor one side, for a fit."""

RIDGE = np.array([0.01, 0.1, 0.1, 0.1, 0.1])
"""Precision of the normal priors of β₀ and of the other coefficients: separable pairs stay finite."""


@dataclass(frozen=True)
class Controlled:
    """A controlled win rate.

    Attributes:
        rate: The win rate if all differences were 0, with its interval over pairs.
        of: What it is controlled for. A covariate is left out if it is always on one side, as its effect and that of
            the quality cannot be told apart.
    """

    rate: Interval
    of: tuple[str, ...]


def style_of(text: str, length: float) -> tuple[float, ...]:
    """Return the covariates of a text of this length."""
    bare = CODE.sub("", text)
    return (length, *(float(len(pattern.findall(bare))) for pattern in MARKDOWN))


def controlled_win_rate(
    wins: Sequence[float | None],
    ours: Sequence[Sequence[float]] | np.ndarray,
    theirs: Sequence[Sequence[float]] | np.ndarray,
) -> Controlled | None:
    """Fit the model to pairs of responses.

    Args:
        wins: 1 if our response is better, ½ for a tie, 0 otherwise; pairs with None do not count.
        ours: The covariates of our responses; see `style_of`.
        theirs: Those of the other responses.

    Returns:
        None if there are too few pairs, wins or losses, or no covariate can be controlled for.
    """
    decided = [at for at, win in enumerate(wins) if win is not None]
    if len(decided) < ENOUGH_PAIRS:
        return None
    won = np.array([wins[at] for at in decided], dtype=float)
    apart = np.array([ours[at] for at in decided], dtype=float) - np.array([theirs[at] for at in decided])
    both_sides = np.minimum((apart <= 0).sum(0), (apart >= 0).sum(0)) >= ENOUGH_ON_EACH_SIDE
    kept = both_sides & (apart != 0).any(0)
    if min(won.sum(), (1 - won).sum()) < ENOUGH_ON_EACH_SIDE or not kept.any():
        return None
    scaled = np.tanh(apart[:, kept] / np.sqrt((apart[:, kept] ** 2).mean(0)))
    columns = torch.from_numpy(np.column_stack([np.ones(len(won)), scaled]))
    wanted = torch.from_numpy(won)
    ridge = torch.from_numpy(RIDGE[: columns.shape[1]])

    def loss(at: Tensor) -> Tensor:
        logits = columns @ at
        return (softplus(logits) - wanted * logits).sum() + (ridge * at**2).sum() / 2

    found, inverse = fitted(loss, torch.zeros_like(ridge))
    scores = columns.numpy() * (won - _sigmoid(columns.numpy() @ found))[:, None]
    free = len(won) - len(found)
    error = sqrt(((scores @ inverse[0]) ** 2).sum() * len(won) / free)
    reach = student_quantile(CONFIDENCE, free) * error
    rate = Interval(*(float(_sigmoid(found[0] + end)) for end in (0, -reach, reach)))
    return Controlled(rate, tuple(name for name, used in zip(COVARIATES, kept, strict=True) if used))


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return (1 + np.tanh(logits / 2)) / 2


@dataclass(frozen=True)
class WinRate:
    """Win rate of one model's responses over another's, in people's answers.

    Attributes:
        models: The model, and the other one.
        num_items: Items with responses of both.
        raw: Share of the items that the first wins; ties count half, and so do several people's answers together.
        controlled: The same, controlled for length in characters and for markdown; None if that is unknown.
    """

    models: tuple[str, str]
    num_items: int
    raw: Interval
    controlled: Controlled | None


def win_rates(labels: Labels, comparisons: Iterable[Comparison]) -> list[WinRate]:
    """Return the win rates of every two models."""
    found: dict[tuple[str, str], dict[str, list[list[float]]]] = {}
    for each in comparisons:
        name, *places = each.unit
        item = labels.items[name]
        one, other = sorted(places, key=lambda place: item.models[place])
        if item.models[one] != item.models[other]:
            win = (1 + (each.outcome if one == places[0] else -each.outcome)) / 2
            styles = [style_of(item.responses[at], len(item.responses[at])) for at in (one, other)]
            rows = found.setdefault((item.models[one], item.models[other]), {}).setdefault(name, [])
            rows.append([win, *styles[0], *styles[1]])
    return [_win_rate(models, np.array([np.mean(rows, 0) for rows in each.values()])) for models, each in found.items()]


def _win_rate(models: tuple[str, str], rows: np.ndarray) -> WinRate:
    won, *sides = np.split(rows, [1, 1 + len(COVARIATES)], 1)
    wins = won[:, 0].tolist()
    return WinRate(models, len(rows), share_interval(wins), controlled_win_rate(wins, *sides))

"""Sweeps layouts, and chooses the cheapest that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.cluster.cards import Card
from bench.cluster.update import UpdateTime, update_time
from bench.cluster.work import Layout, Workload

NUMBERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of cards that are tried if none is given."""

EIGHTHS = (1, 2, 3, 4, 5, 6, 7)
"""Shares of the cards that are given to servers, in eighths."""


@dataclass(frozen=True)
class Wish:
    """Fixed properties of a sweep's layouts; None leaves one open.

    Attributes:
        rollout_cards: Cards of the servers; 0 for turns on all cards.
        tensor_parallel: Cards of one server.
        staleness: 0 or 1.
    """

    rollout_cards: int | None = None
    tensor_parallel: int | None = None
    staleness: int | None = None


def layouts(card: Card, cards: int, responses: int, wish: Wish | None = None) -> list[Layout]:
    """Layouts of `cards` cards: in turns or apart, servers of 1 to 8 cards, synchronous or one step off."""
    wish = wish or Wish()
    found: list[Layout] = []
    for parallel in [wish.tensor_parallel] if wish.tensor_parallel else [1, 2, 4, 8]:
        if wish.staleness in (None, 0) and not wish.rollout_cards:
            found.append(Layout(card, cards, 0, parallel))
        for rollout in _shares(cards, parallel) if wish.rollout_cards is None else [wish.rollout_cards]:
            stale = (0, 1) if wish.staleness is None else (wish.staleness,)
            found += [Layout(card, cards, rollout, parallel, steps) for steps in stale if rollout]
    return [each for each in found if _is_possible(each, responses)]


def sweep(work: Workload, card: Card, numbers: Sequence[int], wish: Wish | None = None) -> list[UpdateTime]:
    """Every layout of every number of cards."""
    return [update_time(work, layout) for number in numbers for layout in layouts(card, number, work.responses, wish)]


def cheapest(updates: Sequence[UpdateTime]) -> UpdateTime | None:
    """The layout with the fewest card-seconds that fits; None if none fits.

    Within 1 %, synchronous comes before stale, in turns before apart, and small servers before large ones.
    """
    fitting = [each for each in updates if each.problem is None]
    if not fitting:
        return None
    least = min(each.card_seconds for each in fitting)
    close = [each for each in fitting if each.card_seconds <= 1.01 * least]
    return min(close, key=lambda each: (each.layout.staleness, each.layout.apart, each.layout.tensor_parallel,
                                        each.card_seconds))  # fmt: skip


def _shares(cards: int, parallel: int) -> list[int]:
    """Numbers of rollout cards: eighths of all cards, in whole servers."""
    return sorted({cards * share // 8 // parallel * parallel for share in EIGHTHS} - {0})


def _is_possible(layout: Layout, responses: int) -> bool:
    """True if servers are whole and within one machine, none is without work, and a card is left to train."""
    sampling = layout.sampling_cards
    parallel = layout.tensor_parallel
    whole = sampling % parallel == 0 and parallel <= min(sampling, layout.card.linked)
    return whole and layout.servers <= responses and layout.training_cards > 0

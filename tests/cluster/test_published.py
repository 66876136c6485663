"""The cost model beside published figures: every stated band holds, and is no wider than the figures need."""

from __future__ import annotations

import re

import pytest

from bench.cluster import CARDS, KINDS, Layout, Workload, band_of, checked_syncs, checked_updates, typical_shape
from bench.cluster.published import SYNC_KIND


@pytest.mark.parametrize("name", KINDS)
def test_every_published_update_is_within_its_band(name: str) -> None:
    kind = next(kind for key, kind in KINDS.items() if key == name)
    ratios = {row.name: row.seconds / seconds for row, seconds in checked_updates() if row.kind == name}
    assert {row: ratio for row, ratio in ratios.items() if not kind.low <= ratio <= kind.high} == {}
    assert min(ratios.values()) < 1.3 * kind.low
    assert max(ratios.values()) > kind.high / 1.3


def test_every_published_weight_sync_is_within_its_band() -> None:
    ratios = [row.seconds / seconds for row, seconds in checked_syncs()]
    assert SYNC_KIND.low <= min(ratios) < 1.3 * SYNC_KIND.low
    assert SYNC_KIND.high / 1.3 < max(ratios) <= SYNC_KIND.high


def test_the_table_names_its_sources_and_no_figure_twice() -> None:
    rows = [row for row, _ in checked_updates()]
    assert all(re.match(r"[\w-]+/[\w-]+ \S+", row.source) for row in rows)
    assert len({(row.name, row.layout.cards, row.layout.card.name) for row in rows}) == len(rows)
    seconds = {row.seconds for row in rows}
    # As published: NeMo-RL 0.4, OpenRLHF, AReaL (57.7 hours for 1,000 updates).
    assert {97.7, 74.6, 393, 215, 471.11, 608.93, 1526.4, 4488.53} <= seconds
    assert any(second == pytest.approx(207.72) for second in seconds)


@pytest.mark.parametrize(
    ("size", "card", "cards", "response", "known", "expected"),
    [
        (8e9, "H100", 32, 900, True, (0.8, 1.25)),
        (8e9, "H100", 32, 900, False, (0.4, 2.6)),
        (8e9, "H100", 512, 900, True, (0.4, 3.0)),
        (70e9, "H100", 64, 900, True, (0.4, 2.6)),
        (7e9, "MI300", 8, 130, True, (2.0, 3.0)),
        (70e9, "MI300", 64, 900, True, (0.4, 3.0)),
        (8e9, "GB200", 16, 900, True, (1.0, 1.4)),
    ],
)
def test_a_plan_gets_the_band_of_figures_like_it(
    size: float, card: str, cards: int, response: float, known: bool, expected: tuple[float, float]
) -> None:
    work = Workload(typical_shape(size), 1024, 160, 160, response, 4096)
    band = band_of(work, Layout(CARDS[card], cards), lengths_known=known)
    assert (band.low, band.high) == expected
    assert band.checks


def test_a_band_says_what_no_figure_had() -> None:
    work = Workload(typical_shape(8e9), 1024, 160, 160, 900, 4096, epochs=4, critic="separate")
    why = band_of(work, Layout(CARDS["H200"], 16), lengths_known=True).why
    assert why.endswith("; none of them runs on H200 or has 4 epochs or trains a critic of its own")

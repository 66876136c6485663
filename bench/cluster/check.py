"""The cost model beside the published figures, and the error band of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from bench.cluster.passes import sync_time
from bench.cluster.practice import Practice
from bench.cluster.published import KINDS, SYNCS, UPDATES, KindName, PublishedSync, PublishedUpdate
from bench.cluster.update import update_time
from bench.cluster.work import Layout, Workload

HOPPER = frozenset({"H100", "H800", "H200"})


@dataclass(frozen=True)
class Band:
    """Distance of published times from the model's, for updates like the planned one.

    Attributes:
        low: Smallest published time, in units of the model's.
        high: Largest published time, in units of the model's.
        why: Which published figures it is from.
        checks: Those figures, with the model's seconds.
    """

    low: float
    high: float
    why: str
    checks: tuple[tuple[PublishedUpdate, float], ...]


def checked_updates() -> list[tuple[PublishedUpdate, float]]:
    """Every published update, with the model's seconds."""
    return [(row, update_time(row.work, row.layout).seconds) for row in UPDATES]


def checked_syncs() -> list[tuple[PublishedSync, float]]:
    """Every published weight sync, with the model's seconds."""
    return [(row, sync_time(_sync_work(row), row.layout, Practice())) for row in SYNCS]


def band_of(work: Workload, layout: Layout, *, lengths_known: bool) -> Band:
    """The band of the published figures that are like the plan; of all of them where none is.

    Args:
        work: The planned update.
        layout: Its cards.
        lengths_known: Whether the longest lengths are given rather than assumed.
    """
    checks = checked_updates()
    for name in _like(work, layout, lengths_known):
        kind = KINDS[name]
        like = tuple(check for check in checks if check[0].kind == name)
        return Band(kind.low, kind.high, kind.about + _unlike(work, layout, [row for row, _ in like]), like)
    low = min(kind.low for kind in KINDS.values())
    high = max(kind.high for kind in KINDS.values())
    return Band(low, high, "all figures, since none is of an update like this one", tuple(checks))


def _like(work: Workload, layout: Layout, lengths_known: bool) -> list[KindName]:
    """The kind of published figures that covers the plan, as a list of none or one."""
    card = layout.card.name
    size = work.policy.parameters
    usual = 7e9 <= size <= 35e9 and work.response >= 500 and lengths_known
    if work.policy.is_mixture:
        return ["mixture"] if card in HOPPER and layout.cards <= 256 and lengths_known else []
    if card == "MI300":
        return ["mi300"] if 6e9 <= size <= 9e9 and layout.cards <= 8 and work.response <= 500 else []
    if usual and card in HOPPER and layout.cards <= 64:
        return ["dense-hopper"]
    if usual and card == "GB200" and layout.cards <= 32:
        return ["dense-gb200"]
    measured = card in HOPPER | {"H20", "A800", "A100"}
    return ["assumed"] if measured and 1e9 <= size <= 75e9 and layout.cards <= 192 else []


def _unlike(work: Workload, layout: Layout, rows: list[PublishedUpdate]) -> str:
    """Properties of the plan that no published figure has."""
    lacking = [] if layout.card.name in {row.layout.card.name for row in rows} else [f"runs on {layout.card.name}"]
    if layout.cards < min(row.layout.cards for row in rows):
        lacking.append(f"has as few as {layout.cards} cards")
    if work.epochs > max(row.work.epochs for row in rows):
        lacking.append(f"has {work.epochs} epochs")
    if work.critic == "separate" and not any(row.work.critic == "separate" for row in rows):
        lacking.append("trains a critic of its own")
    return f"; none of them {' or '.join(lacking)}" if lacking else ""


def _sync_work(row: PublishedSync) -> Workload:
    return Workload(row.policy, 1, 1, 1, 1, 1)

"""Memory limits on data sources, on Linux."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from kedge.data import sources
from kedge_base.errors import DataError

GIB = 2**30

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")


def blocks(count: int) -> Iterator[bytes]:
    """Memory that is allocated and never touched."""
    for _ in range(count):
        yield bytes(GIB // 16)


def test_only_rows_that_are_kept_count(monkeypatch):
    monkeypatch.setattr(sources, "free_memory", lambda: 2 * GIB)
    assert sum(1 for _ in sources.within_free_memory(blocks(200), "blocks")) == 200
    kept: list[bytes] = []
    with pytest.raises(DataError, match=r"^blocks: reading past row \d+ needs more than the 1\.80 GiB"):
        kept.extend(sources.within_free_memory(blocks(200), "blocks"))
    assert 16 <= len(kept) <= 64  # 28 fit, and what was free already in what the process holds

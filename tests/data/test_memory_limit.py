"""Memory limits on data sources, on Linux."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kedge.data import memory_limit
from kedge.errors import DataError

GIB = 2**30

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")


def test_allocations_over_the_limit_raise_and_the_limit_ends_with_the_block():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with memory_limit.memory_limit(memory_limit.own_memory() + GIB // 8):
        assert len(b"x" * 1_000_000) == 1_000_000
        with pytest.raises(MemoryError):
            bytes(16 * GIB)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_an_existing_lower_limit_is_kept():
    most = memory_limit.own_memory() + GIB // 8
    with memory_limit.memory_limit(most), memory_limit.memory_limit(most + 2**40), pytest.raises(MemoryError):
        bytes(16 * GIB)


def blocks(count: int) -> Iterator[bytes]:
    """Memory that is allocated and never touched."""
    for _ in range(count):
        yield bytes(GIB // 16)


def test_only_rows_that_are_kept_count(monkeypatch):
    monkeypatch.setattr(memory_limit, "free_memory", lambda: 2 * GIB)
    assert sum(1 for _ in memory_limit.within_free_memory(blocks(200), "blocks")) == 200
    kept: list[bytes] = []
    with pytest.raises(DataError, match=r"^blocks: reading past row \d+ needs more than the 1\.80 GiB"):
        kept.extend(memory_limit.within_free_memory(blocks(200), "blocks"))
    assert 16 <= len(kept) <= 64  # 28 fit, and what was free already in what the process holds


def test_a_container_may_have_less_than_the_machine(monkeypatch, tmp_path: Path):
    machine = memory_limit.free_memory()
    assert machine > 0
    for name, text in (("GROUP_LIMIT", "3000000\n"), ("GROUP_USE", "1000000\n")):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(memory_limit, name, tmp_path / name)
    assert memory_limit.free_memory() == 2_000_000
    (tmp_path / "GROUP_USE").write_text("4000000\n")
    assert memory_limit.free_memory() == 0
    (tmp_path / "GROUP_LIMIT").write_text("max\n")
    assert memory_limit.free_memory() > 2_000_000

"""What limits the process's memory and cores, on Linux."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kedge_base.machine import control_groups, memory
from kedge_base.machine.control_groups import available_cores
from kedge_base.machine.memory import (
    MemoryLimit,
    free_memory,
    held_memory,
    memory_limit,
    memory_limits,
    private_memory,
)

GIB = 2**30

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")


def test_allocations_over_the_limit_raise_and_the_limit_ends_with_the_block():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with memory_limit(private_memory() + GIB // 8):
        assert len(b"x" * 1_000_000) == 1_000_000
        with pytest.raises(MemoryError):
            bytes(16 * GIB)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_an_existing_lower_limit_is_kept():
    most = private_memory() + GIB // 8
    with memory_limit(most), memory_limit(most + 2**40), pytest.raises(MemoryError):
        bytes(16 * GIB)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine of 8 GB with 5 GB available; the fixture writes the groups of the process."""

    def write(groups: str) -> None:
        (tmp_path / "cgroup").write_text(groups)

    (tmp_path / "meminfo").write_text("MemTotal: 8000000 kB\nMemFree: 1 kB\nMemAvailable: 5000000 kB\nHugePages: 0\n")
    monkeypatch.setattr(memory, "MEMORY_INFO", tmp_path / "meminfo")
    monkeypatch.setattr(control_groups, "OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path / "groups")
    return write


def write_group(folder: Path, limit: str, used: int, reclaimable: int, *, version: int) -> None:
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {reclaimable}\nactive_file 9\n")


def test_the_machine_alone(files):
    files("0::/nowhere\n")
    assert free_memory() == 5_000_000 * 1024
    [only] = memory_limits()
    assert only == MemoryLimit("the machine", 8_000_000 * 1024, 3_000_000 * 1024)


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_and_the_ones_around_it(files, tmp_path: Path, version: int):
    files("0::/jobs/mine\n" if version == 2 else "9:cpu:/\n4:memory:/jobs/mine\n0::/\n")
    root = tmp_path / "groups" / ("" if version == 2 else "memory")
    write_group(root / "jobs" / "mine", "3000000", 1_500_000, 500_000, version=version)
    assert free_memory() == 2_000_000
    write_group(root / "jobs", "2500000", 2_400_000, 100_000, version=version)
    assert free_memory() == 200_000
    write_group(root / "jobs", "max" if version == 2 else str(2**63 - 4096), 2_400_000, 0, version=version)
    assert free_memory() == 2_000_000
    write_group(root / "jobs" / "mine", "1000000", 1_500_000, 0, version=version)
    assert free_memory() == 0


def test_a_container_that_sees_its_group_at_the_root(files, tmp_path: Path):
    files("0::/on/the/host/4f2a\n")
    write_group(tmp_path / "groups", "3000000", 1_000_000, 0, version=2)
    assert free_memory() == 2_000_000


@pytest.mark.parametrize(
    ("quota", "period", "expected"), [(150_000, 100_000, 1), (20_000, 100_000, 1), (6000, 2000, 3)]
)
@pytest.mark.parametrize("version", [1, 2])
def test_cores_are_those_of_the_tightest_quota_around(
    monkeypatch, files, tmp_path: Path, version, quota, period, expected
):
    """Three periods of processor time per period are three cores; less than one core counts as one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    files("0::/nowhere\n")
    assert available_cores() == 8
    files("0::/jobs/mine\n" if version == 2 else "9:memory:/jobs/mine\n4:cpu,cpuacct:/jobs/mine\n0::/\n")
    root = tmp_path / "groups" / ("" if version == 2 else "cpu")
    for folder, time in ((root / "jobs" / "mine", None), (root / "jobs", quota)):
        folder.mkdir(parents=True, exist_ok=True)
        if version == 2:
            (folder / "cpu.max").write_text(f"{'max' if time is None else time} {period}\n")
        else:
            (folder / "cpu.cfs_quota_us").write_text(f"{-1 if time is None else time}\n")
            (folder / "cpu.cfs_period_us").write_text(f"{period}\n")
    assert available_cores() == expected


def test_address_space_is_limited_by_ulimit():
    """Measured in a child, whose limit `resource` sets as `ulimit -v` does."""
    code = """
from kedge_base.machine.memory import tightest_limit
found = tightest_limit()
print(found.name, found.limit, found.used, sep=";")
"""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (GIB, GIB))

    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=limit, env=os.environ, check=True
    ).stdout
    name, most, used = output.strip().split(";")
    assert (name, int(most)) == ("ulimit -v", GIB)
    assert 2**20 < int(used) < GIB
    assert held_memory() > 2**20

"""The control groups of this process, through which containers limit it. Linux only.

Source: the kernel's cgroup-v2.rst, cgroup-v1/cpusets.rst and scheduler/sched-bwc.rst.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")

QUOTA_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
"""Files with a group's processor time and the period that it is for, in versions 2 and 1."""


def group_folders(controller: str) -> list[Path]:
    """The folders of a controller such as `memory` for this process, innermost first.

    Only folders that are visible inside the container are listed.

    Lines of /proc/self/cgroup: `0::/path` in version 2, `4:memory:/path` in version 1. Inside a container the path is
    often one of the host, and the container's own group is at the root of the mount.
    """
    folders: list[Path] = []
    with suppress(OSError):
        for line in OWN_GROUPS.read_text("utf-8", "replace").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                root = GROUPS / (controller if controllers else "")
                own = root / path.lstrip("/")
                folders += [each for each in (own, *own.parents) if each.is_relative_to(root)]
    return folders


def available_cores() -> int:
    """Number of cores this process may use: its CPU affinity, limited by the quotas of its control groups."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    for folder in group_folders("cpu"):
        for names in QUOTA_FILES:
            with suppress(OSError, ValueError):  # no such file; `max`
                quota, period = (int(part) for name in names for part in (folder / name).read_text("ascii").split())
                if quota > 0:  # -1: no limit
                    cores = min(cores, max(1, quota // period))
    return cores

"""Only one process trains in a run's folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kedge.errors import OutputError
from kedge.runs.claim import check_unclaimed, claimed

HOLD = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot lock a folder")
def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(OutputError, match="another process is training in"):
            check_unclaimed(tmp_path)
        other.kill()
    with claimed(tmp_path), pytest.raises(OutputError, match="another process"):
        check_unclaimed(tmp_path)
    check_unclaimed(tmp_path)
    check_unclaimed(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []

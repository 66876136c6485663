"""`kedge`, which writes how long its first rank waits for others: `python -m bench.timed_ranks FILE ppo …`.

What is counted are the operations of `kedge.ranks`: gradients, sampled rows, figures. Those of FSDP are not.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from pathlib import Path
from typing import Any

from kedge.cli import main
from kedge.ranks.ranks import Ranks

file = Path(sys.argv.pop(1))
finish = Ranks._finish
waited = 0.0


def timed(work: Any, tensor: Any) -> None:
    """The same, timed."""
    global waited
    started = time.perf_counter()
    finish(work, tensor)
    waited += time.perf_counter() - started


if os.environ.get("RANK", "0") == "0":
    Ranks._finish = staticmethod(timed)
    atexit.register(lambda: file.write_text(str(waited), encoding="utf-8"))
main()

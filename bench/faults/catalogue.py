"""All cases, by name."""

from __future__ import annotations

from typing import Final

from bench.faults.case import Case
from bench.faults.faulty import FAULTS
from bench.faults.healthy import HEALTHY

CASES: Final[dict[str, Case]] = {case.name: case for case in (*FAULTS, *HEALTHY)}

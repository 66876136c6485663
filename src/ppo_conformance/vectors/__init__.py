"""The vectors: cases with inputs, settings and what the oracle expects of them, as JSON by method of adapters."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@cache
def read(topic: str) -> dict[str, Any]:
    """Read the file of a topic, once."""
    return json.loads((FOLDER / f"{topic}.json").read_text("utf-8"))


def topics() -> list[str]:
    """Names of the files, without the schema."""
    return sorted(path.stem for path in FOLDER.glob("*.json") if path.stem != "schema")

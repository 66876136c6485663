"""The adapter that a run trains."""

from __future__ import annotations

from kedge.config import Config
from kedge.models import AdapterSettings

__all__ = ["adapter_of"]


def adapter_of(config: Config) -> AdapterSettings | None:
    """The adapter that a run trains; None if it trains all weights."""
    given = config.adapter
    if given.kind == "none":
        return None
    return AdapterSettings(given.kind, given.rank, given.alpha, given.target_modules, given.rslora)

"""The adapter that a run trains, and the bases that its models stand on."""

from __future__ import annotations

from kedge.config import Config
from kedge.models import AdapterSettings
from kedge.models.bases import Bases

__all__ = ["adapter_of", "bases_of"]


def adapter_of(config: Config) -> AdapterSettings | None:
    """The adapter that a run trains; None if it trains all weights."""
    given = config.adapter
    if given.kind == "none":
        return None
    return AdapterSettings(
        given.kind, given.rank, given.alpha, given.target_modules, given.rslora, tuple(given.modules_to_save)
    )


def bases_of(config: Config) -> Bases | None:
    """Where the models of a run share the weights of their bases; None if it trains all weights."""
    return None if config.adapter.kind == "none" else Bases(trust_remote_code=config.runtime.trust_remote_code)

"""The adapter that a run trains, and the bases that its models stand on."""

from __future__ import annotations

from kedge.config import Config
from kedge.models import AdapterSettings
from kedge.models.loading import Bases

__all__ = ["adapter_of", "bases_of", "rounds_bases"]


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
    if config.adapter.kind == "none":
        return None
    return Bases(trust_remote_code=config.runtime.trust_remote_code, on_host=rounds_bases(config))


def rounds_bases(config: Config) -> bool:
    """Whether the bases under a run's adapters are held in fewer bits, or with `auto` may be."""
    kind, dtype = config.adapter.kind, config.adapter.base_dtype
    return kind != "none" and dtype != "fp32" and not (kind == "dora" and dtype == "auto")

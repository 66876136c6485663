"""Holds the models that a run does not train in the configured number format."""

from __future__ import annotations

from collections.abc import Iterable

from kedge.config import Config
from kedge.models import LanguageModel, ScalarModel, hold_frozen
from kedge.runs.run import Run

__all__ = ["hold_models"]


def hold_models(models: Iterable[LanguageModel | ScalarModel], config: Config, run: Run) -> None:
    """Freeze models and hold them in `runtime.frozen_dtype`, in place.

    Args:
        models: They were checked, and nothing else shares their weights.
        config: The resolved configuration.
        run: Source of the precision.
    """
    for model in models:
        hold_frozen(model, config.runtime.frozen_dtype, run.precision)

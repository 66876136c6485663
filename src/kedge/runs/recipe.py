"""The recipe of a run: the part of its configuration that the model card shows."""

from __future__ import annotations

from kedge.config import Config
from kedge.config.loading.yaml_text import to_yaml
from kedge.models.origin import public_settings

NOT_SHOWN = ("out", "preset", "runtime", "checkpoint", "push")
"""Parts of the configuration that do not affect the result, or only describe the machine."""


def recipe_of(config: Config) -> str:
    """Format the settings that differ from kedge's defaults as YAML, without local paths."""
    changed = config.model_dump(mode="json", exclude_defaults=True, exclude=set(NOT_SHOWN))
    seed = {"runtime": {"seed": config.runtime.seed}}
    return to_yaml(public_settings({**changed, **seed}))

"""Settings of the Python API: `num_updates=3`, `"ppo.clip_range": 0.1` or `ppo={...}`."""

from collections.abc import Mapping
from typing import Any

from kedge.config.loading.load import resolve
from kedge.config.loading.names import full_name
from kedge.config.schema.root import Config
from kedge.stages.stage import find_stage

__all__ = ["config_from_settings"]


def config_from_settings(stage: str, *layers: Mapping[str, Any]) -> Config:
    """Resolve the configuration of a stage from keyword settings.

    Args:
        stage: sft, reward, critic, ppo, rlhf, generate or evaluate.
        layers: Settings, later ones over earlier ones: dotted names, sections as dicts, top-level fields (`preset`
            included), and bare names of fields, if only one of the sections that the stage reads has a field of that
            name.

    Raises:
        ConfigError: A name is unknown or ambiguous.
    """
    find_stage(stage)
    return resolve(
        [{full_name(name, stage, value=value): value for name, value in settings.items()} for settings in layers]
    )

"""Settings of the Python API: `num_updates=3`, `"ppo.clip_range": 0.1` or `ppo={...}`."""

from collections.abc import Mapping
from typing import Any

from kedge.config.explain.describe import all_fields, find_field, section_type, suggestion
from kedge.config.loading.load import resolve
from kedge.config.schema.root import Config
from kedge.config.stages import Stage, find_stage
from kedge.errors import ConfigError

__all__ = ["config_from_settings"]


def config_from_settings(stage: str, settings: Mapping[str, Any]) -> Config:
    """Resolve the configuration of a stage from keyword settings.

    Args:
        stage: sft, reward, ppo, rlhf, generate or evaluate.
        settings: Dotted names, sections as dicts, top-level fields (`preset` included), and bare names of fields, if
            only one of the sections that the stage reads has a field of that name.

    Raises:
        ConfigError: A name is unknown or ambiguous.
    """
    chosen = find_stage(stage)
    return resolve([{name if _is_full(name) else _full_name(name, chosen): value for name, value in settings.items()}])


def _is_full(name: str) -> bool:
    return "." in name or find_field(name) is not None or section_type(name) is not None


def _full_name(name: str, stage: Stage) -> str:
    """The dotted name of a bare one, from the first group of sections that has it."""
    for group in stage.sections:
        owners = [f"{section}.{name}" for section in group if find_field(f"{section}.{name}")]
        if len(owners) > 1:
            raise ConfigError(
                f"{name} is ambiguous: {' or '.join(owners)}; write one of them, e.g. **{{'{owners[0]}': …}}"
            )
        if owners:
            return owners[0]
    sections = {section for group in stage.sections for section in group}
    known = [dotted for dotted, _ in all_fields() if dotted.partition(".")[0] in sections or "." not in dotted]
    raise ConfigError(f"{name} is not a setting of {stage.name}{suggestion(name, known)}")

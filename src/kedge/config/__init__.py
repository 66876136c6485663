"""The typed configuration: fields, defaults with their sources, presets, loading and validation."""

from kedge.config.explain.describe import CHANGED_FIRST, field_advice, suggestion
from kedge.config.explain.explain import completions, describe_presets, explain
from kedge.config.explain.schedule import schedule_in_words
from kedge.config.loading.load import (
    changed_settings,
    changed_values,
    config_from_settings,
    differences,
    effective_settings,
    full_settings,
    load_config,
    preset_conflicts,
    resolved_yaml,
    with_values,
)
from kedge.config.loading.names import full_name, initial_critic
from kedge.config.loading.yaml_text import parse_value
from kedge.config.presets import LANGUAGE_PRESETS, PRESETS, advice_for, presets_of, stage_of
from kedge.config.schedules import config_at, mean_epochs, scheduled_values
from kedge.config.schema.data import DataConfig
from kedge.config.schema.field import Choice
from kedge.config.schema.ppo import PpoConfig
from kedge.config.schema.rollout import RolloutConfig
from kedge.config.schema.root import Config
from kedge.config.stages import best_metric, check_stage, evaluations_of, metric_in_chain

__all__ = [
    "CHANGED_FIRST",
    "LANGUAGE_PRESETS",
    "PRESETS",
    "Choice",
    "Config",
    "DataConfig",
    "PpoConfig",
    "RolloutConfig",
    "advice_for",
    "best_metric",
    "changed_settings",
    "changed_values",
    "check_stage",
    "completions",
    "config_at",
    "config_from_settings",
    "describe_presets",
    "differences",
    "effective_settings",
    "evaluations_of",
    "explain",
    "field_advice",
    "full_name",
    "full_settings",
    "initial_critic",
    "load_config",
    "mean_epochs",
    "metric_in_chain",
    "parse_value",
    "preset_conflicts",
    "presets_of",
    "resolved_yaml",
    "schedule_in_words",
    "scheduled_values",
    "stage_of",
    "suggestion",
    "with_values",
]

"""The typed configuration: what a run reads, where each default comes from, and what a wrong value does."""

from kedge.config.explain.describe import field_advice
from kedge.config.explain.explain import describe_presets, explain
from kedge.config.explain.schedule import schedule_in_words
from kedge.config.loading.changes import changed_settings
from kedge.config.loading.load import load_config, resolved_yaml, with_values
from kedge.config.loading.settings import config_from_settings
from kedge.config.presets import PRESETS, Preset
from kedge.config.schema.checkpoint import Checkpointing
from kedge.config.schema.data import Data
from kedge.config.schema.inference import Evaluate, Generate
from kedge.config.schema.ppo.section import Ppo
from kedge.config.schema.reward_functions import RewardFunctions
from kedge.config.schema.rlhf import Rlhf
from kedge.config.schema.rollout import Rollout
from kedge.config.schema.root import Config, RewardTerm
from kedge.config.schema.runtime import Runtime
from kedge.config.schema.stages import STAGES, check_stage, choose_output
from kedge.config.schema.supervised import RewardModel, Sft

__all__ = [
    "PRESETS",
    "STAGES",
    "Checkpointing",
    "Config",
    "Data",
    "Evaluate",
    "Generate",
    "Ppo",
    "Preset",
    "RewardFunctions",
    "RewardModel",
    "RewardTerm",
    "Rlhf",
    "Rollout",
    "Runtime",
    "Sft",
    "changed_settings",
    "check_stage",
    "choose_output",
    "config_from_settings",
    "describe_presets",
    "explain",
    "field_advice",
    "load_config",
    "resolved_yaml",
    "schedule_in_words",
    "with_values",
]

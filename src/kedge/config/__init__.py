"""The typed configuration: what a run reads, where each default comes from, and what a wrong value does."""

from kedge.config.changes import changed_settings
from kedge.config.checkpoint import Checkpointing
from kedge.config.data import Data
from kedge.config.explain import describe_presets, explain
from kedge.config.inference import Evaluate, Generate
from kedge.config.load import load_config, resolved_yaml, with_values
from kedge.config.ppo import Ppo
from kedge.config.presets import PRESETS, Preset
from kedge.config.reward_functions import RewardFunctions
from kedge.config.rlhf import Rlhf
from kedge.config.rollout import Rollout
from kedge.config.root import Config, RewardTerm
from kedge.config.runtime import Runtime
from kedge.config.schedule import schedule_in_words
from kedge.config.settings import config_from_settings
from kedge.config.stages import STAGES, check_stage, choose_output
from kedge.config.supervised import RewardModel, Sft

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
    "load_config",
    "resolved_yaml",
    "schedule_in_words",
    "with_values",
]

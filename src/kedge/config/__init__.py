"""The typed configuration: what a run reads, where each default comes from, and what a wrong value does."""

from kedge.config.data import Data
from kedge.config.inference import Evaluate, Generate
from kedge.config.ppo import Ppo
from kedge.config.rlhf import Rlhf
from kedge.config.rollout import Rollout
from kedge.config.root import Config, RewardTerm
from kedge.config.runtime import Runtime
from kedge.config.supervised import RewardModel, Sft

__all__ = [
    "Config",
    "Data",
    "Evaluate",
    "Generate",
    "Ppo",
    "RewardModel",
    "RewardTerm",
    "Rlhf",
    "Rollout",
    "Runtime",
    "Sft",
]

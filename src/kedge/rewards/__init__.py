"""Reward sources: reward models, Python functions, and weighted sums of both.

Modules that need torch are imported on first use: a reward function's worker process imports this package as well.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kedge.rewards.function import FunctionReward, load_function
from kedge.rewards.source import MESSAGES_COLUMN, Responses, Scores, Verdict
from kedge.rewards.weighted import CallLimits, ScoredTerms, WeightedReward

if TYPE_CHECKING:
    from kedge.rewards.loading import RewardSpec, RewardTerm, load_reward
    from kedge.rewards.model import ModelReward

__all__ = [
    "MESSAGES_COLUMN",
    "CallLimits",
    "FunctionReward",
    "ModelReward",
    "Responses",
    "RewardSpec",
    "RewardTerm",
    "ScoredTerms",
    "Scores",
    "Verdict",
    "WeightedReward",
    "load_function",
    "load_reward",
]

_LAZY = {
    "ModelReward": "kedge.rewards.model",
    "RewardSpec": "kedge.rewards.loading",
    "RewardTerm": "kedge.rewards.loading",
    "load_reward": "kedge.rewards.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kedge.rewards' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)

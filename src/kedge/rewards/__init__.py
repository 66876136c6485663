"""Where scores come from: reward models, Python functions, and weighted sums of both."""

from kedge.rewards.function import FunctionReward
from kedge.rewards.import_function import load_function, names_function
from kedge.rewards.loading import RewardSpec, RewardTerm, load_reward
from kedge.rewards.model import ModelReward
from kedge.rewards.source import MESSAGES_COLUMN, Responses, RewardSource, Scores
from kedge.rewards.weighted import ScoredTerms, WeightedReward

__all__ = [
    "MESSAGES_COLUMN",
    "FunctionReward",
    "ModelReward",
    "Responses",
    "RewardSource",
    "RewardSpec",
    "RewardTerm",
    "ScoredTerms",
    "Scores",
    "WeightedReward",
    "load_function",
    "load_reward",
    "names_function",
]

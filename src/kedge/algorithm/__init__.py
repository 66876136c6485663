"""The mathematics of PPO for language models: pure functions on tensors, each detail in one place.

In the order of a training step: logprobs · shaping (scores → token rewards, KL) · advantages · group_advantages ·
control_variate · policy_losses · critic · controllers.
Data types: experience, prefixes, turns. Reward model: preference. Used by all of them: masking. Evaluation: statistics,
readout.
Imports only torch, and jaxtyping and typing_extensions for annotations.
"""

from kedge.algorithm.advantages import (
    Advantage,
    AdvantageInputs,
    Advantages,
    GeneralizedAdvantage,
    LengthAdaptiveLambda,
    NStepAdvantage,
    RewardToGo,
    TotalReward,
    generalized_advantages,
)
from kedge.algorithm.control_variate import ControlVariateAdvantage
from kedge.algorithm.controllers import adapt_entropy_coef, adapt_kl_coef_schulman, adapt_kl_coef_ziegler
from kedge.algorithm.critic import (
    Bins,
    HistogramLoss,
    ValueLoss,
    clipped_value_loss,
    explained_variance,
    histogram_value_loss,
)
from kedge.algorithm.experience import Experience, PolicyOutputs, Rollout, check_masks
from kedge.algorithm.group_advantages import (
    BaselineAdvantage,
    GroupInGroupAdvantage,
    GroupMeanAdvantage,
    LeaveOneOutAdvantage,
    OptimalBaselineAdvantage,
    ProcessAdvantage,
    decayed_mean,
)
from kedge.algorithm.logprobs import (
    token_logprobs,
    token_logprobs_and_entropy,
    truncated_importance_weights,
    vocabulary_logprobs,
    within_ratio_band,
)
from kedge.algorithm.masking import (
    Averaging,
    aggregate,
    aggregation_normalizer,
    keep_counted,
    masked_mean,
    masked_whiten,
)
from kedge.algorithm.policy_losses import (
    PolicyLoss,
    Surrogate,
    SurrogateOptions,
    Tokens,
    cispo_policy_loss,
    clipped_policy_loss,
    double_sided_policy_loss,
    kl_penalty_policy_loss,
    unclipped_policy_loss,
)
from kedge.algorithm.preference import ranking_loss
from kedge.algorithm.shaping import (
    ShapedRewards,
    kl_estimate,
    kl_loss,
    penalize_missing_eos,
    sequence_kl,
    shape_rewards,
    total_scores,
)
from kedge.algorithm.turns import Turns, turn_states

__all__ = [
    "Advantage",
    "AdvantageInputs",
    "Advantages",
    "Averaging",
    "BaselineAdvantage",
    "Bins",
    "ControlVariateAdvantage",
    "Experience",
    "GeneralizedAdvantage",
    "GroupInGroupAdvantage",
    "GroupMeanAdvantage",
    "HistogramLoss",
    "LeaveOneOutAdvantage",
    "LengthAdaptiveLambda",
    "NStepAdvantage",
    "OptimalBaselineAdvantage",
    "PolicyLoss",
    "PolicyOutputs",
    "ProcessAdvantage",
    "RewardToGo",
    "Rollout",
    "ShapedRewards",
    "Surrogate",
    "SurrogateOptions",
    "Tokens",
    "TotalReward",
    "Turns",
    "ValueLoss",
    "adapt_entropy_coef",
    "adapt_kl_coef_schulman",
    "adapt_kl_coef_ziegler",
    "aggregate",
    "aggregation_normalizer",
    "check_masks",
    "cispo_policy_loss",
    "clipped_policy_loss",
    "clipped_value_loss",
    "decayed_mean",
    "double_sided_policy_loss",
    "explained_variance",
    "generalized_advantages",
    "histogram_value_loss",
    "keep_counted",
    "kl_estimate",
    "kl_loss",
    "kl_penalty_policy_loss",
    "masked_mean",
    "masked_whiten",
    "penalize_missing_eos",
    "ranking_loss",
    "sequence_kl",
    "shape_rewards",
    "token_logprobs",
    "token_logprobs_and_entropy",
    "total_scores",
    "truncated_importance_weights",
    "turn_states",
    "unclipped_policy_loss",
    "vocabulary_logprobs",
    "within_ratio_band",
]

"""The mathematics of PPO for language models: pure functions on tensors, one owner per detail."""

from kedge.algorithm.experience import Experience, Rollout

__all__ = ["Experience", "Rollout"]

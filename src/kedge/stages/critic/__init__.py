"""Trains a critic before PPO. Start with `main`; the other files are its parts."""

from kedge.stages.critic.main import CriticResult, run_critic

__all__ = ["CriticResult", "run_critic"]

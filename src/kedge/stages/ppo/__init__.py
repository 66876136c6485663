"""PPO: start with `main`; the other files are its parts."""

from kedge.stages.ppo.main import PpoResult, run_ppo

__all__ = ["PpoResult", "run_ppo"]

"""PPO: start with `main`; the other files are its parts."""

from kedge.pipelines.ppo.main import PpoResult, run_ppo

__all__ = ["PpoResult", "run_ppo"]

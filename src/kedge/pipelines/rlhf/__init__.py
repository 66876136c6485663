"""SFT, reward model and PPO in a chain: `main` is the page to read; the other files are its parts."""

from kedge.pipelines.rlhf.main import RlhfResult, run_rlhf

__all__ = ["RlhfResult", "run_rlhf"]

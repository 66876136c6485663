"""SFT, reward model and PPO in a chain: `main` holds the whole chain; the other files are its parts."""

from kedge.stages.rlhf.main import run_rlhf
from kedge.stages.rlhf.result import RlhfResult

__all__ = ["RlhfResult", "run_rlhf"]

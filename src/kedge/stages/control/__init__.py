"""PPO and TRPO on Gymnasium's environments: `run_control`."""

from kedge.stages.control.main import run_control
from kedge.stages.control.result import ControlResult

__all__ = ["ControlResult", "run_control"]

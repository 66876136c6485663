"""PPO and TRPO on Gymnasium's environments: `run_control`."""

from kedge.pipelines.control.main import run_control
from kedge.pipelines.control.result import ControlResult

__all__ = ["ControlResult", "run_control"]

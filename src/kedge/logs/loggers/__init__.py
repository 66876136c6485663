"""Other people's logs of a run beside its own files: TensorBoard, Weights & Biases, Trackio; none unless asked for."""

from kedge.logs.loggers.feed import Loggers
from kedge.logs.loggers.logger import LoggedRun, Logger
from kedge.logs.loggers.opening import check_loggers

__all__ = ["LoggedRun", "Logger", "Loggers", "check_loggers"]

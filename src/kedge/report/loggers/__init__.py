"""Other people's logs of a run beside its own files: TensorBoard, Weights & Biases, Trackio; none unless asked for."""

from kedge.report.loggers.feed import Loggers
from kedge.report.loggers.logger import LoggedRun, Logger
from kedge.report.loggers.opening import check_loggers

__all__ = ["LoggedRun", "Logger", "Loggers", "check_loggers"]

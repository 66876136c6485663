"""Third-party loggers, off by default: TensorBoard, Weights & Biases, Trackio."""

from kedge.logs.loggers.group import LoggerGroup
from kedge.logs.loggers.logger import LoggedRun, Logger
from kedge.logs.loggers.opening import check_loggers
from kedge.logs.loggers.state import LoggerState

__all__ = ["LoggedRun", "Logger", "LoggerGroup", "LoggerState", "check_loggers"]

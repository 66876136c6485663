"""Third-party loggers, off by default: TensorBoard, Weights & Biases, Trackio."""

from kedge.logs.loggers.group import LoggerGroup, check_loggers
from kedge.logs.loggers.logger import PROJECT, LoggedRun, LoggerState

__all__ = ["PROJECT", "LoggedRun", "LoggerGroup", "LoggerState", "check_loggers"]

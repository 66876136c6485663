"""Which logger is which package: each is called what its package and kedge's extra for it are called."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution

from kedge.errors import ConfigError
from kedge.logs.loggers.logger import LoggedRun, Logger

__all__ = ["check_loggers", "open_logger"]


def check_loggers(names: Iterable[str]) -> None:
    """Find out whether the packages are there, without importing them.

    Raises:
        ConfigError: One is not installed.
    """
    for name in names:
        try:
            distribution(name)
        except PackageNotFoundError as error:
            raise ConfigError(f"runtime.loggers: {name} is not installed; pip install 'kedge[{name}]'") from error


def open_logger(name: str, run: LoggedRun) -> Logger:
    """Begin a run's log with one of the packages, or go on with it; only that package is imported."""
    match name:
        case "tensorboard":
            from kedge.logs.loggers.tensorboard import TensorBoardLogger

            return TensorBoardLogger(run)
        case "wandb":
            from kedge.logs.loggers.wandb import WandbLogger

            return WandbLogger(run)
        case "trackio":
            from kedge.logs.loggers.trackio import TrackioLogger

            return TrackioLogger(run)
        case _:
            raise ConfigError(f"there is no logger {name!r}")

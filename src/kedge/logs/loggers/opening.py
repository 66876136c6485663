"""Opening loggers by name: the name of the package, and of kedge's extra for it."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution

from kedge.errors import ConfigError, install_line
from kedge.logs.loggers.logger import LoggedRun, Logger

__all__ = ["check_loggers", "open_logger"]


def check_loggers(names: Iterable[str]) -> None:
    """Check that the packages are installed, without importing them.

    Raises:
        ConfigError: One is missing.
    """
    for name in names:
        try:
            distribution(name)
        except PackageNotFoundError as error:
            raise ConfigError(f"runtime.loggers: {name} is not installed; {install_line(name)}") from error


def open_logger(name: str, run: LoggedRun) -> Logger:
    """Start a run's log in one of the packages, or continue it; only that package is imported."""
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
            raise ConfigError(f"unknown logger {name!r}; expected tensorboard, wandb or trackio")

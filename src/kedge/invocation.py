"""How kedge was started: as a command or from Python, as a single process or as one of several ranks."""

import os

__all__ = ["is_command_line", "is_first_rank", "mark_command_line", "num_ranks"]

_running = False


def mark_command_line() -> None:
    """Record that the `kedge` command runs: advice is then a command, otherwise a line of Python."""
    global _running
    _running = True


def is_command_line() -> bool:
    """Whether `mark_command_line` was called."""
    return _running


def num_ranks() -> int:
    """Number of processes that torchrun, or a launcher with its variables, started for this run."""
    return int(os.environ.get("WORLD_SIZE") or 1) if "RANK" in os.environ else 1


def is_first_rank() -> bool:
    """Whether this process prints and writes files."""
    return num_ranks() == 1 or int(os.environ["RANK"]) == 0

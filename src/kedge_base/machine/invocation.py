"""Tells how kedge was started: as a command or from Python, as a single process or as one of several ranks."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from kedge_base.errors import ConfigError

IMPORTING = "KEDGE_IMPORTING"
"""Environment variable in processes that a user's file starts while it is imported."""

_running = False
_loads = 0


def mark_command_line() -> None:
    """Record that the `kedge` command runs: advice is then given as a command, otherwise as Python."""
    global _running
    _running = True


def is_command_line() -> bool:
    """True if `mark_command_line` was called."""
    return _running


def as_argument(option: str, python: str = "") -> str:
    """Format an option as the user writes it: `--best-of` on the command line, or `best_of=` in Python.

    Args:
        option: The option, or several in a sentence.
        python: Its form in Python, if it has another name there.
    """
    if is_command_line():
        return option
    return python or re.sub(r"--([a-z-]+)", lambda found: f"{found[1].replace('-', '_')}=", option)


def num_ranks() -> int:
    """Number of processes that torchrun, or a launcher with its variables, started for this run."""
    return _rank_variable("WORLD_SIZE", least=1) if "RANK" in os.environ and os.environ.get("WORLD_SIZE") else 1


def is_first_rank() -> bool:
    """True if this process prints and writes files."""
    return num_ranks() == 1 or _rank_variable("RANK") == 0


def local_rank() -> int | None:
    """The number of this process on its machine, which is also the number of its GPU; None for a single process."""
    return None if num_ranks() == 1 else _rank_variable("LOCAL_RANK") if "LOCAL_RANK" in os.environ else 0


def check_rank_variables() -> None:
    """Check the variables that a launcher sets for a rank, before it waits for the others.

    Raises:
        ConfigError: One is not a number, or out of range.
    """
    _rank_variable("RANK", most=num_ranks() - 1)
    local_rank()
    if "MASTER_PORT" in os.environ:
        _rank_variable("MASTER_PORT", least=1, most=65535)


def _rank_variable(name: str, *, least: int = 0, most: int | None = None) -> int:
    value = os.environ[name].strip()
    if value.isdecimal() and least <= int(value) and (most is None or int(value) <= most):
        return int(value)
    expected = f"at least {least}" if most is None else f"from {least} to {most}"
    raise ConfigError(
        f"the environment variable {name} is {value!r}; expected a whole number {expected}, as torchrun sets it "
        "(for a single process, unset RANK)"
    )


@contextmanager
def loading_user_code() -> Iterator[None]:
    """Mark the block as loading definitions from user code, which must not start a run in this process."""
    global _loads
    _loads += 1
    try:
        yield
    finally:
        _loads -= 1


@contextmanager
def importing_user_code() -> Iterator[None]:
    """Mark the block as importing a user's file: neither the file nor a process started by it may start a run."""
    before = os.environ.get(IMPORTING)
    os.environ[IMPORTING] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(IMPORTING, None)


def refuse_nested_run() -> None:
    """Reject a run that a script starts while it is being imported, by kedge for its functions or by a pool's worker.

    The run would import the script again, without end.

    Raises:
        ConfigError: A script is being imported.
    """
    from multiprocessing import current_process  # not needed to show --help

    # With this attribute, multiprocessing itself refuses to start processes during such an import.
    if _loads or IMPORTING in os.environ or getattr(current_process(), "_inheriting", False):
        raise ConfigError(
            "a script that names its own function, or starts processes, is imported again, and must not start a run "
            'then: put its calls of kedge under `if __name__ == "__main__":`'
        )

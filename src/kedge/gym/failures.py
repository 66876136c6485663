"""One line for an environment that raises an error, or gives something that cannot be used."""

from __future__ import annotations

import traceback
from pathlib import Path

from kedge.errors import EnvError
from kedge.system.texts import error_text

READERS = {str(Path(__file__).with_name(name)) for name in ("environments.py", "in_process.py", "vectorized.py")}
"""The files that read what an environment returned."""

__all__ = ["failure_of", "place_of"]

EXPECTED = {
    "reset": "reset(seed=…) to return (observation, info)",
    "step": "step(action) to return (observation, reward, terminated, truncated, info)",
}


def failure_of(name: str, call: str, error: BaseException, shape: tuple[int, ...]) -> EnvError:
    """What went wrong when an environment was called.

    Args:
        name: Of the environment.
        call: `reset` or `step`.
        error: What was raised, by the environment or when its result was read.
        shape: Of its observations.
    """
    if _frame(error).filename not in READERS:
        reason = f"{type(error).__name__}: {error_text(error)} ({place_of(error)})"
        return EnvError(f"environment {name!r}: {call}() raised {reason}")
    return EnvError(
        f"environment {name!r}: {call}() cannot be used: {error_text(error)}; "
        f"expected {EXPECTED[call]}, with an observation of shape {shape}"
    )


def place_of(error: BaseException) -> str:
    """The file and line that raised an error, or where they are shown."""
    frame = _frame(error)
    name = Path(frame.filename).name
    # Gymnasium raises a worker process's error again, and prints its traceback.
    return "see above" if name == "async_vector_env.py" else f"{name}:{frame.lineno}"


def _frame(error: BaseException) -> traceback.FrameSummary:
    return traceback.extract_tb(error.__traceback__)[-1]

"""What can go wrong: one root error, and each error is also the standard-library type that a caller expects.

A `KedgeError` is a user's mistake or the outside world's: the command line prints its one line and exits with 2.
Anything else that escapes is a defect of kedge and keeps its traceback.
"""

from kedge.texts import printable

__all__ = [
    "ConfigError",
    "DataError",
    "KedgeError",
    "ModelError",
    "NonfiniteScoreError",
    "NumericsError",
    "OutputError",
    "RewardError",
    "ShapeError",
    "UnscoredError",
]


LONGEST_MESSAGE = 2000


class KedgeError(Exception):
    """The root of all errors that kedge raises on purpose: one printable line, whatever names and values it quotes."""

    def __str__(self) -> str:
        line = printable(super().__str__())
        return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]}…"


class ShapeError(KedgeError, ValueError):
    """Tensors whose shapes or masks do not fit together."""


class ConfigError(KedgeError, ValueError):
    """A field, value or combination of the configuration that cannot be run."""


class DataError(KedgeError, ValueError):
    """A data file or row that cannot be used."""


class ModelError(KedgeError, ValueError):
    """A model or tokenizer that cannot be used."""


class NumericsError(KedgeError, ArithmeticError):
    """A loss or gradient that is not a finite number; the weights are those before it."""


class RewardError(KedgeError, RuntimeError):
    """A reward function that could not be loaded or broke its contract."""


class NonfiniteScoreError(RewardError):
    """A score that is NaN or infinite.

    Attributes:
        row: The response that was given it, counted from 0 among those that the reward was asked about.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


class UnscoredError(RewardError):
    """No response of a batch has a score: there is nothing to learn from it."""


class OutputError(KedgeError, FileExistsError):
    """An output folder that already holds something, or cannot be written."""

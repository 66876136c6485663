"""Errors: one base exception; each error is also the standard-library type that callers expect.

A `KedgeError` is a mistake in the input or a failure of the environment: the command line prints one line and exits
with 2. Any other exception is a bug in kedge and keeps its traceback.
"""

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from kedge_base.texts import printable, shortened
from kedge_base.version import DISTRIBUTION

LONGEST_MESSAGE = 2000


class KedgeError(Exception):
    """Base of all errors that kedge raises on purpose; its message is always one printable line."""

    def __str__(self) -> str:
        return shortened(printable(super().__str__()), LONGEST_MESSAGE)

    def _render_traceback_(self) -> list[str]:
        """Show the one-line message instead of a traceback in IPython and notebooks."""
        return [f"{type(self).__name__}: {self}"]


class RunEnded(SystemExit):
    """Raised when a signal ends the run. It may surface inside user code, but is not that code's error."""


def install_line(extra: str) -> str:
    """Return the command that installs an extra: `pip install -e '.[adapters]'` in a clone, otherwise by the package's
    name.
    """
    try:
        origin = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # run from source, without installation
        origin = {"dir_info": {"editable": True}}
    if origin.get("dir_info", {}).get("editable"):
        return f"pip install -e '.[{extra}]'"
    prefix = f"{origin['vcs_info']['vcs']}+" if "vcs_info" in origin else ""
    source = f" @ {prefix}{origin['url']}" if origin else ""
    return f"pip install '{DISTRIBUTION}[{extra}]{source}'"


def is_panic(error: BaseException) -> bool:
    """True if a library written in Rust, such as tokenizers, has panicked: its exception is not an `Exception`."""
    return type(error).__name__ == "PanicException"


class ShapeError(KedgeError, ValueError):
    """Tensors with incompatible shapes or masks."""


class ConfigError(KedgeError, ValueError):
    """An invalid field, value or combination in the configuration."""


class DataError(KedgeError, ValueError):
    """An unusable data file or row."""


class EngineError(KedgeError, RuntimeError):
    """A sampling engine that cannot be started, cannot be reached, or gave an unusable answer."""


class EnvError(KedgeError, RuntimeError):
    """An environment that raised an error, returned something unusable, or cannot be rendered."""


class LostContactError(KedgeError, ConnectionError):
    """The connection to another rank was lost; the rank that failed reports why."""

    def __init__(self) -> None:
        super().__init__("contact with another rank was lost: its process ended, or its machine is out of reach")


class ModelError(KedgeError, ValueError):
    """An unusable model or tokenizer."""


class NumericsError(KedgeError, ArithmeticError):
    """A non-finite loss or gradient; the weights are from the last finite step."""


class OutOfMemoryError(KedgeError, MemoryError):
    """Memory ran out; the saved state is that after the last complete update.

    Attributes:
        settings: Settings with which the resumed run needs less memory, by dotted name.
    """

    def __init__(self, message: str, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.settings = dict(settings or {})


class PushError(KedgeError, ConnectionError):
    """A finished model that could not be pushed to the hub; it is complete on disk. The command exits with 1."""


class RewardError(KedgeError, RuntimeError):
    """A reward function that cannot be loaded or returned invalid results."""


class LastingRewardError(RewardError):
    """A failure that ends a run, also if its settings tolerate failures: no further call can succeed, such as after a
    limit is reached.
    """

    is_lasting = True


class NonfiniteScoreError(RewardError):
    """A NaN or infinite score.

    Attributes:
        row: Index of the response in the scored batch, from 0.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


class UnscoredError(RewardError):
    """No response of a batch has a score, so there is nothing to train on.

    Attributes:
        failures: The failed calls of reward functions, by metric.
    """

    def __init__(self, message: str, failures: Mapping[str, float] | None = None) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})


class OutputError(KedgeError, FileExistsError):
    """An output folder that is not empty or cannot be written."""

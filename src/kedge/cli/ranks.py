"""Runs a command as one of several ranks, which end together and print an error once."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import typer

from kedge.ranks.start import end_together, is_first_to_fail, is_lost_contact, join_ranks
from kedge_base.errors import KedgeError, LostContactError, PushError

LOST_CONTACT = 3
"""Exit status of a rank that ends because another rank is gone."""


def run_as_rank(command: Callable[[], None]) -> None:
    """Join the other ranks and run the command; if it fails on one rank, it ends on all.

    The rank with a user error prints one line; a bug gets a traceback. A rank that ends only because another one is
    gone exits with 3, so that a launcher can tell a user error (2) from a failure that a restart may fix.

    Args:
        command: Raises user errors; may exit on its own.
    """
    status: object = 1
    try:
        join_ranks()
        command()
        status = 0
    except SystemExit as ending:
        status = ending.code
    except KedgeError as error:
        if is_first_to_fail(error):
            _say(f"error: {error}")
        status = 1 if isinstance(error, PushError) else LOST_CONTACT if isinstance(error, LostContactError) else 2
    except Exception as error:
        status = LOST_CONTACT if is_lost_contact(error) else 1
        if is_first_to_fail(error):
            if status == LOST_CONTACT:
                _say("error: contact with another rank was lost")
            else:
                traceback.print_exc()
    end_together(failed=bool(status))
    sys.exit(status)  # pyright: ignore[reportArgumentType]


def _say(line: str) -> None:
    """Print a line, and make torchrun repeat it in the last lines of its report, below its own traceback."""
    typer.echo(line, err=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # The first failure is the one that torchrun shows last; other ranks may end in the same second.
        extra = {"timestamp": str(int(time.time()) - 1)}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}), encoding="utf-8")

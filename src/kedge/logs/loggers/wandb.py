"""Weights & Biases, offline unless `WANDB_MODE` is set otherwise."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any

import wandb  # pyright: ignore[reportMissingImports]

from kedge.logs.loggers.logger import PROJECT, LoggedRun, TableLogger

FILE_HEADER = 7
BLOCK = 32 * 1024
RECORD_HEADER = struct.Struct("<IHB")
FULL = 1
FIRST = 2
MIDDLE = 3
LAST = 4


def open_log(run: LoggedRun) -> TableLogger:
    """Open a log in the run's folder, with history rows by update and a table of samples; `wandb sync` uploads it.

    A W&B run that the caller has open in this process is left alone. W&B writes in blocks and sends in batches, and a
    kill loses the last ones, so the last update is read from what W&B has stored.

    Args:
        run: The run to log. Its id is also W&B's, so a resumed run continues the same W&B run.
    """
    is_disabled = os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on")
    mode: Any = os.environ.get("WANDB_MODE") or ("disabled" if is_disabled else "offline")
    is_offline = mode == "offline"
    last_stored = _last_step(run) if is_offline else None  # read before W&B starts another file
    log = wandb.init(
        project=run.project if run.project != PROJECT else os.environ.get("WANDB_PROJECT", PROJECT),
        id=run.id,
        name=os.environ.get("WANDB_NAME") or run.name,
        job_type=run.stage,
        config=dict(run.settings),
        dir=str(run.folder),
        mode=mode,
        # Offline, the id alone identifies the run: `wandb sync` merges runs of one id in order of time.
        resume=None if is_offline else "allow",
        reinit="create_new",
        # Do not capture the terminal: a live progress bar would fill the log.
        settings=wandb.Settings(console="off", silent=is_offline),
    )
    is_resumed = not is_offline and log.resumed
    last = log.starting_step - 1 if is_resumed else last_stored
    columns = ("update", "prompt", "response", "score")
    return TableLogger(log.log, wandb.Table, columns, close=log.finish, last_update=last)


def _last_step(run: LoggedRun) -> int | None:
    """The last step in the files of an offline run; −1 for files without a step, None without a file."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    files = sorted((run.folder / "wandb").glob(f"offline-run-*-{run.id}/run-{run.id}.wandb"))
    last = -1 if files else None
    for data in (path.read_bytes() for path in files):
        for content in _records(data):
            record: Any = Record.FromString(content)
            if record.WhichOneof("record_type") == "history":
                last = max(last or 0, record.history.step.num)
    return last


def _records(data: bytes) -> Iterator[bytes]:
    """The complete records of a `.wandb` file, which may be truncated; source: LevelDB's log_format.md."""
    at = FILE_HEADER
    begun = b""
    while at + RECORD_HEADER.size <= len(data):
        rest = BLOCK - at % BLOCK
        if rest < RECORD_HEADER.size:  # too short for a header: the padding at the end of a block
            at += rest
            continue
        _, length, kind = RECORD_HEADER.unpack_from(data, at)
        at += RECORD_HEADER.size
        if kind not in (FULL, FIRST, MIDDLE, LAST) or at + length > len(data):
            return
        begun = begun + data[at : at + length]
        at = at + length
        if kind in (FULL, LAST):
            yield begun
            begun = b""

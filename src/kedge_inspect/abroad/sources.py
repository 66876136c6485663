"""Finds the log of a run in a file or folder, and reads its rows under the names that the library gave them."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from kedge_base.errors import DataError
from kedge_base.run_folder.record_format import UNLIKE_ANY_RUN
from kedge_inspect.abroad.wire import Row, read_events, read_training_args, read_wandb
from kedge_inspect.record import is_number

STATE = "trainer_state.json"
ARGS = "training_args.bin"
CARD = "README.md"
LARGEST_FILE = 1 << 30
PATTERNS = ("progress.csv", "progress.json", "*.wandb", "events.out.tfevents*", "*.jsonl", "*.csv")
"""Logs that a folder may hold besides TRL's, the most specific first."""

EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)e[-+]?[0-9]{1,3}", re.IGNORECASE)
"""Numbers such as 1e-5, as JSON has them too, which YAML reads as text without a decimal point."""

DEPTHS = ("", "*/", "*/*/")
STEPS = (
    "time/iterations",
    "step",
    "global_step",
    "train/global_step",
    "trainer/global_step",
    "Step",
    "_step",
    "time/total_timesteps",
)
"""Columns with the step, in the order in which they are looked for."""


@dataclass(frozen=True)
class Log:
    """The content of a library's log.

    Attributes:
        rows: Its rows, each with `step`; the values are numbers, or null.
        settings: The run's settings under the library's names, dotted; empty if unknown.
        trainer: What the model card calls the trainer: `GRPO`; empty without one.
        total: The planned number of steps; None if unknown.
        files: The log's files; several of TensorBoard's are one run that was resumed.
    """

    rows: Sequence[Row]
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    trainer: str = ""
    total: int | None = None
    files: tuple[Path, ...] = ()


def log_files(path: Path) -> tuple[Path, ...]:
    """The files of the log in a file or folder; empty without one.

    Raises:
        DataError: A folder holds the logs of several runs.
    """
    if path.is_file():
        return (path,)
    if (path / STATE).is_file():
        return (path / STATE,)
    if checkpoints := list(path.glob(f"checkpoint-*/{STATE}")):
        return (max(checkpoints, key=lambda file: int(re.sub(r"\D", "", file.parent.name) or 0)),)
    for pattern in (STATE, *PATTERNS):
        for depth in DEPTHS:
            found = sorted({file.resolve(): file for file in path.glob(depth + pattern) if file.is_file()}.values())
            if found:
                return _one_run(path, found, by_folder=pattern.startswith("events"))
    return ()


def _one_run(path: Path, files: list[Path], *, by_folder: bool) -> tuple[Path, ...]:
    runs = sorted({file.parent if by_folder else file for file in files})
    if len(runs) > 1:
        names = ", ".join(str(run.relative_to(path)) for run in runs[:4]) + (", …" if len(runs) > 4 else "")
        found = "runs" if by_folder else "files that may be the log of a run"
        raise DataError(f"{str(path)!r} holds {len(runs)} {found}: {names}; name one of them")
    return tuple(files)


def read_log(path: Path, settings: Path | None = None) -> Log:
    """Read the log in a file or folder.

    Args:
        path: The file or folder.
        settings: A YAML or JSON file with the run's settings, under the library's names.

    Raises:
        DataError: There is none, it is damaged or empty, or there are several.
    """
    files = log_files(path)
    if not files:
        raise DataError(
            f"{str(path)!r} is not the folder of a run: it has no config.yaml, nor a log of TRL, verl, OpenRLHF, "
            "Stable-Baselines3, TensorBoard or W&B"
        )
    name = files[0].name
    reader = next((read for mark, read in READERS.items() if mark in name), _read_rows)
    try:
        if any(file.stat().st_size > LARGEST_FILE for file in files):
            raise ValueError("more than 1 GiB")
        log = reader(files)
        rows = merge_rows([_with_numbers(row) for row in log.rows if isinstance(row, dict)])
    except DataError as error:
        raise DataError(f"{str(files[0])!r} {error}") from error
    except (OSError, csv.Error, *UNLIKE_ANY_RUN) as error:
        raise DataError(f"{str(files[0])!r} cannot be read: {type(error).__name__}: {error}") from error
    if not rows:
        raise DataError(f"{str(files[0])!r} has no rows with numbers")
    known = {**log.settings, **(_read_settings(settings) if settings else {})}
    return replace(log, rows=rows, settings=known, files=files)


def merge_rows(rows: Sequence[Row]) -> list[Row]:
    """Join the rows of each step; later values replace earlier ones.

    Rows are numbered if they have no step, or if it restarts in every call of Stable-Baselines3's `learn`.

    Raises:
        DataError: The steps of another library restart.
    """
    joined: dict[int, Row] = {}
    column = next((name for name in STEPS if any(_is_step(row.get(name)) for row in rows)), "")
    steps = [row[column] for row in rows if column and _is_step(row.get(column))]
    for before, after in itertools.pairwise(steps):
        if after < before and after <= steps[0]:
            if not column.startswith("time/"):
                again = f"after step {before:g} it starts again at step {after:g}"
                raise DataError(f"holds several runs: {again}; keep the rows of one of them")
            column = ""
            break
    last = 0
    for number, row in enumerate(rows, start=1):
        given: Any = row.get(column) if column else number
        last = int(given) if _is_step(given) else last
        values = {name: value for name, value in row.items() if value is None or is_number(value)}
        values.pop(column, None)
        if values:
            joined.setdefault(last, {}).update(values)
    return [{"step": step, **joined[step]} for step in sorted(joined)]


def _is_step(value: object) -> bool:
    return is_number(value) and 0 <= value < 1 << 53


def _with_numbers(row: Row) -> Row:
    """Replace numbers that are written as text, as W&B exports `NaN`."""
    return {name: _number(value) if isinstance(value, str) else value for name, value in row.items()}


def _read_state(files: tuple[Path, ...]) -> Log:
    """`trainer_state.json`, with the settings in the same folder."""
    state = json.loads(files[0].read_bytes())
    return Log(state["log_history"], *_beside(files[0].parent), total=state.get("max_steps") or None)


def _beside(folder: Path) -> tuple[dict[str, Any], str]:
    """The settings in `training_args.bin` and the trainer in the model card of a folder, its parents or checkpoints."""
    nearby = (folder, folder.parent, folder.parent.parent, *sorted(folder.glob("checkpoint-*")))
    saved, cards = ([place / name for place in nearby if (place / name).is_file()] for name in (ARGS, CARD))
    named = (re.search(r"trained with (\w+)", card.read_text("utf-8", "replace")) for card in cards)
    return read_training_args(saved[0]) if saved else {}, next((match[1] for match in named if match), "")


def _read_tensorboard(files: tuple[Path, ...]) -> Log:
    read = [read_events(file.read_bytes()) for file in files]
    settings, trainer = _beside(files[0].parent)
    written = [texts["args/text_summary"] for _, texts in read if "args/text_summary" in texts]  # by transformers
    rows = [row for some, _ in read for row in some]
    return Log(rows, settings or (_flat(json.loads(written[-1])) if written else {}), trainer)


def _read_offline(files: tuple[Path, ...]) -> Log:
    rows, config = read_wandb(files[0].read_bytes())
    return Log(rows, _flat(config))


def _read_rows(files: tuple[Path, ...]) -> Log:
    """JSON lines, or one JSON array: flat rows, or with the values in `data`, as verl writes them."""
    text = files[0].read_text("utf-8-sig")
    rows = json.loads(text) if text.lstrip().startswith("[") else list(_parsed_lines(text.splitlines()))
    objects = [row for row in rows if isinstance(row, dict)]
    return Log([{**row, **row["data"]} if isinstance(row.get("data"), dict) else row for row in objects])


def _parsed_lines(lines: Sequence[str]) -> Iterator[Any]:
    """The content of each line; the last one may be incomplete."""
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                yield json.loads(line)
        except ValueError as error:
            if number == len(lines) > 1:
                return
            raise DataError(f"cannot be read: line {number} is not JSON") from error


def _read_csv(files: tuple[Path, ...]) -> Log:
    """A table: Stable-Baselines3's, or one that W&B has exported, in which a column may begin with the run's name.

    Cells are separated by commas, tabs, or semicolons, with which a decimal point may be a comma.
    """
    with files[0].open(encoding="utf-8-sig", newline="") as file:
        separator = max(",;\t", key=file.readline().count)
        file.seek(0)
        table = csv.reader(file, delimiter=separator)
        columns = [name.rpartition(" - ") for name in next(table, ())]
        found = list(table)
    runs = {run for run, _, _ in columns if run}
    if len(runs) > 1:
        raise DataError(f"holds {len(runs)} runs; export one of them")
    if wide := [number for number, row in enumerate(found, start=2) if any(row[len(columns) :])]:
        raise DataError(f"cannot be read: line {wide[0]} has more cells than the header")
    names = ["" if name.endswith(("__MIN", "__MAX")) else name for _, _, name in columns]
    point = {ord(","): "."} if separator == ";" else {}
    cells = (zip(names, row, strict=False) for row in found)
    return Log([{name: text.translate(point) for name, text in row if name and text} for row in cells])


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, yaml.YAMLError, *UNLIKE_ANY_RUN) as error:
        raise DataError(f"{str(file)!r} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise DataError(f"{str(file)!r} has no settings; expected a YAML or JSON object")
    return _flat(found)


def _flat(settings: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name, with those of W&B's form `{value: …}` replaced by the value."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and set(value) <= {"value", "desc"} and "value" in value:
            value = value["value"]
        if isinstance(value, str) and EXPONENT.fullmatch(value):
            value = float(value)
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


READERS: dict[str, Callable[[tuple[Path, ...]], Log]] = {
    "trainer_state": _read_state,
    "tfevents": _read_tensorboard,
    ".wandb": _read_offline,
    ".csv": _read_csv,
    ".tsv": _read_csv,
}
"""Readers by a part of the file's name; anything else is read as JSON lines."""

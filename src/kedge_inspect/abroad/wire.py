"""Binary logs: TensorBoard's event files, Weights & Biases' offline files, and the settings that TRL pickles.

The first two are sequences of protocol buffers; the few fields that are needed are read here, without either library.
"""

from __future__ import annotations

import json
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer: number and value, which is an integer or bytes.

    Raises:
        ValueError: The bytes are not a message, or are cut off.
    """
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            if place >= len(message):
                raise ValueError("cut off")
            byte = message[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(message):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        if kind not in (1, 2, 5):
            raise ValueError("no protocol buffer")
        size = varint() if kind == 2 else 8 if kind == 1 else 4
        value = message[place : place + size]
        if len(value) < size:
            raise ValueError("cut off")
        yield key >> 3, value
        place += size


def read_events(data: bytes) -> tuple[list[Row], dict[str, str]]:
    """The scalars of a TensorBoard file, a row per step, and its texts by tag; an unfinished last record is left out.

    Raises:
        ValueError: It is not such a file.
    """
    rows: dict[int, Row] = {}
    texts: dict[str, str] = {}
    place = 0
    while place + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, place)
        record = data[place + 12 : place + 12 + size]
        if len(record) < size:
            break
        event = dict(_fields(record))  # field 2 is the step, 5 the summary
        for value in (dict(_fields(each)) for number, each in _fields(event.get(5, b"")) if number == 1):
            tag = _text(value.get(1))
            tensor = dict(_fields(value.get(8, b"")))  # field 1 is the type, 4 the content, 5 floats, 8 texts
            scalar = value.get(2, tensor.get(5, tensor.get(4) if tensor.get(1) == 1 else None))
            if isinstance(scalar, bytes) and len(scalar) == 4:
                step = event.get(2, 0)
                rows.setdefault(step, {"step": step})[tag] = struct.unpack("<f", scalar)[0]
            elif 8 in tensor:
                texts[tag] = _text(tensor[8])
        place += size + 16
    return [rows[step] for step in sorted(rows)], texts


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


BLOCK = 32768
WANDB_MAGIC = b":W&B"


def read_wandb(data: bytes) -> tuple[list[Row], dict[str, Any]]:
    """The history of a W&B file, a row per step, and the run's configuration.

    Raises:
        ValueError: It is not such a file.
    """
    if not data.startswith(WANDB_MAGIC):
        raise ValueError("no W&B file")
    rows: list[Row] = []
    config: dict[str, Any] = {}
    for record in _leveldb(data):
        for number, value in _fields(record):
            if number == 2:  # history; its field 1 is an item
                rows.append(_items(value))
            elif number in (5, 17):  # configuration, or a run, whose field 4 is the configuration
                parts = [value] if number == 5 else [part for field, part in _fields(value) if field == 4]
                for part in parts:
                    config |= _items(part)
    return rows, config


def _leveldb(data: bytes) -> Iterator[bytes]:
    """The records of a file in the format of LevelDB's log, which splits them at blocks; an unfinished one is left
    out.
    """
    place = 7
    parts: list[bytes] = []
    while place + 7 <= len(data):
        left = BLOCK - place % BLOCK
        if left < 7:
            place += left
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)
        part = data[place + 7 : place + 7 + size]
        if len(part) < size:
            return
        place += 7 + size
        if kind in (1, 2):  # a whole record, or its first part
            parts = []
        parts.append(part)
        if kind in (1, 4):
            yield b"".join(parts)


def _items(message: bytes) -> dict[str, Any]:
    """The items of a history or configuration: 1 is the key, 2 a part of a nested key, the others are values."""
    found: dict[str, Any] = {}
    for item in (list(_fields(value)) for field, value in _fields(message) if field == 1):
        names = [[_text(part) for field, part in item if field == wanted] for wanted in (2, 1)]
        values = [VALUES[field](part) for field, part in item if field in VALUES]
        if any(names) and values:
            found[".".join(names[0] or names[1])] = values[0]
    return found


VALUES: dict[int, Callable[[Any], Any]] = {
    4: bool,
    5: lambda value: value - (1 << 64) * (value >> 63),
    6: lambda value: struct.unpack("<d", value)[0],
    7: _text,
    8: json.loads,
    16: json.loads,
}
"""The fields of an item that hold its value, of which it has one."""


LARGEST_SETTINGS = 2**24
"""Maximum bytes of pickled settings."""

EMPTY: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "GLOBAL": object,
}
"""Instructions of a pickle that push a value without an argument; a class that it names becomes a bare object."""


class _Plain:
    """Stands for an object of any class in a pickle: its attributes, or the value of an enumeration."""

    def __init__(self, value: Any = None) -> None:
        self.value = value
        self.attributes: Any = {}


def _plain_values(data: bytes) -> Any:
    """Interpret the instructions of a pickle that `torch.save` writes; nothing it names is imported or called.

    Raises:
        Exception: The bytes are not a pickle, or have other instructions.
    """
    mark = object()
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for operation, argument, _ in pickletools.genops(data):
        name = operation.name
        if name == "PROTO":
            continue
        takes = operation.stack_before
        count = len(takes)
        if pickletools.markobject in takes:  # and all that follows the mark
            count = takes.index(pickletools.markobject) + 1 + stack[::-1].index(mark)
        place = len(stack) - count
        taken = [each for each in stack[place:] if each is not mark]
        del stack[place:]
        if name == "STOP":
            return taken[0]
        if name in EMPTY:
            stack.append(EMPTY[name]())
        elif name == "MARK":
            stack.append(mark)
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("REDUCE", "NEWOBJ"):
            stack.append(_Plain(*taken[1][:1]))
        elif name == "BUILD":
            taken[0].attributes = taken[1]
            stack.append(taken[0])
        elif name.startswith(("TUPLE", "BINPERSID")):  # the latter names the storage of a tensor
            stack.append(tuple(taken))
        elif name.startswith(("APPEND", "SETITEM")):
            made, *items = taken
            if isinstance(made, list):
                made += items
            elif isinstance(made, dict):
                made.update(zip(items[::2], items[1::2], strict=True))
            stack.append(made)
        elif isinstance(argument, (str, int, float)):
            stack.append(argument)
        else:
            raise ValueError(f"a pickle with {name}")
    return None


def read_training_args(path: Path) -> dict[str, Any]:
    """The plain values among the settings that `torch.save` has written; empty if it did not write the file."""
    try:
        with zipfile.ZipFile(path) as archive:
            entry = next(entry for entry in archive.infolist() if entry.filename.endswith("data.pkl"))
            if entry.file_size > LARGEST_SETTINGS:
                return {}
            made = _plain_values(archive.read(entry))
    except Exception:  # the file can contain anything
        return {}
    held = made.attributes if isinstance(made, _Plain) and isinstance(made.attributes, dict) else {}
    plain = {name: each.value if isinstance(each, _Plain) else each for name, each in held.items()}
    return {name: each for name, each in plain.items() if isinstance(each, (str, int, float, list)) or each is None}

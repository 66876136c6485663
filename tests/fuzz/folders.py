"""Ways to damage a model folder."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.fuzz.values import JSON, TEXTS

Damage = tuple[str, Callable[[Path], object]]

BOOBY_TRAP = "import pathlib; pathlib.Path({path!r}).touch()\n"


def booby_trapped_pickle(trap: Path) -> bytes:
    """A pickle that creates a file when loaded."""
    path = str(trap).encode()
    return b"cbuiltins\nopen\n(S'" + path + b"'\nS'w'\ntR."


def copied(source: Path, folder: Path) -> Path:
    """A copy of a model folder, to be damaged."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    return folder


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    content = json.loads(path.read_bytes())
    edit(content)
    path.write_text(json.dumps(content), encoding="utf-8")


@st.composite
def damages(draw: st.DrawFn, source: Path) -> Damage:
    """A kind of damage to a folder, with its name."""
    files = sorted(path.name for path in source.iterdir())
    file = draw(st.sampled_from([*files, "config.json", "model.safetensors", "tokenizer.json"]))
    kinds = ["missing", "cut", "bytes", "folder", "empty", "text", "json"]
    kinds += {".json": ["value"] * 6, ".safetensors": ["tensor"] * 4 + ["header"] * 2}.get(Path(file).suffix, [])
    kind = draw(st.sampled_from(kinds))
    change = {
        "missing": _missing,
        "cut": _cut,
        "bytes": _bytes,
        "folder": lambda draw, path: _as_folder,
        "empty": lambda draw, path: lambda path: path.write_bytes(b""),
        "text": lambda draw, path: lambda path: path.write_bytes(b"\xef\xbb\xbf version https://git-lfs\n"),
        "json": _json,
        "value": _value,
        "tensor": _tensor,
        "header": _header,
    }[kind](draw, source / file)
    return f"{kind} {file}", lambda folder: change(folder / file)


def _missing(draw: st.DrawFn, path: Path) -> Callable[[Path], object]:
    return Path.unlink


def _cut(draw: st.DrawFn, path: Path) -> Callable[[Path], object]:
    size = draw(st.integers(0, path.stat().st_size))
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def _bytes(draw: st.DrawFn, path: Path) -> Callable[[Path], object]:
    at, new = draw(st.integers(0, min(path.stat().st_size, 4000))), draw(st.binary(min_size=1, max_size=8))

    def change(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[:at] + new + content[at + len(new) :])

    return change


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _json(draw: st.DrawFn, path: Path) -> Callable[[Path], object]:
    text = json.dumps(draw(JSON))
    return lambda path: path.write_text(text, encoding="utf-8")


def _value(draw: st.DrawFn, path: Path) -> Callable[[Path], object]:
    """Replace a value in a JSON file by one of any type."""
    value, deeper = draw(JSON), draw(st.booleans())
    content = json.loads(path.read_bytes())
    key = draw(st.sampled_from(sorted(content)) | TEXTS)
    inner = content.get(key)
    below = draw(st.sampled_from(sorted(inner))) if deeper and isinstance(inner, dict) and inner else None

    def edit(content: dict[str, Any]) -> None:
        if below is None:
            content[key] = value
        else:
            content[key][below] = value

    return lambda path: edit_json(path, edit)


def _tensor(draw: st.DrawFn, path: Path) -> Callable[[Path], object]:
    """Remove, rename, reshape or convert a tensor, or fill it with NaN."""
    name = draw(st.sampled_from(sorted(load_file(path))))
    what = draw(st.sampled_from(["lost", "renamed", "shorter", "wider", "int", "half", "nan", "scalar", "none"]))

    def change(path: Path) -> None:
        tensors = load_file(path)
        tensor = tensors.pop(name)
        made = {
            "lost": {},
            "renamed": {f"{name}.other": tensor},
            "shorter": {name: tensor[:-1].contiguous()},
            "wider": {name: torch.cat([tensor, tensor])},
            "int": {name: tensor.long()},
            "half": {name: tensor.half()},
            "nan": {name: torch.full_like(tensor, torch.nan)},
            "scalar": {name: torch.tensor(1.0)},
            "none": {name: torch.empty(0)},
        }[what]
        save_file({**tensors, **made}, path, metadata={"format": "pt"})

    return change


def _header(draw: st.DrawFn, path: Path) -> Callable[[Path], object]:
    """Replace the length of the header, up to the largest representable."""
    length = draw(st.sampled_from([0, 1, 7, 2**16, 2**32, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1))
    return lambda path: path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])

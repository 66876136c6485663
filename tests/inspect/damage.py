"""Changes of a run's folder after the run, drawn by seed."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from kedge.training.checkpoint.files import _canonical_json
from kedge_base.run_folder.receipt import HASH, encoded, line_hash

Damage = Callable[[Path, random.Random], str]
"""Changes a folder with `run/`, `other/` and the run's data, and returns how the first line that names it starts."""


def flip_byte(path: Path, draw: random.Random) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def change_row(path: Path, draw: random.Random) -> int:
    """Change a digit of a row of a log; returns its number."""
    rows = path.read_text("utf-8").splitlines(keepends=True)
    number = draw.randrange(len(rows))
    places = [place for place, letter in enumerate(rows[number]) if letter.isdigit()]
    place = draw.choice(places)
    digit = draw.choice([each for each in "0123456789" if each != rows[number][place]])
    rows[number] = rows[number][:place] + digit + rows[number][place + 1 :]
    path.write_text("".join(rows), "utf-8")
    return number + 1


def rearrange(path: Path, change: Callable[[list[str]], None]) -> None:
    rows = path.read_text("utf-8").splitlines(keepends=True)
    change(rows)
    path.write_text("".join(rows), "utf-8")


def weight(root: Path, draw: random.Random) -> str:
    path = draw.choice(sorted((root / "run").rglob("*.safetensors")))
    flip_byte(path, draw)
    return path.relative_to(root / "run").as_posix()


def metric(root: Path, draw: random.Random) -> str:
    return f"metrics.jsonl: row {change_row(root / 'run' / 'metrics.jsonl', draw)}"


def sample(root: Path, draw: random.Random) -> str:
    name = draw.choice(["samples.jsonl", "details.jsonl", "evaluations.jsonl"])
    return f"{name}: row {change_row(root / 'run' / name, draw)}"


def dropped_row(root: Path, draw: random.Random) -> str:
    number = draw.randrange(6)
    rearrange(root / "run" / "metrics.jsonl", lambda rows: rows.pop(number))
    return f"metrics.jsonl: row {number + 1} (update {number + 1}) is missing"


def swapped_rows(root: Path, draw: random.Random) -> str:
    one, other = draw.sample(range(6), 2)

    def swap(rows: list[str]) -> None:
        rows[one], rows[other] = rows[other], rows[one]

    rearrange(root / "run" / "metrics.jsonl", swap)
    return "metrics.jsonl: row"


def repeated_row(root: Path, draw: random.Random) -> str:
    rearrange(root / "run" / "metrics.jsonl", lambda rows: rows.insert(draw.randrange(6), draw.choice(rows)))
    return "metrics.jsonl: row"


def setting(root: Path, draw: random.Random) -> str:
    path = root / "run" / "config.yaml"
    text = path.read_text("utf-8")
    before, after = draw.choice(
        [("gamma: 1.0", "gamma: 0.9"), ("clip_range: 0.2", "clip_range: 0.3"), ("seed: 0", "seed: 1")]
    )
    assert before in text
    path.write_text(text.replace(before, after, 1), "utf-8")
    return f"config.yaml: row {text[: text.index(before)].count(chr(10)) + 1}"


def data(root: Path, draw: random.Random) -> str:
    path = draw.choice([root / "prompts.jsonl", root / "reward.py", root / "policy" / "model.safetensors"])
    flip_byte(path, draw)
    return str(path)


def chain_line(root: Path, draw: random.Random) -> str:
    flip_byte(root / "run" / "receipt.jsonl", draw)
    return "receipt.jsonl: line"


def dropped_line(root: Path, draw: random.Random) -> str:
    rearrange(root / "run" / "receipt.jsonl", lambda lines: lines.pop(draw.randrange(len(lines) - 1)))
    return "receipt.jsonl: line"


def new_hash(root: Path, draw: random.Random) -> str:
    """Change a line of the receipt, and give the line the hash that it should then have."""
    path = root / "run" / "receipt.jsonl"
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    number = draw.randrange(len(lines) - 1)
    found = json.dumps(lines[number])
    places = [
        place for place in range(len(found) - 80) if found[place].isdigit() and found[place - 1] in "0123456789abcdef"
    ]
    place = draw.choice(places)
    changed = json.loads(found[:place] + ("1" if found[place] == "0" else "0") + found[place + 1 :])
    del changed[HASH]
    lines[number] = {**changed, HASH: line_hash(lines[number - 1][HASH] if number else "", changed)}
    path.write_bytes(b"".join(encoded(line) + b"\n" for line in lines))
    return f"receipt.jsonl: line {number + 2}"


def swapped_checkpoint(root: Path, draw: random.Random) -> str:
    name = draw.choice(["update-000004", "update-000006"])
    shutil.rmtree(root / "run" / "checkpoints" / name)
    shutil.copytree(root / "other" / "checkpoints" / name, root / "run" / "checkpoints" / name)
    return f"checkpoints/{name}/manifest.json was changed"


def new_manifest(root: Path, draw: random.Random) -> str:
    """Change a checkpoint's weights, and its manifest so that it agrees."""
    folder = root / "run" / "checkpoints" / draw.choice(["update-000004", "update-000006"])
    weights = draw.choice(sorted(folder.rglob("*.safetensors")))
    flip_byte(weights, draw)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["sha256"]
    manifest["files"][weights.relative_to(folder).as_posix()]["sha256"] = hashlib.sha256(
        weights.read_bytes()
    ).hexdigest()
    (folder / "manifest.json").write_bytes(_canonical_json(manifest))
    return f"checkpoints/{folder.name}/manifest.json was changed"


def lost_checkpoint(root: Path, draw: random.Random) -> str:
    name = draw.choice(["update-000004", "update-000006"])
    shutil.rmtree(root / "run" / "checkpoints" / name)
    return f"checkpoints/{name}/manifest.json is missing"


def covered(root: Path) -> list[Path]:
    run = root / "run"
    free = {"receipt.jsonl", "README.md"}
    return sorted(path for path in run.rglob("*") if path.is_file() and path.name not in free and path.stat().st_size)


def truncated(root: Path, draw: random.Random) -> str:
    path = draw.choice(covered(root))
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])
    return path.relative_to(root / "run").as_posix()


def removed(root: Path, draw: random.Random) -> str:
    path = draw.choice(covered(root))
    path.unlink()
    return path.relative_to(root / "run").as_posix()


def added(root: Path, draw: random.Random) -> str:
    name = draw.choice(
        ["model/extra.safetensors", "checkpoints/update-000004/extra.bin", "critic_checks.jsonl", "notes.md"]
    )
    (root / "run" / name).write_text("{}\n", "utf-8")
    return name


DAMAGES: tuple[Damage, ...] = (
    *(weight, metric, sample, dropped_row, swapped_rows, repeated_row, setting, data, chain_line, dropped_line),
    *(new_hash, swapped_checkpoint, new_manifest, lost_checkpoint, truncated, removed, added),
)

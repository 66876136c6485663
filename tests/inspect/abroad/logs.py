"""Logs as other libraries write them, made by hand."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]

GRPO: Row = {
    "clip_ratio/region_mean": 0.01,
    "completions/clipped_ratio": 0.25,
    "completions/max_length": 60.0,
    "completions/mean_length": 40.0,
    "entropy": 0.5,
    "frac_reward_zero_std": 0.25,
    "grad_norm": 0.3,
    "kl": 0.02,
    "learning_rate": 1e-6,
    "loss": 0.01,
    "reward": 0.5,
    "reward_std": 0.4,
    "rewards/right/mean": 0.5,
    "rewards/right/std": 0.4,
}
PPO: Row = {
    "episode": 64,
    "loss/value_avg": 0.1,
    "lr": 1e-5,
    "objective/entropy": 20.0,
    "objective/kl": 2.0,
    "objective/non_score_reward": -0.1,
    "objective/rlhf_reward": 0.4,
    "objective/scores": 0.5,
    "policy/approxkl_avg": 0.01,
    "policy/clipfrac_avg": 0.02,
    "policy/entropy_avg": 0.6,
    "val/num_eos_tokens": 48,
}
VERL: Row = {
    "actor/entropy": 0.7,
    "actor/grad_norm": 0.2,
    "actor/pg_clipfrac": 0.01,
    "actor/pg_loss": 0.1,
    "actor/ppo_kl": 0.001,
    "critic/rewards/mean": 0.4,
    "critic/score/mean": 0.5,
    "response_length/clip_ratio": 0.25,
    "response_length/max": 512.0,
    "response_length/mean": 300.0,
}
OPENRLHF: Row = {
    "actor_lr": 1e-6,
    "kl": 0.01,
    "policy_loss": 0.1,
    "ppo_clip_ratio": 0.02,
    "response_length": 200.0,
    "reward": 0.5,
    "truncated": 0.1,
}
BASELINES: Row = {
    "rollout/ep_len_mean": 100.0,
    "rollout/ep_rew_mean": 50.0,
    "time/iterations": 1,
    "time/total_timesteps": 2048,
    "train/approx_kl": 0.01,
    "train/clip_fraction": 0.1,
    "train/entropy_loss": -0.6,
    "train/explained_variance": 0.5,
}


def write_state(folder: Path, rows: Iterable[Mapping[str, Any]], *, total: int = 0, step: int = 1) -> Path:
    """`trainer_state.json` with rows that have steps 1, 2, … unless they have one."""
    history = [{"step": number * step, **row} for number, row in enumerate(rows, 1)]
    folder.mkdir(parents=True, exist_ok=True)
    state = {"global_step": len(history), "log_history": history, "max_steps": total or len(history)}
    (folder / "trainer_state.json").write_text(json.dumps(state, indent=2, sort_keys=True))
    return folder


class Config:
    """Stands for a trainer's settings, whose class the reader does not have."""


class Strategy(str):
    """Stands for an enumeration."""

    def __reduce__(self) -> Any:
        return Strategy, (str(self),)


def write_args(folder: Path, **settings: Any) -> Path:
    """`training_args.bin`, as `torch.save` writes it."""
    made = Config()
    made.__dict__.update(settings)
    text = io.BytesIO()
    pickle.dump(made, text, protocol=2)
    with zipfile.ZipFile(folder / "training_args.bin", "w") as archive:
        archive.writestr("training_args/data.pkl", text.getvalue())
    return folder


def varint(value: int) -> bytes:
    """A variable-length integer of a protocol buffer."""
    more = value >> 7
    return bytes([value & 127 | (128 if more else 0)]) + (varint(more) if more else b"")


def message(*fields: tuple[int, Any]) -> bytes:
    """A protocol buffer of integers, floats (of 4 bytes), texts and messages."""
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts.append(varint(number << 3) + varint(value))
        elif isinstance(value, float):
            parts.append(varint(number << 3 | 5) + struct.pack("<f", value))
        else:
            data = value.encode() if isinstance(value, str) else value
            parts.append(varint(number << 3 | 2) + varint(len(data)) + data)
    return b"".join(parts)


def event(step: int, *values: bytes) -> bytes:
    """A record of TensorBoard: length, checksum, event, checksum."""
    data = message((2, step), (5, b"".join(message((1, value)) for value in values)))
    return struct.pack("<Q", len(data)) + b"abcd" + data + b"efgh"


def scalar(tag: str, value: float) -> bytes:
    """A scalar of a summary."""
    return message((1, tag), (2, float(value)))


def events(rows: Iterable[Mapping[str, float]]) -> bytes:
    """An event file with a row per step."""
    return b"".join(
        event(step, *(scalar(name, value) for name, value in row.items())) for step, row in enumerate(rows, 1)
    )


def leveldb(records: Iterable[bytes]) -> bytes:
    """The form of a W&B file: records in blocks of 32 KiB, split where a block ends."""
    data = b":W&B" + bytes([0xE1, 0xBE, 0])
    for record in records:
        first = True
        while first or record:
            left = 32768 - len(data) % 32768
            if left < 7:
                data += bytes(left)
                left = 32768
            part, record = record[: left - 7], record[left - 7 :]
            kind = (1 if not record else 2) if first else (4 if not record else 3)
            data += bytes(4) + struct.pack("<HB", len(part), kind) + part
            first = False
    return data


def history(row: Mapping[str, Any]) -> bytes:
    """A record of a W&B file with a row."""
    return message((2, b"".join(message((1, message((1, name), (16, json.dumps(v))))) for name, v in row.items())))


def settings_record(settings: Mapping[str, Any]) -> bytes:
    """The record of a W&B file that starts a run, with its configuration."""
    items = b"".join(message((1, message((1, name), (16, json.dumps(v))))) for name, v in settings.items())
    return message((17, message((4, items))))


def over(count: int, row: Mapping[str, Any], **changes: Callable[[int], Any]) -> list[Row]:
    """The same row several times, with values that depend on the number of the row."""
    renamed = {name.replace("__", "/"): change for name, change in changes.items()}
    return [{**row, **{name: change(number) for name, change in renamed.items()}} for number in range(count)]

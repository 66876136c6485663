"""Values of options: a reward with its weight, and prompts that are texts rather than sources."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Any

import typer

from kedge.errors import ConfigError
from kedge.system.texts import printable

__all__ = ["IN_MEMORY", "announced", "literal_prompts", "weighted_rewards"]

IN_MEMORY = "python:in_memory"
"""The entry in `config.yaml` for prompts that are passed to the pipeline as texts."""

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[^\s:]+){0,2}")
_DATA_FILE = re.compile(r"\S.*\.(jsonl|ndjson|json|parquet|csv|tsv)(\.(gz|bz2|xz|zst))?(:\S+)?", re.IGNORECASE)


def weighted_rewards(rewards: Sequence[str] | None) -> list[Any] | None:
    """The terms of `--reward`: `file.py:f=0.5` is the reward `file.py:f` with the weight 0.5.

    A text that names an existing file or folder has no weight, whatever it contains.

    Raises:
        ConfigError: What follows the last `=` is not a number.
    """
    return None if rewards is None else [_term(reward) for reward in rewards]


def _term(reward: str) -> str | dict[str, Any]:
    source, sign, text = reward.rpartition("=")
    file, _, function = reward.rpartition(":")
    if not sign or os.path.exists(reward) or ("=" not in function and os.path.exists(file)):
        return reward
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not source or not math.isfinite(weight):
        raise ConfigError(
            f"--reward {reward}: what follows the = is a weight and must be a number, as in {source or 'REWARD'}=0.5; "
            "there is no file with this name"
        )
    return {"source": source, "weight": weight}


def literal_prompts(prompts: Sequence[str] | None) -> list[str] | None:
    """The texts of `--prompts`, if they are texts; None if they name files, folders or hub ids.

    A value is a text if nothing on the disk has that name, it does not end like a data file, and it cannot be a hub id
    because it has a space or another character that ids do not have.

    Raises:
        ConfigError: Some are texts and some are names.
    """
    texts = [prompt for prompt in prompts or () if _is_text(prompt)]
    if not texts:
        return None
    if len(texts) < len(prompts or ()):
        name = next(prompt for prompt in prompts or () if prompt not in texts)
        raise ConfigError(
            f"--prompts: {texts[0]!r} is a text and {name!r} the name of a file or data set; give one kind"
        )
    return texts


def announced(texts: list[str] | None) -> list[str] | None:
    """The texts, after a line that says that they are taken as texts."""
    if texts:
        first = texts[0] if len(texts[0]) <= 40 else f"{texts[0][:40]}…"
        more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
        typer.echo(
            f"--prompts {printable(first)!r}{more}: taken as the text of a prompt; no file has that name", err=True
        )
    return texts


def _is_text(prompt: str) -> bool:
    if os.path.lexists(prompt) or _DATA_FILE.fullmatch(prompt) or prompt.startswith(("/", "./", "../", "~")):
        return False
    return _HUB_ID.fullmatch(prompt) is None

"""`kedge.json`: what a model's folder says about how kedge made it, read by `kedge chat`, cards and `kedge push`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

from transformers.utils.hub import cached_file

from kedge.data.chat import PromptForm
from kedge.errors import ModelError
from kedge.models.pretrained import quiet_transformers
from kedge.models.run_models import find_model
from kedge.system.texts import printable
from kedge.system.version import __version__

__all__ = ["ORIGIN_FILE", "Origin", "read_origin"]

ORIGIN_FILE = "kedge.json"
"""In a model's folder. It marks models that kedge made, also on the hub."""

MAX_BYTES = 2**20


@dataclass(frozen=True)
class Origin:
    """How a model was made.

    Attributes:
        stage: The stage that trained it.
        base_model: The model that it was trained from: a hub id, or the name of a folder.
        hub_base: The hub id at the start of the chain of stages; None if it started from a local folder.
        prompt_form: The form of the prompts that it was trained on; None if unknown.
        kedge: The version of kedge.
    """

    stage: str
    base_model: str
    hub_base: str | None = None
    prompt_form: PromptForm | None = None
    kedge: str = __version__

    def write(self, folder: Path) -> None:
        """Write `kedge.json`."""
        text = json.dumps(asdict(self), ensure_ascii=False, indent=2)
        (folder / ORIGIN_FILE).write_bytes(f"{text}\n".encode("utf-8", "backslashreplace"))


def read_origin(source: str | os.PathLike[str], *, hub: bool = True) -> Origin | None:
    """The origin of a model; None if kedge did not make it, or the file is damaged.

    Args:
        source: Its folder, run or hub id.
        hub: Ask the hub if it is no folder.
    """
    try:
        name = find_model(os.fspath(source))
        path = Path(name) / ORIGIN_FILE if os.path.isdir(name) else _from_hub(name) if hub else None
        if path is None or path.stat().st_size > MAX_BYTES:
            return None
        return _parsed(json.loads(path.read_bytes()))
    except (ModelError, OSError, ValueError, RecursionError):
        return None


def _parsed(values: object) -> Origin | None:
    """An origin from the content of a file, which may come from anyone."""
    if not isinstance(values, Mapping):
        return None
    entries = cast("Mapping[Any, Any]", values)
    texts = {name: printable(entry)[:200] for name, entry in entries.items() if isinstance(entry, str)}
    if "stage" not in texts or "base_model" not in texts:
        return None
    form = texts.get("prompt_form")
    return Origin(
        texts["stage"],
        texts["base_model"],
        texts.get("hub_base"),
        cast("PromptForm", form) if form in get_args(PromptForm) else None,
        texts.get("kedge", ""),
    )


def _from_hub(name: str) -> Path | None:
    try:
        with quiet_transformers():
            found = cached_file(
                name,
                ORIGIN_FILE,
                _raise_exceptions_for_gated_repo=False,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
    except (OSError, ValueError):  # not a hub id, or no such repository
        return None
    return None if found is None else Path(found)

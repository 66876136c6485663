"""Records how a model was made in its `kedge.json`; removes details of this machine from names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, cast, get_args

from transformers.utils.hub import cached_file

from kedge.data.chat import PromptForm
from kedge.models.sources import find_model, quiet_transformers
from kedge_base.errors import ModelError
from kedge_base.texts import names_function, names_judge, printable
from kedge_base.version import __version__

CARD = "README.md"
ORIGIN_FILE = "kedge.json"
"""File in a model's folder that marks models that kedge made, also on the hub."""

MAX_BYTES = 2**20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


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
    """Read the origin of a model; None if kedge did not make it, or the file is damaged.

    Args:
        source: Its folder, run or hub id.
        hub: Look it up on the hub if there is no such folder.
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
    """Parse an origin from the content of a file, which is untrusted."""
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


class Card(Protocol):
    """The model card that goes with a saved model."""

    @property
    def origin(self) -> Origin:
        """The content of `kedge.json`."""
        ...

    def render(self, *, score_shift: str = "", is_adapter: bool = False) -> str:
        """The card as Markdown.

        Args:
            score_shift: For a reward model, the entry of its configuration that is subtracted from the score.
            is_adapter: Its folder has an adapter.
        """
        ...


def public_name(source: str | os.PathLike[str]) -> str:
    """Return a model's, file's or function's name without details of this machine.

    Hub ids and relative paths are unchanged. An absolute path becomes relative to the working directory, or is reduced
    to its last part. A judge behind an API loses its address.
    """
    name = os.fspath(source)
    if names_judge(name):
        return name.partition("@http")[0]
    if names_function(name) and ":" in name and not os.path.isdir(name):
        file, _, function = name.rpartition(":")
        return f"{public_name(file)}:{function}" if os.sep in file else name
    path = Path(os.path.expanduser(name))
    if not path.is_absolute():
        return name
    if path.is_relative_to(Path.cwd()) and path != Path.cwd():
        return path.relative_to(Path.cwd()).as_posix()
    return f"{path.parent.name}/{path.name}" if path.name == "model" else path.name


def public_settings(value: Any) -> Any:
    """Replace absolute paths by public names in settings, or in one value."""
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        return {public_settings(name): public_settings(entry) for name, entry in entries.items()}  # data.mix: sources
    if isinstance(value, list):
        return [public_settings(entry) for entry in cast("list[Any]", value)]
    if isinstance(value, str) and (value.startswith("~") or os.path.isabs(value)):
        return public_name(value)
    return value


def hub_id(source: str) -> str | None:
    """Return the name as a hub id, without a split; None for a local path."""
    name = source.partition(":")[0]
    is_local = os.path.exists(os.path.expanduser(source)) or os.path.exists(os.path.expanduser(name))
    return name if _HUB_ID.fullmatch(name) and not is_local else None

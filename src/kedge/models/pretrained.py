"""What every role's loading shares: one safe call into transformers, dropout off, activations in one kernel."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.activations import FastGELUActivation, NewGELUActivation
from transformers.utils import logging as transformers_logging

from kedge.errors import ModelError

__all__ = [
    "context_length",
    "disable_dropout",
    "fit_embedding",
    "fuse_activations",
    "load_pretrained",
    "loading_reason",
    "model_width",
]

MOST_LAYERS = 10_000
"""Each is built before the weights can show that it is not there."""

FEWEST = 4
"""Tokens that a loaded model is tried out with."""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and load reports off the terminal: what matters in them is checked by us."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def check_source(source: str | Path) -> str:
    """A model folder's path or hub id as a string.

    Raises:
        ModelError: The source is written like a path, and no such folder exists.
    """
    path, folder = Path(source), os.path.expanduser(source)
    looks_like_path = path.is_absolute() or str(source).startswith((".", "~")) or len(path.parts) > 2
    if looks_like_path and not os.path.isdir(folder):
        raise ModelError(
            f"model {str(source)!r}: no such folder; give a folder with config.json or a hub id (org/name)"
        )
    if os.path.isdir(folder) and not os.path.isfile(os.path.join(folder, "config.json")):
        raise ModelError(f"model folder {str(source)!r} has no config.json; give a folder saved by save_pretrained()")
    return folder if os.path.isdir(folder) else str(source)


def loading_reason(error: Exception) -> str:
    """What an error of transformers' says, on one line, or what it means."""
    words = " ".join(str(error).split())
    if "trust_remote_code" in words:
        return "it needs code that it brings along, which runs with runtime.trust_remote_code=true alone"
    return words[:300] or type(error).__name__


def model_width(source: str | Path, *, trust_remote_code: bool = False) -> int:
    """The hidden size that a model's configuration names, without loading its weights.

    Raises:
        ModelError: There is no configuration that transformers knows.
    """
    config = _load_config(check_source(source), trust_remote_code=trust_remote_code)
    return int(config.get_text_config().hidden_size)


def load_pretrained(
    auto_class: Any, source: str | Path, *, trust_remote_code: bool = False, **settings: Any
) -> tuple[PreTrainedModel, set[str]]:
    """Load float32 weights from safetensors, and say which of the model's weights the source did not hold.

    Args:
        auto_class: An `AutoModel…` class of transformers.
        source: A folder or hub id.
        trust_remote_code: Run Python code that the model folder brings along.
        settings: Handed to `from_pretrained`.

    Returns:
        The model, with dropout off, and the names of the weights that were newly initialised.

    Raises:
        ModelError: Nothing loadable there; weights that are pickle only, of the wrong shape, or no finite numbers.
    """
    name = check_source(source)
    _check_weight_files(name)
    _load_config(name, trust_remote_code=trust_remote_code)
    try:
        with quiet_transformers():
            model, report = auto_class.from_pretrained(
                name,
                dtype=torch.float32,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they are told, and refused below
                trust_remote_code=trust_remote_code,
                **settings,
            )
    except Exception as error:  # a stranger's files: each library that meets them has errors of its own
        raise ModelError(f"model {name!r} cannot be loaded: {loading_reason(error)}") from error
    if report["mismatched_keys"]:
        weight, saved, expected = sorted(report["mismatched_keys"])[0]
        raise ModelError(
            f"model {name!r}: the weights' shapes differ from config.json, first: {weight} is {tuple(saved)}, "
            f"expected {tuple(expected)}"
        )
    if broken := next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), None):
        raise ModelError(f"model {name!r}: the weights hold NaN or infinity, first: {broken}")
    disable_dropout(model)
    fuse_activations(model)
    return model, set(report["missing_keys"])


def _load_config(name: str, *, trust_remote_code: bool) -> PreTrainedConfig:
    """A model's configuration, once nothing in it is beyond reason or fetches code."""
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
            text = config.get_text_config()
            num_layers, kernel = int(getattr(text, "num_hidden_layers", 0)), str(config._attn_implementation)
            int(text.hidden_size)
    except Exception as error:  # a stranger's files: each library that meets them has errors of its own
        raise ModelError(f"model {name!r}: its config.json cannot be used: {loading_reason(error)}") from error
    if num_layers > MOST_LAYERS:
        raise ModelError(f"model {name!r}: its config.json names {num_layers:,} layers; no model has that many")
    if "/" in kernel and not trust_remote_code:
        raise ModelError(f"model {name!r}: its config.json asks for the code of {kernel!r}: runtime.trust_remote_code")
    return config


def _check_weight_files(source: str) -> None:
    """Refuse a folder whose list of weight files leads to anything but safetensors in the folder itself."""
    index = Path(source) / "model.safetensors.index.json"
    if not os.path.isfile(index):
        return
    try:
        files = set(json.loads(index.read_bytes())["weight_map"].values())
        foreign = sorted(file for file in files if file != Path(file).name or not file.endswith(".safetensors"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"model {source!r}: its {index.name} cannot be read") from error
    if foreign:
        raise ModelError(
            f"model {source!r}: {index.name} names {foreign[0]!r}; weights are .safetensors files beside it"
        )


def context_length(model: PreTrainedModel) -> int | None:
    """The most tokens that one row may hold, or None where the architecture sets no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None


def fit_embedding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Grow the embedding by the pad token that `load_tokenizer` may have added; refuse any other gap.

    Raises:
        ModelError: The tokenizer has tokens that the model has no embedding for, or one of them has hardly anything.
    """
    rows = int(cast(Tensor, model.get_input_embeddings().weight).shape[0])
    length = context_length(model)
    if rows < FEWEST or (length is not None and length < FEWEST):
        raise ModelError(
            f"the model embeds {rows} tokens and reads {length} at a time; it takes {FEWEST} to try it out"
        )
    needed = max(tokenizer.get_vocab().values(), default=0) + 1
    if needed > rows + 1 or (needed == rows + 1 and tokenizer.pad_token_id != rows):
        raise ModelError(
            f"the tokenizer has {needed} tokens but the model embeds only {rows}; they do not belong together"
        )
    if needed > rows:
        with quiet_transformers():
            model.resize_token_embeddings(needed, mean_resizing=False)
    model.config.pad_token_id = tokenizer.pad_token_id


def disable_dropout(model: PreTrainedModel) -> None:
    """Set every dropout of the model to 0, in its modules, their attributes and its configuration.

    Dropout makes two forward passes differ, so that ratios are not 1 before the first step. `eval()` alone would hold
    only until somebody calls `train()`.

    Source: spec §3.12 (S3, N+).
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    for config in (model.config, model.config.get_text_config()):
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
    model.eval()


def fuse_activations(model: nn.Module) -> None:
    """Compute the tanh form of GELU in one kernel instead of in eight, each with a result that is kept for backward.

    GPT-2, Phi and their kin spell it out. The function is the same; the weights are not touched.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, (NewGELUActivation, FastGELUActivation)):
                setattr(module, name, nn.GELU(approximate="tanh"))

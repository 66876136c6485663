"""Safe loading of transformers models: safetensors only, checked weights, no dropout, fused activations."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.activations import FastGELUActivation, NewGELUActivation
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from kedge.models.adapters import AdapterFolder, merge_adapter
from kedge.models.first_rank import Loaded, load_on_first
from kedge.models.sources import (
    MAX_LAYERS,
    base_source,
    check_source,
    find_adapter,
    loading_reason,
    local_folder,
    quiet_transformers,
)
from kedge.ranks import ALONE, Ranks
from kedge_base.errors import ModelError

NORMALIZATION_KEY = "kedge_score_shift"
"""Key of the score shift in config.json; kedge writes it for every reward model, even if the shift is 0."""
PRIVILEGED_KEY = "kedge_privileged"
"""Key of the template of a critic's privileged information."""

HAS_NEW_ROW = "has_new_row"
"""Attribute of an embedding that grew by a row for the pad token, which its source's files lack."""

CONSTANTS = re.compile(
    r"rotary|inv_freq|(^|\.)(masked_bias|causal_mask|position_ids|token_type_ids|version)$|(attn|attention)\.bias$"
)
"""Names of masks, positions and similar tensors in older files, which current code computes."""

MIN_TOKENS = 4
"""Smallest vocabulary and context length for the trial passes over a loaded model."""


def model_width(source: str | Path, *, trust_remote_code: bool = False) -> int:
    """The hidden size in a model's configuration, without loading its weights.

    Raises:
        ModelError: transformers cannot load the configuration.
    """
    config = load_config(base_source(source), trust_remote_code=trust_remote_code)
    return int(config.get_text_config().hidden_size)


def load_pretrained(
    auto_class: Any, source: str | Path, *, trust_remote_code: bool = False, ranks: Ranks = ALONE, **settings: Any
) -> Loaded:
    """Load float32 weights from safetensors, and report the weights missing from the source.

    Args:
        auto_class: An `AutoModel…` class of transformers.
        source: A folder or hub id.
        trust_remote_code: Run Python code from the model folder.
        ranks: If they shard their models, only the first loads the weights; the others build the model without them.
        settings: Passed to `from_pretrained`.

    Returns:
        The model, with dropout disabled, and the names of the newly initialized weights.

    Raises:
        ModelError: The model cannot be loaded, or its weights are pickles only, of the wrong shape, or non-finite.
    """
    name = check_source(source)
    base = base_source(name)
    check_weight_files(base)
    load_config(base, trust_remote_code=trust_remote_code)

    def load() -> Loaded:
        return _load_weights(auto_class, name, trust_remote_code=trust_remote_code, **settings)

    def build() -> PreTrainedModel:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code, **settings)
            return auto_class.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)

    loaded = load_on_first(load, build, ranks) if ranks.is_sharded else load()
    disable_dropout(loaded.model)
    vars(loaded.model)["source_settings"].update(_saved_formats(loaded.model, base))
    fuse_activations(loaded.model)
    for config in configs_of(loaded.model):  # overrides config.json
        config.return_dict = True  # kedge reads outputs by name
        config.output_hidden_states = False
        config.output_attentions = False  # which transformers refuses to save beside fused attention
    return loaded


def _load_weights(auto_class: Any, name: str, *, trust_remote_code: bool, **settings: Any) -> Loaded:
    """Load a model and check its weights; see `load_pretrained`."""
    if (adapter := find_adapter(name)) is not None:
        base = _load_weights(auto_class, check_source(adapter.base), trust_remote_code=trust_remote_code, **settings)
        with quiet_transformers():
            model, held = merge_adapter(base.model, adapter)
        take_settings(model, adapter, held)
        return Loaded(model, base.missing - held)
    try:
        with quiet_transformers():
            model, report = auto_class.from_pretrained(
                name,
                dtype=torch.float32,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported, and refused below
                trust_remote_code=trust_remote_code,
                **settings,
            )
    except Exception as error:  # untrusted files: every library has its own errors
        _check_quantization(name, load_config(name, trust_remote_code=trust_remote_code))
        raise ModelError(f"model {name!r} cannot be loaded: {loading_reason(error)}") from error
    if getattr(model, "is_quantized", False):
        _check_quantization(name, model.config)
    if report["mismatched_keys"]:
        weight, saved, expected = sorted(report["mismatched_keys"])[0]
        if "num_labels" in settings and [*expected] == [settings["num_labels"], *saved[1:]]:
            raise ModelError(f"model {name!r}: a reward model needs exactly one label; this model has {saved[0]}")
        raise ModelError(
            f"model {name!r}: weight shapes differ from config.json; first: {weight} is {tuple(saved)}, "
            f"expected {tuple(expected)}"
        )
    missing = set(report["missing_keys"])
    if unread := _unread(model, report["unexpected_keys"], missing):
        more = f" and {len(unread) - 1:,} more" if unread[1:] else ""
        raise ModelError(
            f"model {name!r}: its files have {unread[0]}{more}, for which {type(model).__name__} has no place with "
            "this config.json; correct config.json, or, to leave them out, load and save the model once "
            "with transformers"
        )
    if broken := next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), None):
        raise ModelError(f"model {name!r}: the weights contain NaN or infinity; first: {broken}")
    _note_untied(model)
    return Loaded(model, missing)


def _unread(model: PreTrainedModel, unexpected: Collection[str], missing: Collection[str]) -> list[str]:
    """Find names in a model's files that belong to a part of the model but have no place in it.

    Without them, it is not the model that was saved; its attention may lack biases, for example. Ignored, as in
    transformers, are:

    - parts that the model lacks altogether, such as a pooler, a vision tower or another head
    - constants
    - layers after the last one, which predict additional tokens
    - weights of a part whose own weights are not in the files, such as a different kind of head: those count as missing
    """
    parts = dict(model.named_modules())
    buffers = dict(model.named_buffers())
    found: list[str] = []
    for name in sorted(unexpected):
        whole = name if _owner(parts, name) else f"{model.base_model_prefix}.{name}"  # a trunk's files lack the prefix
        owner = _owner(parts, whole)
        is_constant = whole in buffers or CONSTANTS.search(name) is not None
        has_weights = next(parts[owner].parameters(recurse=False), None) is not None
        is_in_trunk = owner.startswith(model.base_model_prefix)
        is_other_part = isinstance(parts[owner], PreTrainedModel) or not (is_in_trunk or has_weights)
        is_missing = any(each.startswith(f"{owner}.") for each in missing)
        if not (is_constant or is_other_part or is_missing or _predicts_further(model.config, name)):
            found.append(name)
    return found


def _owner(parts: Mapping[str, nn.Module], name: str) -> str:
    """The innermost module that a weight's name belongs to; empty for the model itself."""
    while name not in parts:
        name = name.rpartition(".")[0]
    return name


def _predicts_further(config: PreTrainedConfig, name: str) -> bool:
    """True for a weight of a multi-token prediction layer, as in DeepSeek's models."""
    config = config.get_text_config()
    number = re.search(r"\blayers\.(\d{1,6})\.", name)
    extra = getattr(config, "num_nextn_predict_layers", None)
    return number is not None and type(extra) is int and 0 <= int(number[1]) - config.num_hidden_layers < extra


def _note_untied(model: PreTrainedModel) -> None:
    """Turn off tying in the configuration of a model whose files have an output layer that differs from the embedding.

    transformers loads both, but would tie them, as config.json says, once the embedding grows.
    """
    if model.get_output_embeddings() is None or getattr(model, "all_tied_weights_keys", None) != {}:
        return
    weights = [weight for _, weight in model.named_parameters(remove_duplicate=False)]
    if len(weights) == len(set(weights)):  # the model's own code does not tie weights either
        for config in configs_of(model):
            config.tie_word_embeddings = False


def _check_quantization(name: str, config: PreTrainedConfig) -> None:
    """Reject a model whose config.json says that it is quantized; merging tools may leave this entry behind."""
    entry = getattr(config, "quantization_config", None)
    if entry is None:
        return
    method = entry.get("quant_method") if isinstance(entry, dict) else getattr(entry, "quant_method", None)
    raise ModelError(
        f"model {name!r}: config.json has quantization_config ({getattr(method, 'value', method)}), and kedge trains "
        "16- and 32-bit weights; if the files hold those (a merged model), delete this entry, else use the model "
        "that was quantized"
    )


def take_settings(model: PreTrainedModel, adapter: AdapterFolder, held: Collection[str]) -> None:
    """Apply an adapter's other settings to a model: the defaults of `generate`, the shift of its scores.

    Args:
        model: The base.
        adapter: The adapter.
        held: Names of the weights that the adapter contains in full.
    """
    if adapter.generation_config is not None:
        model.generation_config = adapter.generation_config
    if (template := adapter.privileged) is not None:
        setattr(model.config, PRIVILEGED_KEY, template)
    if (shift := adapter.score_shift) is not None:
        setattr(model.config, NORMALIZATION_KEY, shift)
    elif any(not name.startswith(f"{model.base_model_prefix}.") for name in held) and hasattr(
        model.config, NORMALIZATION_KEY
    ):
        delattr(model.config, NORMALIZATION_KEY)  # the shift of the base's own head


def load_config(name: str, *, trust_remote_code: bool) -> PreTrainedConfig:
    """Load a model's configuration; reject absurd sizes and attention kernels from a hub."""
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
            text = config.get_text_config()
            num_layers = int(getattr(text, "num_hidden_layers", 1))
            kernel = str(config._attn_implementation)
            width = int(text.hidden_size)
    except Exception as error:  # untrusted files: every library has its own errors
        raise ModelError(f"model {name!r}: config.json cannot be used: {loading_reason(error)}") from error
    if getattr(text, "attention_type", None) == "block_sparse":
        raise ModelError(
            f"model {name!r}: its block-sparse attention depends on the length of the batch; set attention_type to "
            "original_full in config.json"
        )
    if "mamba" in text.model_type and getattr(text, "rescale_prenorm_residual", False):
        raise ModelError(
            f"model {name!r}: config.json has rescale_prenorm_residual, with which transformers divides trained "
            "weights each time that it loads them; set it to false"
        )
    if num_layers < 1 or width < 1:
        raise ModelError(
            f"model {name!r}: config.json has num_hidden_layers={num_layers} and hidden_size={width}; both must be "
            "at least 1"
        )
    if num_layers > MAX_LAYERS:
        raise ModelError(f"model {name!r}: config.json has {num_layers:,} layers; at most {MAX_LAYERS:,} are supported")
    if "/" in kernel and not trust_remote_code:
        raise ModelError(
            f"model {name!r}: config.json loads code from {kernel!r}; set runtime.trust_remote_code=true to run it"
        )
    return config


def check_weight_files(source: str) -> None:
    """Reject a folder that has only pickles, or an index that refers to anything but safetensors files in the folder.

    Raises:
        ModelError: The folder is rejected.
    """
    pickles = sorted(Path(source).glob("pytorch_model*.bin"))
    if pickles and not any(Path(source).glob("model*.safetensors*")):
        raise ModelError(
            f"model {source!r}: {pickles[0].name} is a pickle, which can run any code when it is read, so it is "
            "refused; convert it to safetensors: load the folder with transformers, and save model and tokenizer by "
            "save_pretrained()"
        )
    index = Path(source) / "model.safetensors.index.json"
    if not os.path.isfile(index):
        return
    try:
        files = set(json.loads(index.read_bytes())["weight_map"].values())
        foreign = sorted(file for file in files if file != Path(file).name or not file.endswith(".safetensors"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"model {source!r}: {index.name} cannot be read") from error
    if foreign:
        raise ModelError(
            f"model {source!r}: {index.name} refers to {foreign[0]!r}; expected .safetensors files in the same folder"
        )


def _saved_formats(model: PreTrainedModel, source: str) -> dict[str, Any]:
    """Torch's name of the most common number format in a model's files, float32 for formats below 16 bits; and the
    names in the model of the weights in other formats, which that one may round.
    """
    folder = local_folder(source)
    sizes = Counter[str]()
    formats: dict[str, str] = {}
    for path in folder.glob("model*.safetensors") if folder is not None else []:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                weight = file.get_slice(name)
                formats[name] = weight.get_dtype()
                sizes[formats[name]] += math.prod(weight.get_shape())
    kinds = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    most = max(sizes, key=sizes.__getitem__, default="")
    others = [name for name, kind in formats.items() if kind in kinds and kind != most]
    return {"dtype": kinds.get(most, "float32"), "exact_weights": _names_in(model, others)}


def _names_in(model: PreTrainedModel, stored: Sequence[str]) -> list[str]:
    """The names that a model gives to weights of its files; transformers renames some, and stacks experts."""
    steps: list[Any] = getattr(model, "_weight_conversions", None) or []
    renamings = [each for each in steps if isinstance(each, WeightRenaming)]
    converters = [each for each in steps if isinstance(each, WeightConverter)]
    own = model.state_dict()
    return [rename_source_key(name, renamings, converters, model.base_model_prefix, own)[0] for name in stored]


def configs_of(model: PreTrainedModel) -> tuple[PreTrainedConfig, PreTrainedConfig]:
    """A model's configuration and that of its text part, which may be the same."""
    return model.config, model.config.get_text_config()


def context_length(model: PreTrainedModel) -> int | None:
    """Maximum tokens per row; None if the architecture has no limit."""
    return least(configured_length(model.config), *_numbered_positions(model))


def least(*limits: int | None) -> int | None:
    """The smallest limit that is set; None without one."""
    return min((int(limit) for limit in limits if limit is not None), default=None)


def configured_length(config: PreTrainedConfig) -> int | None:
    """Maximum tokens per row according to config.json; None if it sets no limit."""
    config = config.get_text_config()
    # MiniMax-M3 attends to the best blocks of tokens. It counts blocks from the left, padding included, so results are
    # only right while a row has no more blocks than it attends to. No short trial reveals that.
    blocks = (getattr(config, "index_topk_blocks", None) or 0) * getattr(config, "index_block_size", 0)
    limits = (getattr(config, "max_position_embeddings", None), blocks)
    return least(*(limit for limit in limits if limit and limit > 0))


def _numbered_positions(model: PreTrainedModel) -> list[int]:
    """Usable positions of learned position embeddings whose first ones are reserved for padding (RoBERTa's family)."""
    return [
        table.num_embeddings - table.padding_idx - 1
        for name, table in model.named_modules()
        if name.endswith("embeddings.position_embeddings")
        and isinstance(table, nn.Embedding)
        and table.padding_idx is not None
    ]


def rope_switch(model: PreTrainedModel) -> int | None:
    """Maximum row length for the short factors of a longrope embedding (Phi-3, Phi-4); None for other embeddings.

    Beyond it, transformers switches every token in the batch to the long factors, so rows on both sides must not share
    a batch, and a row must not cross it while it is sampled.

    Source: transformers, `modeling_rope_utils.py`, `dynamic_rope_update`.
    """
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [each for each in (rope, *rope.values()) if isinstance(each, dict)]  # one, or by kind of layer
    return least(*(each["original_max_position_embeddings"] for each in kinds if each.get("rope_type") == "longrope"))


def num_embeddings(model: PreTrainedModel) -> int:
    """Number of token embeddings of a model.

    Raises:
        ModelError: It has no token embedding.
    """
    # A wrapper, such as that of BART's decoder, does not expose the embedding inside.
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            with suppress(NotImplementedError, AttributeError):
                return len(cast(Tensor, part.get_input_embeddings().weight))
    raise ModelError(f"{type(model).__name__} has no embedding of tokens; use another architecture")


def fit_embedding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add a row of zeros to the embedding for a pad token that `load_tokenizer` added; reject any other mismatch.

    Raises:
        ModelError: The model has no token embedding or one with too few rows, or is too small for a trial pass.
    """
    rows = num_embeddings(model)
    length = context_length(model)
    if rows < MIN_TOKENS or (length is not None and length < MIN_TOKENS):
        raise ModelError(
            f"the model is too small: {rows} embeddings, context length {length}; both must be at least {MIN_TOKENS}"
        )
    tokens = {token: text for text, token in tokenizer.get_vocab().items()}
    needed = max(tokens, default=0) + 1
    if needed > rows + 1 or (needed == rows + 1 and tokenizer.pad_token_id != rows):
        beyond = sorted(token for token in tokens if token >= rows and token != tokenizer.pad_token_id)
        if beyond and set(beyond) <= set(tokenizer.added_tokens_decoder):
            raise ModelError(
                f"the tokenizer has {len(beyond)} added token{'s' * (len(beyond) > 1)} without an embedding, first "
                f"{tokens[beyond[0]]!r}: the model has {rows} embeddings; grow it by "
                f"model.resize_token_embeddings({beyond[-1] + 1}) and save it, or remove the tokens"
            )
        raise ModelError(
            f"the tokenizer has {needed} tokens but the model has {rows} embeddings; use the model's own tokenizer"
        )
    if needed > rows:
        with quiet_transformers():
            model.resize_token_embeddings(needed, mean_resizing=False)
        for layer in filter(None, (model.get_input_embeddings(), model.get_output_embeddings())):
            # Zeros, because a critic recognizes its policy by equal weights.
            nn.init.zeros_(layer.get_parameter("weight")[rows:])
            setattr(layer, HAS_NEW_ROW, True)
    for config in configs_of(model):
        config.pad_token_id = tokenizer.pad_token_id


def disable_dropout(model: PreTrainedModel) -> None:
    """Set every dropout to 0, in modules, attributes and configuration.

    With dropout, two forward passes differ, so ratios are not 1 before the first step. `eval()` would only last until
    the next `train()`. Saving restores the dropout: see `source_settings` in `save_model`.

    Source: spec §3.12 (S3, N+).
    """
    if not hasattr(model, "source_settings"):
        vars(model)["source_settings"] = model.config.to_dict()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    for config in configs_of(model):
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
    model.eval()


def fuse_activations(model: nn.Module) -> None:
    """Compute the tanh form of GELU in one kernel instead of eight, each of which saves a tensor for backward.

    GPT-2, Phi and others spell it out in Python. The function and the weights stay the same.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, (NewGELUActivation, FastGELUActivation)):
                setattr(module, name, nn.GELU(approximate="tanh"))


def freeze_attention(critic: nn.Module) -> None:
    """Freeze a critic's attention layers, including adapters in them, before it is sharded.

    Raises:
        ModelError: No layer's class is named like transformers' attention layers.
    """
    layers = [each for each in critic.modules() if re.search(r"Attention\d*$", type(each).__name__)]
    if not layers:
        raise ModelError("the critic has no attention layers to freeze; use ppo.critic=separate")
    for layer in layers:
        layer.requires_grad_(False)


def inner_matrices(module: nn.Module) -> list[nn.Parameter]:
    """The weights of the linear layers inside a module's transformers models, including adapters.

    Embeddings, output layers and heads are excluded, because their rows belong to tokens or there is only one row, and
    so are stacked matrices of experts.

    Args:
        module: A model, a policy with its critic, or any other module.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """
    models = [each for each in module.modules() if isinstance(each, PreTrainedModel)]
    outside = {each.weight for each in module.modules() if isinstance(each, nn.Embedding)}
    outside |= {each for model in models if (layer := model.get_output_embeddings()) for each in layer.parameters()}
    layers = [
        layer for model in models for layer in model.base_model.modules() if isinstance(layer, nn.Linear | Conv1D)
    ]
    found = dict.fromkeys(layer.get_parameter("weight") for layer in layers)
    return [weight for weight in found if weight not in outside]

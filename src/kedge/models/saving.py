"""Saves models as Hugging Face folders with tokenizer, chat template and model card; merges adapters and shards."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kedge.models.adapters import Adapter, is_adapter, read_adapter
from kedge.models.adapters.folder import write_shift
from kedge.models.heads import VALUE_HEAD_FILE, value_head_file
from kedge.models.language import LanguageModel
from kedge.models.origin import CARD, ORIGIN_FILE, Card
from kedge.models.pretrained import (
    HAS_NEW_ROW,
    NORMALIZATION_KEY,
    fit_embedding,
    load_config,
    load_pretrained,
    quiet_transformers,
)
from kedge.models.scalar import ScalarModel
from kedge.models.sources import SHARDED_WEIGHTS, check_source, find_model
from kedge.models.tokenizers import kept_stop_ids, load_tokenizer, save_tokenizer
from kedge.ranks.sharding import StoredTensors
from kedge_base.errors import DataError, ModelError
from kedge_base.machine.durable import copy_tree, replaced_folder
from kedge_base.machine.memory import give_back, in_phase
from kedge_base.run_folder.output import check_output, writing

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files that name the pad token."""


def save_policy(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    card: Card,
    stop_tokens: Sequence[int] = (),
    temperature: float = 1.0,
    weights: dict[str, Tensor] | None = None,
    final: bool = True,
) -> Path:
    """Save the policy as a Hugging Face folder; a value head goes into a subfolder, `value_head`.

    Args:
        model: The policy.
        tokenizer: Its tokenizer, with chat template.
        folder: Output folder; it appears only once complete.
        card: The model card.
        stop_tokens: The tokens that end a response. `generate` stops at these, at EOS, and at those of the source.
        temperature: The sampling temperature in training, which becomes the default of `generate`.
        weights: Weights to save instead of the model's, such as the gathered ones of a sharded model; empty to save
            none.
        final: The model is a result: its weights are saved in the source's most common number format, except those that
            this would round, and forced to disk before the files are renamed. A checkpoint keeps float32, and forces
            all of its files to disk together.

    Raises:
        OutputError: The system refuses; an existing folder is kept.
    """

    def write(part: Path) -> None:
        pad = _pad_in_base(model.causal, model.adapter, tokenizer)
        model.causal.generation_config = _generation_config(model, tokenizer, stop_tokens, temperature, pad)
        if model.adapter is None:
            save_model(model.causal, part, weights, final=final)
        else:
            model.adapter.save(part, weights=weights != {})
            model.causal.generation_config.save_pretrained(part)
        if model.value_head is not None:
            head = {name: tensor.detach().cpu().contiguous() for name, tensor in model.value_head.state_dict().items()}
            (part / VALUE_HEAD_FILE).parent.mkdir()
            save_file(head, part / VALUE_HEAD_FILE)
        save_tokenizer(tokenizer, part)
        _pad_with(pad, tokenizer, part)
        _write_card(part, card)

    return write_whole(Path(folder), write, forced=final)


def save_model(
    model: PreTrainedModel, folder: Path, weights: dict[str, Tensor] | None = None, *, final: bool = True
) -> None:
    """Save a transformers model, with its source's number format and dropout, so that transformers 4 also loads it.

    Args:
        model: The model. `source_settings` are those of its source; see `disable_dropout`.
        folder: Output folder.
        weights: Weights to save instead of the model's; see `save_policy`.
        final: Whether the model is a result rather than a checkpoint; see `save_policy`.
    """
    give_back()  # the file is memory-mapped while written, so it counts as process memory
    source: dict[str, Any] = getattr(model, "source_settings", {})
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(str(source.get("dtype"))) if final else None
    if dtype is not None and weights != {}:
        weights = model.state_dict() if weights is None else weights
        exact = weights.keys() & source.get("exact_weights", ())  # the model may lack some of them
        weights = _rounded(weights, dtype, kept={weights[name].data_ptr() for name in exact})
    model.save_pretrained(folder, state_dict=weights)
    path = folder / "config.json"
    settings = json.loads(path.read_bytes())
    _restore_dropout(settings, source)
    if dtype is not None:
        settings["dtype"] = source["dtype"]
    for part in (settings, settings.get("text_config") or {}):
        part.update(_former_rope(part))
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _rounded(weights: Mapping[str, Tensor], dtype: torch.dtype, *, kept: Collection[int]) -> dict[str, Tensor]:
    """Convert weights to a different number format in host memory, except those that start at an address in `kept`;
    shared tensors remain shared.
    """
    rounded: dict[tuple[int, torch.Size], Tensor] = {}
    for tensor in weights.values():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in rounded:
            is_rounded = tensor.is_floating_point() and tensor.data_ptr() not in kept
            rounded[key] = tensor.detach().to("cpu", dtype if is_rounded else tensor.dtype)
    return {name: rounded[tensor.data_ptr(), tensor.shape] for name, tensor in weights.items()}


def _restore_dropout(settings: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Restore the source's dropout in a configuration and its nested parts, in place."""
    for name, value in source.items():
        if isinstance(value, Mapping) and isinstance(settings.get(name), dict):
            _restore_dropout(settings[name], cast("Mapping[str, Any]", value))
        elif "drop" in str(name) and isinstance(value, float) and (value or name in settings):
            settings[name] = value


def _former_rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary embedding settings under their names in transformers 4, which does not know `rope_parameters`."""
    rope = settings.get("rope_parameters")
    kind = str(settings.get("model_type"))
    if not isinstance(rope, dict):
        return {}
    if kind.startswith(("gemma3", "olmo3")) and {"full_attention", "sliding_attention"} <= rope.keys():
        former = _former_rope({"rope_parameters": rope["full_attention"]})
        return {**former, "rope_local_base_freq": rope["sliding_attention"]["rope_theta"]}
    if "rope_type" not in rope:
        return {}
    renamed = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"} if "gpt_neox" in kind else {}
    names = {"rope_theta", "partial_rotary_factor"} & rope.keys()
    scaling = {name: value for name, value in rope.items() if name not in names}
    if kind.startswith("phi3") and "long_factor" in scaling:  # requires exactly three, with the fourth at the top level
        scaling.pop("original_max_position_embeddings", None)
        scaling = {"type": scaling.pop("rope_type"), **scaling}
    scaled = {} if rope["rope_type"] == "default" else {"rope_scaling": scaling}
    return {**{renamed.get(name, name): rope[name] for name in names}, **scaled}


def save_scalar_model(
    model: ScalarModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    card: Card,
    weights: dict[str, Tensor] | None = None,
    final: bool = True,
) -> Path:
    """Save a reward model as a Hugging Face folder, whose `config.json` stores its score shift, or as an adapter.

    Args:
        model: The reward model.
        tokenizer: Its tokenizer.
        folder: Output folder; it appears only once complete.
        card: The model card.
        weights: Weights to save instead of the model's; empty for a folder without weights.
        final: Whether the model is a result rather than a checkpoint; see `save_policy`.

    Raises:
        OutputError: The system refuses; an existing folder is kept.
    """

    def write(part: Path) -> None:
        if model.adapter is None:
            setattr(model.classifier.config, NORMALIZATION_KEY, float(model.shift))
            save_model(model.classifier, part, weights, final=final)
        else:
            model.adapter.save(part, weights=weights != {})
            write_shift(part, float(model.shift), model.privileged)
        save_tokenizer(tokenizer, part)
        _pad_with(_pad_in_base(model.classifier, model.adapter, tokenizer, but_eos=True), tokenizer, part)
        _write_card(part, card)

    return write_whole(Path(folder), write, forced=final)


def _pad_in_base(
    body: PreTrainedModel, adapter: Adapter | None, tokenizer: PreTrainedTokenizerBase, *, but_eos: bool = False
) -> str | None:
    """Choose a token to save as padding if an adapter's base has no row for the pad token; None to keep the pad token.

    `load_tokenizer` replaces it again. For a classifier it must not be EOS, since scores are read before the padding.
    """
    beyond = _token_beyond_base(body, adapter)
    if beyond is None or tokenizer.pad_token_id != beyond:
        return None
    eos = cast("str | None", tokenizer.eos_token)
    found = [token for token in (tokenizer.bos_token, tokenizer.unk_token, eos) if token is not None]
    return next((str(token) for token in found if not (but_eos and token == eos)), None)


def _token_beyond_base(body: PreTrainedModel, adapter: Adapter | None) -> int | None:
    """Return the token whose row an adapter's base has in memory but not in its files, or None.

    It is the pad token of some role that shares the base, not necessarily of the model being saved.
    """
    table = body.get_input_embeddings()
    is_whole = adapter is not None and any(weight is table.weight for weight in adapter.weights().values())
    if adapter is None or is_whole or not getattr(table, HAS_NEW_ROW, False):
        return None
    return len(cast(Tensor, table.weight)) - 1


def _pad_with(pad: str | None, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Replace the pad token in a saved tokenizer's files; None keeps it."""
    for name in TOKENIZER_FILES if pad is not None else ():
        path = folder / name
        pad_id = tokenizer.pad_token_id
        if not path.is_file():
            continue
        content = json.loads(path.read_bytes())
        if name == "tokenizer.json":
            content["padding"] = None
            content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] != pad_id]
        else:
            content.pop(str(tokenizer.pad_token), None)
            content.get("added_tokens_decoder", {}).pop(str(pad_id), None)
            content |= {"pad_token": pad} if "pad_token" in content else {}
        path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _write_card(folder: Path, card: Card) -> None:
    """Write the card, and the record of the model's origin."""
    text = card.render(score_shift=NORMALIZATION_KEY, is_adapter=is_adapter(folder))
    (folder / CARD).write_bytes(text.encode("utf-8", "backslashreplace"))
    card.origin.write(folder)


@in_phase("saving")
def write_whole(folder: Path, write: Callable[[Path], None], *, forced: bool = True) -> Path:
    """Call `write` on a temporary folder, then rename it, so that an incomplete model never has the final name.

    Args:
        folder: The model's folder; an existing one is replaced.
        write: Writes everything into the folder it is called with.
        forced: Force the files to disk before they get the final name.

    Raises:
        OutputError: Writing fails, for example because the disk is full; the existing folder is kept.
    """
    with writing(folder), replaced_folder(folder, forced=forced) as part, quiet_transformers():
        write(part)
    return folder


def _generation_config(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    stop_tokens: Sequence[int],
    temperature: float,
    pad: str | None = None,
) -> GenerationConfig:
    """Defaults of `generate` that match the training sampler: temperature, stop tokens, forbidden tokens.

    Of the source's defaults, only the stop tokens are kept: its filters and penalties are not part of the policy.
    """
    stops = kept_stop_ids(tokenizer, model, stop_tokens)
    pad_id = tokenizer.pad_token_id if pad is None else cast(int, tokenizer.convert_tokens_to_ids(pad))
    beyond = _token_beyond_base(model.causal, model.adapter)
    forbidden = [token for token in torch.nonzero(model.forbidden).flatten().tolist() if token != beyond]
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=stops[0] if len(stops) == 1 else stops or None,
        pad_token_id=pad_id,
        suppress_tokens=forbidden,
        do_sample=True,
        temperature=temperature,
        top_k=0,
    )


def save_architecture(policy: LanguageModel, folder: Path) -> Path:
    """Save the policy's configuration, and its custom code if any, without its weights."""
    with quiet_transformers():
        save_model(policy.causal, folder, {}, final=False)
    return folder


def merge(source: str | Path, out: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Path:
    """Save an adapter merged into its base, or a sharded checkpoint, as one model; returns its folder.

    Args:
        source: The adapter: a folder that PEFT or kedge saved, or a run. Or a checkpoint with sharded weights.
        out: The new folder.
        trust_remote_code: Run Python code from the base's folder.

    Raises:
        ModelError: The source is neither, does not belong to its base, lacks the head of a reward model, or is damaged.
        OutputError: The folder is not free, or cannot be written.
    """
    folder = Path(find_model(source, in_shards=True))
    target = check_output(out)
    if os.path.isfile(folder / SHARDED_WEIGHTS):
        return _merge_shards(folder, target, trust_remote_code=trust_remote_code)
    folder = Path(check_source(folder))  # for an adapter on a hub, the downloaded folder
    if not is_adapter(folder):
        raise ModelError(
            f"{str(source)!r} is not an adapter: it has no adapter_config.json, or a whole model beside it"
        )
    scalar = read_adapter(folder).is_scalar
    auto_class = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    labels: dict[str, Any] = {"num_labels": 1} if scalar else {}
    loaded = load_pretrained(auto_class, folder, trust_remote_code=trust_remote_code, **labels)
    if missing := sorted(loaded.missing):
        raise ModelError(f"{str(source)!r} cannot be merged: neither the adapter nor its base has {missing[0]}")
    model = loaded.model
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    fit_embedding(model, tokenizer)
    defaults = getattr(model, "generation_config", None)  # a classifier has none
    if defaults is not None and getattr(model.get_input_embeddings(), HAS_NEW_ROW, False):
        # The adapter's defaults assume a base without this row; see `_pad_in_base`.
        defaults.pad_token_id = tokenizer.pad_token_id
        defaults.suppress_tokens = [*(defaults.suppress_tokens or ()), tokenizer.pad_token_id]

    def write(part: Path) -> None:
        with quiet_transformers():
            save_model(model, part)
            save_tokenizer(tokenizer, part)
        if (head := value_head_file(folder)) is not None:
            (part / VALUE_HEAD_FILE).parent.mkdir()
            shutil.copyfile(head, part / VALUE_HEAD_FILE)
        # kedge's card and origin also apply to the merged model; a card by PEFT would call it an adapter.
        for path in (folder / CARD, folder / ORIGIN_FILE):
            if (folder / ORIGIN_FILE).is_file() and path.is_file():
                shutil.copyfile(path, part / path.name)

    return write_whole(target, write)


def _merge_shards(folder: Path, target: Path, *, trust_remote_code: bool) -> Path:
    """Save the model of a sharded checkpoint without shards; returns its folder.

    Args:
        folder: The model's folder in the checkpoint.
        target: The new folder, which is free.
        trust_remote_code: Run Python code from the model's folder.

    Raises:
        ModelError: A file is missing or damaged.
        OutputError: The folder cannot be written.
    """
    config = load_config(str(folder), trust_remote_code=trust_remote_code)
    is_scalar = any("SequenceClassification" in name for name in config.architectures or ())
    auto_class = AutoModelForSequenceClassification if is_scalar else AutoModelForCausalLM
    with quiet_transformers():
        model = auto_class.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    try:
        _fill_from_shards(model, folder)
    except ModelError:
        raise
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, RuntimeError, DataError) as error:
        raise ModelError(f"model {str(folder)!r}: its shards cannot be read: {error}") from error

    def write(part: Path) -> None:
        model.save_pretrained(part)
        # Copy everything else as it was saved, such as the stop tokens in the defaults of `generate`.
        copy_tree(folder, part, leave_out=SHARDED_WEIGHTS)

    return write_whole(target, write)


@torch.no_grad()
def _fill_from_shards(model: PreTrainedModel, folder: Path) -> None:
    """Load the weights from shards into a model, one at a time.

    Raises:
        ModelError: One is missing, or has a different shape.
    """
    places = json.loads((folder / SHARDED_WEIGHTS).read_bytes())
    groups = {
        group: StoredTensors((path, None) for path in sorted((folder.parent / group).glob("shard-*.safetensors")))
        for group in {group for group, _ in places.values()}
    }
    own = model.state_dict(keep_vars=True)
    for name, weight in own.items():
        if name not in places:
            raise ModelError(f"model {str(folder)!r}: the shards have no {name}")
        group, stored = places[name]
        shape = groups[group].shape(stored)
        if shape != tuple(weight.shape):
            raise ModelError(f"model {str(folder)!r}: {name} is {list(shape)}, expected {list(weight.shape)}")
        weight.copy_(groups[group][stored])

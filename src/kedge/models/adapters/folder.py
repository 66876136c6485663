"""Adapters in PEFT's format: a folder with a few weights, to be added to a base model that it names.

    adapter/
        adapter_config.json           kind, rank, targets, and the base: a folder or hub id
        adapter_model.safetensors     the adapter's weights, and whole modules such as the head of a reward model
        score_shift.json              of a reward model or critic by kedge: the shift subtracted from its scores

Settings that name a model accept such a folder, which stands for the base with the adapter.

Source: Hu et al. 2021, "LoRA" (arXiv 2106.09685); https://huggingface.co/docs/peft.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GenerationConfig

from kedge.downloads import GGUF_CACHE, has_whole_weights
from kedge_base.errors import ConfigError, ModelError, install_line
from kedge_base.texts import error_text

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
SHIFT_FILE = "score_shift.json"
SHIFT, PRIVILEGED = "score_shift", "privileged"
"""Keys in a separate file, since PEFT warns about unknown entries in adapter_config.json."""
SUPPORTED = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core",
    "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "target_parameters", "task_type", "trainable_token_indices", "use_dora",
    "use_rslora",
}  # fmt: skip
"""Entries of `adapter_config.json` under which the merged adapter equals what PEFT computes. Others, if set, make a
different kind of layer, such as one that is active only after certain tokens."""

WRAPPED = (".original_module.", ".modules_to_save.")
"""Parts of the names of PEFT's copies of an embedding, which its file includes if tokens were added."""

MOST_NAMES = 2_000
"""Maximum number of names in a setting, since PEFT compares each name with all others and with all modules."""

PREFIX = "base_model.model."
"""Prefix of the names of weights in an adapter's file."""


SECONDS = 5.0
"""Time limit for all expressions together; those of published adapters take milliseconds."""

_FORMS = {
    "target_modules": "{}",
    "exclude_modules": "{}",
    "modules_to_save": r"(^|.*\.){}($|\..*)",
    "rank_pattern": r"(.*\.)?({})$",
    "alpha_pattern": r"(.*\.)?({})$",
    "layers_pattern": r"(?:^|.*?\.){}\.(?P<idx>\d+)\.",
}
"""How PEFT turns an entry into a regular expression, which it matches against the names of all modules."""

_TRIAL = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    try:
        for name in names:
            re.fullmatch(pattern, name)
            re.match(pattern, name)
    except Exception:
        pass  # an invalid one; PEFT may come to the next before it
"""


class AdapterFolder:
    """A folder with an adapter.

    Attributes:
        folder: The folder.
        base: The model that the adapter belongs to: a folder or hub id.
        settings: The content of `adapter_config.json`.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.settings = settings
        self._ignored = WRAPPED
        named = str(settings["base_model_name_or_path"])
        given, beside = Path(os.path.expanduser(named)), folder / os.path.expanduser(named)
        # A different ../base may exist relative to the working directory.
        is_model = any((given / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
        self.base = str(beside) if not is_model and os.path.isdir(beside) else named
        if os.path.isabs(os.path.expanduser(self.base)) and not os.path.isdir(os.path.expanduser(self.base)):
            is_cached = Path(self.base).parent.parts[-len(GGUF_CACHE) :] == GGUF_CACHE
            remedy = "use the GGUF file that it was read from as a model once, or " if is_cached else ""
            raise ModelError(
                f"{folder}: its base {named!r} is not there; {remedy}set base_model_name_or_path in its "
                f"{ADAPTER_CONFIG}"
            )
        revision = settings.get("revision")
        if revision not in (None, "", "main") and not os.path.isdir(os.path.expanduser(self.base)):
            raise ModelError(
                f"{folder}: its base is {named!r} at revision {str(revision)[:40]!r}, and kedge reads the newest of "
                f"the branch main; download that revision, and set base_model_name_or_path in its {ADAPTER_CONFIG} to "
                "the folder"
            )
        if is_adapter(os.path.expanduser(self.base)):
            raise ModelError(f"{folder}: its base {named!r} is also an adapter; merge that first: kedge merge {named}")

    def for_classifier(self) -> AdapterFolder:
        """Return the adapter without its output layer, for a critic that starts from a policy."""
        other = copy.copy(self)
        other._ignored = (*WRAPPED, f"{PREFIX}lm_head.")
        return other

    @property
    def generation_config(self) -> GenerationConfig | None:
        """The adapter's defaults for `generate`; None to use the base's."""
        if not (self.folder / "generation_config.json").is_file():
            return None
        try:
            return GenerationConfig.from_pretrained(str(self.folder))
        except Exception as error:  # untrusted files: transformers lets any error through
            raise ModelError(f"{self.folder}: generation_config.json cannot be used: {error_text(error)}") from error

    @property
    def is_scalar(self) -> bool:
        """True if it is the adapter of a sequence classifier, such as a reward model."""
        return self.settings.get("task_type") == "SEQ_CLS"

    @property
    def score_shift(self) -> object:
        """The shift subtracted from the scores, unchecked; None if kedge did not train the adapter, or it gives no
        scores.

        Raises:
            ModelError: The file is damaged.
        """
        return self._scalar_settings.get(SHIFT)

    @property
    def privileged(self) -> object:
        """The template of a critic's privileged information; see `ScalarModel`. Errors as in `score_shift`."""
        return self._scalar_settings.get(PRIVILEGED)

    @property
    def _scalar_settings(self) -> Mapping[str, object]:
        path = self.folder / SHIFT_FILE
        try:
            settings = json.loads(path.read_bytes()) if path.is_file() else {SHIFT: None}
            return {**settings, SHIFT: settings[SHIFT]}
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise ModelError(f'{path} cannot be read; expected {{"{SHIFT}": a number}}') from error

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights by their names in the file, without PEFT's extra copies of an embedding.

        Raises:
            ModelError: The file is damaged.
        """
        path = self.folder / ADAPTER_WEIGHTS
        try:
            with safe_open(path, framework="pt") as file:
                names = [
                    name
                    for name in file.keys()  # noqa: SIM118
                    if not any(part in name for part in self._ignored)
                ]
                return {name: tuple(file.get_slice(name).get_shape()) for name in names}
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error

    @property
    def whole(self) -> set[str]:
        """Names of the base's weights that the adapter replaces, such as a head's."""
        return {name.removeprefix(PREFIX) for name in self.shapes if ".lora_" not in name}

    def check(self, model: nn.Module) -> None:
        """Reject settings that would exhaust memory or take forever, before PEFT creates the layers.

        Raises:
            ModelError: A setting would, or the file is damaged.
        """
        given = self.settings.get("rank_pattern")
        ranks = [self.settings.get("r"), *(given.values() if isinstance(given, dict) else ())]
        rank = max((each for each in ranks if isinstance(each, int)), default=0)
        firsts = (shape for name, shape in self.shapes.items() if ".lora_A" in name or ".lora_embedding_A" in name)
        most = max((shape[0] for shape in firsts if shape), default=0)
        if rank > most:
            raise ModelError(
                f"{self.folder}: its rank is {rank}, but that of its weights at most {most}; does it belong to "
                f"{self.base!r}?"
            )
        names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
        check_patterns(str(self.folder), self.settings, names)

    def weights(self) -> dict[str, Tensor]:
        """Its weights by their names in the model.

        Raises:
            ModelError: The file is damaged, or a weight is not finite.
        """
        path = self.folder / ADAPTER_WEIGHTS
        try:
            weights = load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        if broken := next((name for name, weight in weights.items() if not weight.isfinite().all()), None):
            raise ModelError(f"{path}: the weights contain NaN or infinity; first: {broken}")
        return {name.removeprefix(PREFIX): weights[name] for name in self.shapes}


def is_adapter(folder: str | Path) -> bool:
    """True for a folder with an adapter but no full model's weights; it may contain the base's config.json."""
    return os.path.isfile(Path(folder) / ADAPTER_CONFIG) and not has_whole_weights(folder)


def read_adapter(folder: str | Path) -> AdapterFolder:
    """Read an adapter's settings, without its weights.

    Raises:
        ModelError: The file is damaged, names no base, or the adapter is of a kind that kedge does not support.
    """
    path = Path(folder) / ADAPTER_CONFIG
    try:
        settings = json.loads(path.read_bytes())
        kind = settings["peft_type"]
        base = settings["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read; expected a folder saved by PEFT's save_pretrained()") from error
    if kind != "LORA":
        raise ModelError(f"{path}: peft_type is {str(kind)[:40]!r}; kedge supports LORA (also with DoRA or rsLoRA)")
    if unknown := sorted(name for name, value in settings.items() if value and name not in SUPPORTED):
        raise ModelError(
            f"{path}: {unknown[0]} is set, which makes a kind of LoRA that kedge does not support; it supports plain "
            "LoRA, DoRA and rsLoRA"
        )
    if crowded := next((name for name, value in settings.items() if _is_crowded(name, value)), None):
        raise ModelError(
            f"{path}: {crowded} has {len(settings[crowded]):,} entries; at most {MOST_NAMES:,} are supported: the last "
            "parts of the layers' names are enough"
        )
    if not isinstance(base, str) or not base:
        raise ModelError(f"{path}: base_model_name_or_path is missing; set it to the adapter's base model")
    if not (path.parent / ADAPTER_WEIGHTS).is_file():
        raise ModelError(f"{path.parent} has no {ADAPTER_WEIGHTS}; save the adapter with safe_serialization=True")
    return AdapterFolder(path.parent, settings)


def _is_crowded(name: str, value: object) -> bool:
    return isinstance(value, (list, dict)) and len(value) > MOST_NAMES and name != "trainable_token_indices"


def write_shift(folder: Path, shift: float, privileged: str | None) -> None:
    """Write the shift that is subtracted from an adapter's scores, and the template of privileged information."""
    settings = {SHIFT: shift} if privileged is None else {SHIFT: shift, PRIVILEGED: privileged}
    (folder / SHIFT_FILE).write_text(json.dumps(settings) + "\n", encoding="utf-8")


def check_names(adapter: AdapterFolder, saved: Collection[str], known: Collection[str]) -> None:
    """Check that an adapter's file has the weights that its model has (`ModelError` if not)."""
    for name in sorted(set(saved) ^ set(known)):
        where = "the adapter's file" if name in known else f"the base {adapter.base!r}"
        raise ModelError(f"{adapter.folder}: {name} is missing in {where}; the adapter belongs to another model")


def shared_weights(model: nn.Module) -> list[list[str]]:
    """The names of each weight that a model uses under several names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(weight, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def check_shared(where: str, model: nn.Module) -> None:
    """Reject adapters on layers with shared weights: each layer would have its own adapter, but merging would change
    all.

    Args:
        where: The origin of the adapter, for the message.
        model: A model with PEFT's layers.

    Raises:
        ModelError: There is such an adapter.
    """
    for names in shared_weights(model):
        if any(".base_layer." in name for name in names):
            first, second = (name.replace(".base_layer", "").removeprefix(PREFIX) for name in names[:2])
            raise ModelError(
                f"{where}: there is an adapter on {first}, which is one weight with {second}; merged, it would change "
                "both, so leave such layers out"
            )


def under_present_names(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename an adapter's weights to the current names of the model's layers.

    Before transformers 5, each expert in models such as Mixtral was a layer; now all experts are one stack of matrices.
    Names that the model knows are unchanged, since transformers' rules for the base's files could match them again.
    """
    try:
        from peft.utils.transformers_weight_conversion import (  # pyright: ignore[reportMissingImports]
            convert_peft_adapter_state_dict_for_transformers,
        )
    except ImportError:  # an older PEFT
        return weights
    config = model.peft_config["default"]
    known = {name.removeprefix(PREFIX) for name in lora_weights(model)} & weights.keys()
    others = {name: weight for name, weight in weights.items() if name not in known}
    converted = convert_peft_adapter_state_dict_for_transformers(model, config, others)
    kept = {name: weights[name] for name in known}
    return {**kept, **{name.removeprefix(PREFIX): weight for name, weight in converted.items()}}


@torch.no_grad()
def fill_lora(present: Mapping[str, Tensor], weights: Mapping[str, Tensor], adapter: AdapterFolder) -> None:
    """Copy an adapter's matrices into a model; PEFT's own loading would convert names that the model already knows.

    Args:
        present: The model's matrices, and possibly other weights, by name.
        weights: The adapter's matrices, and possibly other weights, under the same names.
        adapter: The adapter.

    Raises:
        ModelError: A matrix has a different shape.
    """
    for name in (each for each in weights if each in present):
        if weights[name].shape != present[name].shape:
            raise ModelError(
                f"{adapter.folder}: {name} is {list(weights[name].shape)}, expected {list(present[name].shape)}; does "
                f"it belong to {adapter.base!r}?"
            )
        present[name].copy_(weights[name])


def lora_weights(model: nn.Module) -> dict[str, Tensor]:
    """The matrices of a model's adapter, by PEFT's names."""
    return import_peft().get_peft_model_state_dict(model, save_embedding_layers=False)


def import_peft() -> Any:
    """Import PEFT, which takes seconds.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import peft  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"adapters need PEFT: {install_line('adapters')} ({error})") from error
    return peft


def check_patterns(where: str, settings: Mapping[str, Any], names: Iterable[str]) -> None:
    """Check that matching an adapter's regular expressions terminates; an invalid expression is left to PEFT.

    They are tried in a process that can be killed.

    Args:
        where: Where the settings come from, for the message.
        settings: The settings, as in `adapter_config.json`.
        names: The names of the model's modules and weights.

    Raises:
        ModelError: Matching takes longer than with any real adapter.
    """
    patterns = {name: _expressions_of(name, settings.get(name)) for name in _FORMS}
    every = [_FORMS[name].format(each) for name, several in patterns.items() for each in several]
    if not every:
        return
    trial = json.dumps([every, list(names)])
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _TRIAL],
            input=trial,
            text=True,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        given = " and ".join(name for name, several in patterns.items() if several)
        raise ModelError(
            f"{where}: matching {given} with the names of the model's modules takes over {SECONDS:g} s; list the names "
            "of layers instead of a regular expression"
        ) from error


def _expressions_of(name: str, value: object) -> list[str]:
    """The entries of a setting that PEFT reads as regular expressions, except plain names."""
    if isinstance(value, str):
        entries = [] if name == "target_modules" and value.lower() == "all-linear" else [value]
    else:
        entries = [each for each in value if isinstance(each, str)] if isinstance(value, (list, set, dict)) else []
    special = [each for each in entries if set(each) & set("*+?{|(")]
    if name in ("target_modules", "exclude_modules") and entries != [value]:
        # A list of names, which PEFT reads as expressions when it ties weights.
        return [_FORMS["modules_to_save"].format(each) for each in special]
    # Plain names match quickly, unless there are very many.
    return entries if len(entries) > 100 else special

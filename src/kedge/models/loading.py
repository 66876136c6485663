"""Loads the models of a run: policy, reference, critic and reward models. Models on the same base share its weights."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from typing_extensions import TypedDict, Unpack

from kedge.algorithm.critic import Bins
from kedge.models.adapters import Adapter, AdapterFolder, AdapterSettings, shared_copy
from kedge.models.first_rank import Loaded, built_without_weights, give_model, inner_weights
from kedge.models.heads import find_head, initialize_head
from kedge.models.language import LanguageModel
from kedge.models.pretrained import (
    configs_of,
    disable_dropout,
    fit_embedding,
    fuse_activations,
    load_config,
    load_pretrained,
    take_settings,
)
from kedge.models.scalar import ScalarModel, checked_number
from kedge.models.sources import check_source, find_adapter, find_model, local_folder, quiet_transformers
from kedge.ranks import ALONE, Ranks
from kedge_base.errors import ModelError


class Bases:
    """The bases of a run's adapters, each in memory once.

    Every role gets its own modules, which share the base's weights and contain the role's adapter. So roles do not have
    to take turns: one can sample while another is trained, and activations can be recomputed at any time.

    Args:
        trust_remote_code: Run Python code from a model's folder.
        on_host: Load and check the models in host memory. This is for bases that will be rounded, since they may not
            fit on the device in full precision: `hold_bases` moves and rounds the matrices, and the run moves the rest.
    """

    def __init__(self, *, trust_remote_code: bool = False, on_host: bool = False) -> None:
        self._trusted = trust_remote_code
        self._on_host = on_host
        self._loaded: dict[str, Loaded] = {}

    def place(self, device: str | torch.device) -> torch.device:
        """The device on which to load and check a model before it is moved to its own."""
        return torch.device("cpu" if self._on_host else device)

    def load(
        self,
        auto_class: Any,
        source: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        **settings: Any,
    ) -> Loaded:
        """Build a model on a base; also return the names of its weights that the base lacks.

        Args:
            auto_class: An `AutoModel…` class of transformers.
            source: The base: a folder or hub id.
            tokenizer: Its tokenizer.
            device: The device of the weights.
            settings: Passed to `from_pretrained`.

        Raises:
            ModelError: See `load_pretrained` and `fit_embedding`.
        """
        name = check_source(source)
        key = os.path.realpath(name) if os.path.isdir(name) else name
        config = load_config(name, trust_remote_code=self._trusted)
        # A model saved as a causal language model can be the base of a policy and of a critic.
        known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        is_language_model = getattr(known, "__name__", None) in (config.architectures or ())
        own_class = AutoModelForCausalLM if is_language_model else auto_class
        if key not in self._loaded:
            own_settings = {} if own_class is not auto_class else settings
            loaded = load_pretrained(own_class, name, trust_remote_code=self._trusted, **own_settings)
            nn.Module.to(loaded.model, device)
            configs = configs_of(loaded.model)
            pads = [getattr(config, "pad_token_id", None) for config in configs]
            fit_embedding(loaded.model, tokenizer)
            for config, pad in zip(configs, pads, strict=True):
                config.pad_token_id = pad  # restore the file's value, which every role expects
            # Never trained: a role's trainable weights are only those of its adapter and its head.
            self._loaded[key] = Loaded(loaded.model.requires_grad_(False), loaded.missing)
        found = self._loaded[key]
        base = shared_copy(found.model)
        other = self._without_weights(auto_class, name, **settings)
        if type(other) is type(base) or (other is None and own_class is auto_class):
            return Loaded(_with_own_heads(base), found.missing)
        grafted = other and _on_trunk_of(base, other)
        return grafted or load_pretrained(auto_class, name, trust_remote_code=self._trusted, **settings)

    @property
    def models(self) -> list[PreTrainedModel]:
        """The bases."""
        return [each.model for each in self._loaded.values()]

    def _without_weights(self, auto_class: Any, name: str, **settings: Any) -> PreTrainedModel | None:
        """Build the model without weights; None if its code needs them."""
        with quiet_transformers():
            config = AutoConfig.from_pretrained(name, trust_remote_code=self._trusted, **settings)
            return built_without_weights(
                lambda: auto_class.from_config(config, dtype=torch.float32, trust_remote_code=self._trusted)
            )


def _with_own_heads(base: PreTrainedModel) -> PreTrainedModel:
    """Give a classifier copies of its heads, in place, since normalizing one role's scores scales its head."""
    if base.get_output_embeddings() is None and base.base_model is not base:
        for name, part in list(base.named_children()):
            if part is not base.base_model:
                setattr(base, name, copy.deepcopy(part))
    return base


def _on_trunk_of(base: PreTrainedModel, other: PreTrainedModel) -> Loaded | None:
    """Put a model of a different class on a base's trunk; None if their trunks differ.

    Args:
        base: The base.
        other: The model, without weights. Those outside the trunk count as missing, and get placeholder values.
    """
    trunk = base.base_model
    if type(trunk) is not type(other.base_model) or trunk is base or other.base_model is other:
        return None
    setattr(other, other.base_model_prefix, trunk)
    missing = {name for name, weight in other.named_parameters() if weight.is_meta}
    if any(buffer.is_meta for buffer in other.buffers()):
        return None
    for part in other.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            if weight.is_meta:
                # These values suffice to check a head, without using the generator that initializes new heads.
                numbers = 0.1 * torch.arange(1.0, weight.numel() + 1).cos().view(weight.shape)
                part.register_parameter(name, nn.Parameter(numbers.to(base.device)))
    disable_dropout(other)
    fuse_activations(other)
    return Loaded(other, missing)


@dataclass(frozen=True)
class _Body:
    """A transformers model on its device, before it is checked.

    Attributes:
        loaded: The model, and the names of its newly initialized weights.
        device: Its device.
        base: The source; for an adapter, its base.
        start: The adapter, if the source is one and was not merged.
        on_base: Other models may share its weights.
        adapter: Settings of the adapter to train; see `LoadOptions`.
        ranks: The ranks that load the model.
    """

    loaded: Loaded
    device: torch.device
    base: str
    start: AdapterFolder | None
    on_base: bool
    adapter: AdapterSettings | None
    ranks: Ranks

    def finish(self, model: LanguageModel | ScalarModel) -> None:
        """Broadcast the weights that only the first rank has, except those to be sharded; add the adapter."""
        model.on_every_rank = self.loaded.on_every_rank
        if self.ranks.is_sharded:
            trunk = model.trunk if model.trunk is not None and model.trunk.takes_one_pass else None
            left = () if trunk is None else inner_weights(model, trunk.model)
            give_model(model, self.ranks, device=self.device, left=left)
        if self.on_base and (self.adapter is not None or self.start is not None):
            model.adapter = Adapter(self.loaded.model, self.adapter, base=self.base, start=self.start)


class LoadOptions(TypedDict, total=False):
    """Options of loading any model.

    Attributes:
        device: The device of the weights; the CPU by default.
        trust_remote_code: Run Python code from the model folder.
        adapter: Train an adapter on the frozen model: a new one, or, if the source is an adapter, that one.
        bases: Bases to take the weights from if already loaded; they may load it in host memory. Not for ranks that
            shard their models.
        ranks: The ranks that load it.
    """

    device: str | torch.device
    trust_remote_code: bool
    adapter: AdapterSettings | None
    bases: Bases | None
    ranks: Ranks


def _load_body(
    auto_class: Any,
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    adapter: AdapterSettings | None = None,
    bases: Bases | None = None,
    ranks: Ranks = ALONE,
    **settings: Any,
) -> _Body:
    """Load a model; the arguments are those of `load_language_model`, and additional ones of `from_pretrained`."""
    if bases is None and adapter is not None:
        bases = Bases(trust_remote_code=trust_remote_code)
    device = torch.device(device) if bases is None else bases.place(device)
    found = find_adapter(source)
    base = find_model(source) if found is None else found.base
    shares = bases is not None and (
        found is None
        or _shares_base(found, tokenizer, is_trained=adapter is not None, trust_remote_code=trust_remote_code)
    )
    if bases is None or not shares:
        found = None
        loaded = load_pretrained(auto_class, source, trust_remote_code=trust_remote_code, ranks=ranks, **settings)
    else:
        loaded = bases.load(auto_class, base, tokenizer, device, **settings)
    if found is not None:
        take_settings(loaded.model, found, found.whole)
    if loaded.model.device.type != "meta":
        nn.Module.to(loaded.model, device)  # first, so that it is checked on the device that it will run on
    return _Body(loaded, device, base, found, on_base=shares, adapter=adapter, ranks=ranks)


def _shares_base(
    adapter: AdapterFolder, tokenizer: PreTrainedTokenizerBase, *, is_trained: bool, trust_remote_code: bool
) -> bool:
    """True if an adapter can use a shared base; False if tokens were added, so that its base has to grow.

    Raises:
        ModelError: It cannot, but the adapter is to be trained.
    """
    config = load_config(check_source(adapter.base), trust_remote_code=trust_remote_code)
    rows = int(getattr(config.get_text_config(), "vocab_size", 0))
    needed = max(tokenizer.get_vocab().values(), default=0) + 1
    whole = (shape[0] for name, shape in adapter.shapes.items() if ".lora_" not in name and shape)
    if needed <= rows or (needed == rows + 1 and tokenizer.pad_token_id == rows) or max(whole, default=0) <= rows:
        return True
    if is_trained:
        raise ModelError(
            f"{adapter.folder}: tokens were added before it was trained, so its base {adapter.base!r}, which other "
            "models of the run share, would have to grow; merge it (kedge merge), and start from the whole model"
        )
    return False


def load_language_model(
    source: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    value_head: bool = False,
    bins: Bins | None = None,
    **options: Unpack[LoadOptions],
) -> LanguageModel:
    """Load a policy or reference from a folder or hub id.

    If the ranks shard their models, `shard_model` is called next; until then only the first has the trunk's weights.

    Args:
        source: The folder or hub id.
        tokenizer: Its tokenizer.
        value_head: Add a zero-initialized value head; see `LanguageModel`.
        bins: The bins of a value head that predicts a histogram; None for a scalar head.
        **options: See `LoadOptions`.

    Raises:
        ModelError: See `load_pretrained`; also if the source lacks weights of the language model.
    """
    if (found := find_adapter(source)) is not None and found.is_scalar:
        raise ModelError(
            f"{str(source)!r} is the adapter of a reward model or critic; expected one of a language model"
        )
    body = _load_body(AutoModelForCausalLM, source, tokenizer, **options)
    causal = body.loaded.model
    if type(causal.config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not options.get("trust_remote_code"):
        raise ModelError(
            f"model {str(source)!r}: {type(causal).__name__} cannot be loaded again once it is saved, since no "
            f"AutoModelForCausalLM has its configuration; use another architecture"
        )
    if missing := sorted(body.loaded.missing):
        raise ModelError(f"model {str(source)!r} lacks weights of a causal language model; first: {missing[0]}")
    model = LanguageModel(causal, tokenizer, value_head=value_head, bins=bins, device=body.device, ranks=body.ranks)
    body.finish(model)
    return model


def load_scalar_model(
    source: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    init: Literal["saved", "fresh", "any"] = "saved",
    **options: Unpack[LoadOptions],
) -> ScalarModel:
    """Load a reward model, or create one (or a critic) on the trunk of a causal LM.

    Args:
        source: A folder or hub id.
        tokenizer: Its tokenizer, from `load_tokenizer`.
        init: `saved` requires a trained head; `fresh` creates one with std 1/√(d+1) (spec §3.8); `any` keeps a trained
            head, or creates one if the source lacks a head.
        **options: See `LoadOptions`.

    Raises:
        ModelError: See `load_pretrained`; also if `saved` finds no scalar head, or weights of the trunk are missing.
    """
    found = find_adapter(source)
    if init == "saved" and found is not None and found.settings.get("task_type") == "CAUSAL_LM":
        raise ModelError(
            f"{str(source)!r} is the adapter of a language model; expected one of a reward model or critic"
        )
    body = _load_body(
        AutoModelForSequenceClassification,
        source,
        tokenizer,
        num_labels=1,  # not that of config.json, which may not name the labels; the shape of the head is checked
        **options,
    )
    classifier = body.loaded.model
    head = {name for name in body.loaded.missing if name.split(".")[0] in ("score", "classifier")}
    is_fresh = init == "fresh" or not head <= (set() if body.start is None else body.start.whole)
    beyond = sorted(body.loaded.missing - head)
    may_be_foreign = is_fresh and init != "fresh" and not beyond
    foreign = _foreign_head(classifier, check_source(body.base)) if may_be_foreign else None
    is_fresh = is_fresh and foreign is None
    if init == "saved" and is_fresh and not beyond:
        raise ModelError(
            f"model {str(source)!r} has no trained scalar head; use a reward model saved from "
            "AutoModelForSequenceClassification with one label (`kedge reward` and `kedge critic` train one)"
        )
    if beyond:
        raise ModelError(f"model {str(source)!r} lacks weights; first: {beyond[0]}")
    if foreign is not None and classifier.device.type != "meta":
        classifier.get_submodule("score").weight = nn.Parameter(foreign.weight.detach().to(body.device))
    model = ScalarModel(classifier, tokenizer, device=body.device, ranks=body.ranks)
    model.source = str(source)
    body.finish(model)
    model.has_new_head = is_fresh
    if not is_fresh and not model.trained_here:
        _take_normalization(model, foreign)
    if is_fresh:
        if model.head is None:
            raise ModelError(
                f"{type(classifier).__name__} has no linear score head; start from a causal language model"
            )
        initialize_head(model.head, "normal")
        model.normalize(mean=-float(model.shift))  # drops the shift of the reward model that the trunk came from
    return model


def _foreign_head(classifier: PreTrainedModel, source: str) -> nn.Linear | None:
    """Find the head that another library saved with a model, if it fits a decoder; see `find_head`."""
    score = dict(classifier.named_children()).get("score")
    if not isinstance(score, nn.Linear) or score.bias is not None:
        return None
    folder = local_folder(source)
    if folder is None:
        return None
    own = classifier.base_model.state_dict().keys()
    ignored = classifier._keys_to_ignore_on_load_unexpected or ()  # patterns for parts of other model classes
    head = find_head(folder, trunk=classifier.base_model_prefix, own=own, ignored=ignored, width=score.in_features)
    if head is not None and not all(weight.isfinite().all() for weight in head.parameters()):
        raise ModelError(f"model {source!r}: the weights of its head contain NaN or infinity")
    return head


def _take_normalization(model: ScalarModel, foreign: nn.Linear | None) -> None:
    """Adopt the bias of another library's head, and OpenRLHF's mean and standard deviation of the scores."""
    config = model.classifier.config
    mean = 0.0
    std = 1.0
    if getattr(config, "normalize_reward", False):
        mean = checked_number(config, "mean", 0.0)
        std = checked_number(config, "std", 1.0)
        if std <= 0:
            raise ModelError(f"the reward model's std is {std}; it must be positive")
    if foreign is not None and foreign.bias is not None:
        mean -= foreign.bias.item()
    if (mean, std) != (0.0, 1.0):
        model.normalize(mean=mean, std=std)

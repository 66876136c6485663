"""Models whose weights have shapes but no contents, built only from config.json: their passes need no memory.

They use kedge's own classes, adapters and number formats, so `LiveBytes` counts the memory of the real models' passes.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from kedge.config import Config
from kedge.models import ActorCritic, LanguageModel, Precision, ScalarModel, TokenRows, hold_frozen
from kedge.models.adapters import Adapter, AdapterSettings
from kedge.models.frozen import FrozenDtype, hold_bases
from kedge.models.language import ValueGradient
from kedge.models.live_bytes import Hollow, LiveBytes
from kedge.models.pretrained import (
    check_weight_files,
    disable_dropout,
    freeze_attention,
    fuse_activations,
    load_config,
    num_embeddings,
    quiet_transformers,
)
from kedge.models.sources import base_source, find_adapter, unknown_kind
from kedge.runs.frozen import adapter_of, rounds_bases
from kedge.stages.ppo.settings import value_bins_of
from kedge_base.errors import ConfigError, ModelError
from kedge_base.stage import find_stage
from kedge_base.texts import names_function

NF4 = 1 / 2 + 1 / 64
"""Size of a number in nf4 (4 bits, and 8 bits of scale per 64 numbers) relative to int8, which stands in for nf4: in
both formats, a pass dequantizes one matrix at a time.
"""
PER_KIND = ("layer_types", "mlp_layer_types", "layers_block_type")
"""Entries of config.json with one value per layer."""
SCORES = ("ForSequenceClassification", "RewardModel")
"""Ends of the architectures of reward models, whose saved weights have no head of a language model, unless it is tied.
"""
Model = TypeVar("Model", LanguageModel, ScalarModel)


@dataclass(frozen=True)
class Blueprint:
    """The shape of a model.

    Attributes:
        config: Its config.json.
        layers: Transformer blocks.
        alike: All blocks have the same shapes and kind, so that two or three can stand for all.
        saved_bf16: Its weights were saved in bf16.
        base: The folder or hub id of its weights; for an adapter, of its base's.
        is_adapter: It is an adapter.
    """

    config: PreTrainedConfig
    layers: int
    alike: bool
    saved_bf16: bool
    base: str
    is_adapter: bool

    def with_layers(self, layers: int) -> PreTrainedConfig:
        """The configuration with fewer layers, or all of them."""
        config = copy.deepcopy(self.config)
        if layers == self.layers:
            return config
        text = config.get_text_config()
        text.num_hidden_layers = layers
        for name in PER_KIND:
            if isinstance(kinds := getattr(text, name, None), list) and len(kinds) == self.layers:
                setattr(text, name, kinds[:layers])
        return config


def read_blueprint(source: str | Path, *, trust_remote_code: bool = False) -> Blueprint:
    """Read the shape of a model, or of an adapter's base, from config.json.

    Raises:
        ModelError: config.json is missing or unusable for transformers, or the weights are pickles.
    """
    base = base_source(source)
    check_weight_files(base)
    config = load_config(base, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    kinds = [getattr(text, name, None) for name in PER_KIND]
    same = all(len(set(each)) == 1 for each in kinds if isinstance(each, list) and each)
    mixed = getattr(text, "first_k_dense_replace", 0) or (getattr(text, "decoder_sparse_step", 1) or 1) != 1
    name = os.path.realpath(base) if os.path.isdir(base) else base
    saved_bf16 = str(config.dtype).endswith("bfloat16")
    is_adapter = find_adapter(source) is not None
    return Blueprint(config, int(text.num_hidden_layers), same and not mixed, saved_bf16, name, is_adapter)


def blueprints_of(config: Config, stage: str) -> dict[str, Blueprint]:
    """Return the blueprints of models with their own weights, by role; a reference that is the initial policy has no
    blueprint.

    Raises:
        ModelError: A model has no usable config.json.
        ConfigError: No model is configured.
    """

    def read(source: object) -> Blueprint:
        return read_blueprint(str(source), trust_remote_code=config.runtime.trust_remote_code)

    def read_language(source: object) -> Blueprint:
        blueprint = read(source)
        text = blueprint.config.get_text_config()
        scores = [name for name in text.architectures or () if name.endswith(SCORES)]
        if scores and not text.tie_word_embeddings:
            raise ModelError(f"model {str(source)!r} is a {scores[0]}, which lacks the head of a causal language model")
        return blueprint

    described = find_stage(stage)
    if "reward_model" in described.trains:
        return {"reward model": read(config.reward_model.base or config.model)}
    if config.model is None:
        raise ConfigError("kedge plan needs a model: pass --model, or set it in the configuration")
    found = {"policy": read_language(config.model)}
    if not described.samples:
        return found
    rewards = {f"reward: {term.name or term.source}": term for term in config.reward if not term.is_function}
    models = {role: read(term.source) for role, term in rewards.items()}
    if config.ppo.resolved_critic == "separate":
        value = config.ppo
        scored = [role for role, term in rewards.items() if term.weight]
        copied = models[scored[0]] if value.critic_init != "policy" and len(scored) == 1 else found["policy"]
        found["critic"] = read(value.critic_init) if value.names_critic else copied
    if config.ppo.reference is not None and config.ppo.needs_reference:
        found["reference"] = read_language(config.ppo.reference)
    judge = config.evaluate.judge
    if stage == "ppo" and config.ppo.eval_every.updates and judge is not None and not names_function(judge):
        models["judge"] = read(judge)
    return {**found, **models}


@dataclass(frozen=True)
class HollowModels:
    """Builds the models of a run, and counts their weights.

    Attributes:
        config: The resolved configuration.
        precision: Number format of the matrix products.
        blueprints: The blueprint of each role.
        layers: Blocks of each role.
        counter: Counts their memory.
        device: The kind of device that their passes are arranged for.
        sizes: `parameters`, `trained` and `resting` of the roles; see `Figures`.
        kept: All models; a run holds them until it finishes.
    """

    config: Config
    precision: Precision
    blueprints: Mapping[str, Blueprint]
    layers: Mapping[str, int]
    counter: LiveBytes
    device: str
    sizes: dict[tuple[str, ...], float] = field(default_factory=dict)
    kept: list[nn.Module] = field(default_factory=list)

    def policy(self, *, value_head: bool = False) -> LanguageModel:
        """The model that is fine-tuned, or samples."""
        return self._counted("policy", self._language("policy", adapter_of(self.config), value_head=value_head))

    def actor_critic(self, *, freezes: bool = False) -> ActorCritic:
        """Policy and critic of a PPO run; parts of the critic that PPO freezes are frozen."""
        kind = self.config.ppo.critic.name
        policy = self.policy(value_head=self.config.ppo.resolved_critic == "shared")
        critic = None
        if "critic" in self.blueprints:
            critic = self._scalar("critic", adapter_of(self.config))
            if (bins := value_bins_of(self.config)) is not None:
                critic.predict_histogram(bins)
            if freezes and kind == "frozen_attention":
                freeze_attention(critic)
            elif freezes and kind == "frozen":
                critic.requires_grad_(False)
            self._counted("critic", critic)
        # The sums of a read-out are counted by the update, not made.
        gradients: Mapping[str, ValueGradient] = {"detached": "head", "readout": "head", "frozen": "none"}
        actor_critic = ActorCritic(policy, critic, value_gradient=gradients.get(kind, "trunk"))
        if self.config.runtime.recomputes:
            actor_critic.checkpoint_activations()
        return actor_critic

    def reference(self) -> LanguageModel:
        """The reference: the frozen policy (with adapters, their base), or another model."""
        role = "reference" if "reference" in self.blueprints else "policy"
        shared = self.config.adapter.kind != "none" and role == "policy"
        return self._counted("reference", self._language(role), frozen=not shared, shared=shared)

    def reward(self, role: str, *, trained: bool = False) -> ScalarModel:
        """A reward model."""
        own = adapter_of(self.config) if trained or self.blueprints[role].is_adapter else None
        model = self._scalar(role, own)
        return self._counted(role, model, frozen=not trained and own is None, fixed=not trained)

    def _counted(
        self, role: str, model: Model, *, frozen: bool = False, fixed: bool = False, shared: bool = False
    ) -> Model:
        """Convert a model to its number format, and count its weights.

        Args:
            role: Its role.
            model: The model.
            frozen: The model is held in `runtime.frozen_dtype`.
            fixed: The model's adapter is not trained.
            shared: Another role holds all of the model's weights.
        """
        _empty(model)
        self.kept.append(model)
        if model.trunk is not None:
            model.trunk.arranged_for = self.device
        blueprint = self.blueprints[role if role in self.blueprints else "policy"]
        dtype = self.config.runtime.frozen_dtype if frozen else self.config.adapter.base_dtype
        self.sizes["parameters", role] = float(sum(each.numel() for each in model.parameters()))
        base_is_held = self._shares(role)
        stand_in: Any = "int8" if dtype == "nf4" else dtype
        with Hollow.comparing(blueprint.saved_bf16):
            if frozen and not shared and not base_is_held:
                hold_frozen(model, stand_in, self.precision)
            elif model.adapter is not None and rounds_bases(self.config):
                hold_bases([model], cast(FrozenDtype, stand_in))
        if fixed or shared:
            model.requires_grad_(False)
        base_is_held |= shared
        shares: list[tuple[torch.Tensor, float]] = []
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            share = NF4 if dtype == "nf4" and name.endswith(".packed") else 1.0
            shares.append((weight, 0.0 if base_is_held and not weight.requires_grad else share))
        self._hold(role, shares)
        if frozen and not base_is_held and "frozen" in self.config.runtime.offload:
            self.sizes["resting", role] = sum(share * weight.nbytes for weight, share in shares)
            self._hold(role, [(weight, 0.0) for weight, _ in shares])
            model.host = lambda: self._on_device(role, shares)
        trained = [each for each in model.parameters() if each.requires_grad]
        self.sizes["trained", role] = float(sum(each.nbytes for each in trained))

        def note(weight: nn.Parameter) -> None:
            assert weight.grad is not None
            self.counter.hold([weight.grad], ("gradients", role))

        for weight in trained:
            weight.register_post_accumulate_grad_hook(note)
        return model

    def _hold(self, role: str, shares: Sequence[tuple[torch.Tensor, float]]) -> None:
        """Count a share of the size of each of a role's weights."""
        for weight, share in shares:
            self.counter.hold([weight], ("weights", role), share=share)

    @contextmanager
    def _on_device(self, role: str, shares: Sequence[tuple[torch.Tensor, float]]) -> Iterator[None]:
        """Count weights only within the block, as for `HostWeights`."""
        self._hold(role, shares)
        try:
            yield
        finally:
            self._hold(role, [(weight, 0.0) for weight, _ in shares])

    def _shares(self, role: str) -> bool:
        """True if an earlier role has loaded the base of this role's adapter; a judge always loads its own."""
        if self.config.adapter.kind == "none" or role not in self.blueprints or role == "judge":
            return False
        roles = list(self.blueprints)
        base = self.blueprints[role].base
        return any(self.blueprints[each].base == base for each in roles[: roles.index(role)])

    def _language(
        self, role: str, adapter: AdapterSettings | None = None, *, value_head: bool = False
    ) -> LanguageModel:
        causal = _build(AutoModelForCausalLM, self.blueprints[role].with_layers(self.layers[role]))
        bins = value_bins_of(self.config)
        return _completed(
            LanguageModel(causal, _tokenizer(num_embeddings(causal)), value_head=value_head, bins=bins), causal, adapter
        )

    def _scalar(self, role: str, adapter: AdapterSettings | None) -> ScalarModel:
        config = self.blueprints[role].with_layers(self.layers[role])
        config.num_labels = 1
        classifier = _build(AutoModelForSequenceClassification, config)
        return _completed(ScalarModel(classifier, _tokenizer(num_embeddings(classifier))), classifier, adapter)


def layers_of(model: LanguageModel | ScalarModel) -> Sequence[nn.Module]:
    """The transformer blocks: the longest list of modules in the trunk."""
    assert model.trunk is not None
    lists = [module for module in model.trunk.model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []


def _build(auto_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    with quiet_transformers(), torch.device("meta"):
        try:
            model = auto_class.from_config(config, dtype=torch.float32)
        except ValueError as error:
            if (reason := unknown_kind(error)) is None:
                raise
            raise ModelError(f"model {config.name_or_path!r} cannot be loaded: {reason}") from error
    _empty(model)
    disable_dropout(model)
    fuse_activations(model)
    return model


def _completed(model: Model, inner: PreTrainedModel, adapter: AdapterSettings | None) -> Model:
    """Add the adapter, and switch to padded rows if the model's code cannot process packed rows or single tokens."""
    if model.trunk is not None:
        key = f"{type(inner).__name__} {json.dumps(inner.config.to_dict(), sort_keys=True, default=str)}"
        if key not in _PACKS:
            _PACKS[key] = _runs_packed(model)
        model.trunk._packs &= _PACKS[key]
    if adapter is not None:
        model.adapter = Adapter(inner, adapter, base="base")
    return model


_PACKS: dict[str, bool] = {}
"""Cache of whether a model's code can run packed, by class and configuration: a test takes as long as counting."""


def _runs_packed(model: LanguageModel | ScalarModel) -> bool:
    """Try packed rows and single tokens on the model's code; this needs no contents."""
    trunk = model.trunk
    assert trunk is not None
    try:
        with torch.no_grad():
            trunk.hidden(TokenRows(torch.ones(8, dtype=torch.long), (4, 4)))
            if isinstance(model, LanguageModel):
                decoder = trunk.decoder([[1] * 4] * 2, max_new_tokens=2, pad_id=0)
                decoder.step(torch.ones(2, dtype=torch.long))
    except Exception:  # the model's code may raise anything
        return False
    return True


def _empty(model: nn.Module) -> None:
    """Replace weights by tensors without contents; tied weights remain tied."""
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and not isinstance(weight, Hollow):
                hollow = nn.Parameter(Hollow.like(weight), requires_grad=weight.requires_grad)
                module._parameters[name] = known.setdefault(id(weight), hollow)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = Hollow.like(buffer)


@lru_cache(maxsize=2)
def _tokenizer(size: int) -> Any:
    """A tokenizer with one token for each row of an embedding; a large vocabulary takes a tenth of a second."""
    vocabulary = {str(token): token for token in range(size)}
    return SimpleNamespace(pad_token_id=0, eos_token_id=1, get_vocab=lambda: vocabulary)

"""An adapter in the layers of a model with frozen weights."""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, Literal, TypeVar, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kedge.models.adapters.folder import (
    ADAPTER_WEIGHTS,
    PREFIX,
    AdapterFolder,
    check_names,
    check_patterns,
    check_shared,
    fill_lora,
    import_peft,
    lora_weights,
    shared_weights,
    under_present_names,
)
from kedge_base.errors import ModelError
from kedge_base.texts import error_text

M = TypeVar("M", bound=nn.Module)

INITIALIZATIONS = frozenset({"true", "false", "gaussian", "orthogonal"})
"""Values of PEFT's `init_lora_weights` that do not change the base; others, such as PiSSA's, subtract from it."""

UNREAD = {
    **dict.fromkeys(("falcon_h1", "mamba2", "nemotron_h"), ("out_proj",)),
    **dict.fromkeys(("falcon_mamba", "mamba"), ("out_proj", "dt_proj")),
    "jamba": ("dt_proj",),
    "longcat_flash": ("router.classifier",),
}
"""Layers, by model type, whose weights are read without calling the layer, so that an adapter would have no effect.
PEFT itself rejects `out_proj`.
"""

OUTPUT_LAYERS = ("lm_head", "embed_out")
"""Modules in `modules_to_save` that a classifier on the same base replaces with its own head."""

NAME = "default"
"""The adapter's name in the model. A model has one adapter; other roles on the same base have separate layers."""


def mark_frozen(weight: Tensor) -> None:
    """Mark a weight that never changes: checkpoints omit it, and copies share it."""
    weight.requires_grad_(False)
    weight.is_frozen = True  # pyright: ignore[reportAttributeAccessIssue]


def is_frozen(weight: Tensor) -> bool:
    """True if a weight was marked as frozen; `requires_grad` is not sufficient, as it can be off temporarily."""
    return getattr(weight, "is_frozen", False)


def shared_copy(module: M, *, only_frozen: bool = False) -> M:
    """Copy a module, but share its weights and buffers instead of copying them.

    Args:
        module: The module.
        only_frozen: Share only weights marked as frozen, and copy the others.
    """
    shared = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(each): each for each in shared if is_frozen(each) or not only_frozen})


@dataclass(frozen=True)
class AdapterSettings:
    """A new adapter.

    Attributes:
        kind: LoRA, or DoRA.
        rank: Rank of each matrix.
        alpha: Scale: the product is multiplied by alpha / rank.
        target_modules: Names of layers; `auto` for every linear layer except the output layer.
        modules_to_save: Names of modules to train in full, in addition to the head of a reward model or critic.
    """

    kind: Literal["lora", "dora"] = "lora"
    rank: int = 16
    alpha: float = 32.0
    target_modules: str | Sequence[str] = "auto"
    modules_to_save: Sequence[str] = ()


class Adapter:
    """An adapter in the layers of a model, with some modules in full; all other weights are frozen.

    Roles on one base are separate models with the same weights (`Bases`), so adapters are never switched: a backward
    pass that recomputes its activations cannot run with another role's adapter.

    Args:
        model: The base; its layers are replaced by adapted ones. A classifier's head belongs to the adapter.
        settings: The new adapter; ignored with `start`, except that None means that nothing is trained.
        base: Name of the base, which the saved adapter names.
        start: The adapter to start from; None starts with a new one, which changes nothing yet.

    Raises:
        ConfigError: PEFT is not installed.
        ModelError: The model has no such layers, or the adapter does not belong to it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: AdapterSettings | None,
        *,
        base: str,
        start: AdapterFolder | None = None,
    ) -> None:
        self._model = model
        is_auto = False
        if start:
            described = str(start.folder)
            start.check(model)
            self._config = _config_of(start)
        else:
            assert settings is not None, "a new adapter is trained"
            described = f"adapter.target_modules={settings.target_modules}"
            check_patterns(described, vars(settings), [name for name, _ in model.named_modules()])
            is_auto = settings.target_modules == "auto"
            self._config = _new_config(settings)
        self._config.base_model_name_or_path = os.path.abspath(base) if os.path.isdir(base) else base
        heads = _heads(model)
        start = start.for_classifier() if start and heads else start
        self._config.task_type = "SEQ_CLS" if heads else "CAUSAL_LM"
        named = [name for name in self._config.modules_to_save or () if not (heads and name in OUTPUT_LAYERS)]
        whole, self._whole = _whole_weights(model, [*heads, *named], start)
        self._config.modules_to_save = None  # PEFT would wrap these modules to switch between adapters
        unfit = _unfit_layers(model)
        if is_auto:
            self._config.exclude_modules = _left_out(model, heads, unfit | _unreached(model))
        if start or is_auto:
            _exclude(self._config, {name.rpartition(".")[0] for name in whole}, model)
        _inject(self._config, model, whole, described=described)
        if settings and not start:
            _check_targets(settings, model, unfit)
        for layer in model.modules():
            if hasattr(layer, "parameter_name"):
                cast(Any, layer)._activate_lora = MethodType(_with_stack, layer)
        for name in whole:
            _unshare(model, name)
        if start:
            self._load(start)
        kept = {id(weight) for name, weight in model.named_parameters() if ".lora_" in name or name in whole}
        for weight in model.parameters():
            if id(weight) not in kept:
                mark_frozen(weight)
            else:
                weight.data = weight.data.float()  # PEFT creates them in the base's number format
                weight.requires_grad_(settings is not None)

    def weights(self) -> dict[str, nn.Parameter]:
        """Its weights, by their names in the model."""
        return {name: weight for name, weight in self._model.named_parameters() if not is_frozen(weight)}

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full model's weights by their names in the base, with the adapter merged."""
        for name, tensor in _whole_state(self._model):
            if ".lora_" in name:
                continue
            path, _, last = name.rpartition(".")
            while path.endswith(".base_layer"):  # once for each adapted stack of matrices
                path = path.removesuffix(".base_layer")
                layer = cast(Any, self._model.get_submodule(path))
                if last == getattr(layer, "parameter_name", "weight"):
                    tensor = _with_delta(layer, tensor)
            yield name.replace(".base_layer", ""), tensor

    def save(self, folder: Path, *, weights: bool = True) -> None:
        """Write the adapter in PEFT's format.

        Args:
            folder: An existing folder.
            weights: Include the weights; False writes everything else.
        """
        config = copy.deepcopy(self._config)
        config.inference_mode = True
        config.modules_to_save = self._whole or None
        config.save_pretrained(str(folder))
        if weights:
            whole = {name: weight for name, weight in self.weights().items() if ".lora_" not in name}
            found = {**lora_weights(self._model), **whole}
            named = {f"{PREFIX}{name}": weight.detach().cpu().contiguous() for name, weight in found.items()}
            save_file(named, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})

    def _load(self, start: AdapterFolder) -> None:
        weights = under_present_names(self._model, start.weights())
        whole = {name: self._model.get_parameter(name) for name in start.whole}
        present = {**lora_weights(self._model), **whole}
        check_names(start, [PREFIX + each for each in weights], [PREFIX + each for each in present])
        fill_lora(present, weights, start)


def _new_config(settings: AdapterSettings) -> Any:
    if not settings.target_modules:
        raise ModelError("adapter.target_modules is empty; use auto, or name layers, such as [q_proj,v_proj]")
    return import_peft().LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules="all-linear" if settings.target_modules == "auto" else settings.target_modules,
        use_dora=settings.kind == "dora",
        modules_to_save=list(settings.modules_to_save),
        lora_dropout=0.0,  # with dropout, two passes would differ, and ratios would not be 1 before the first step
        bias="none",
    )


def _config_of(start: AdapterFolder) -> Any:
    try:
        config = import_peft().LoraConfig.from_pretrained(str(start.folder))
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{start.folder}: {error_text(error)}") from error
    config.lora_dropout = 0.0
    config.inference_mode = False
    if config.bias != "none":
        raise ModelError(
            f"{start.folder}: it has biases, and kedge trains LoRA's matrices and whole modules only; merge it "
            "(kedge merge), and start from the whole model"
        )
    if str(config.init_lora_weights).lower() not in INITIALIZATIONS:
        raise ModelError(
            f"{start.folder}: its initialization ({config.init_lora_weights!r}) changes the weights of its base, which "
            "other roles share; merge it (kedge merge), and start from the whole model"
        )
    return config


def _inject(config: Any, model: PreTrainedModel, whole: set[str], *, described: str) -> None:
    """Replace the targeted layers of a model by adapted ones; modules that are trained in full must not be targets."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's warnings are about settings that do not matter here
            import_peft().inject_adapter_in_model(config, model, adapter_name=NAME)
    except (ValueError, TypeError, RuntimeError, KeyError, re.error) as error:
        if config.use_dora and getattr(config, "target_parameters", None):
            raise ModelError(
                f"{described}: a stack of experts cannot have DoRA; use adapter.kind=lora, or name other layers, such "
                "as adapter.target_modules=[q_proj,v_proj]"
            ) from error
        raise ModelError(f"{described}: {error_text(error)}") from error
    if not isinstance(model.get_input_embeddings(), nn.Embedding):
        raise ModelError(
            f"{described}: there is an adapter on the embedding of tokens, which kedge does not train; name other "
            "layers, or train it whole (adapter.modules_to_save) where it is not tied to the output layer"
        )
    remaining = dict(model.named_parameters(remove_duplicate=False))
    if not isinstance(model.get_output_embeddings(), nn.Linear | None) or not whole <= remaining.keys():
        raise ModelError(
            "adapter.target_modules has the output layer or a module that is trained whole, which cannot have an "
            "adapter; use auto, or others"
        )
    check_shared(described, model)


def _check_targets(settings: AdapterSettings, model: nn.Module, unfit: Collection[str]) -> None:
    """Check that every listed name matches a layer that can be adapted."""
    layers = {name.rpartition(".lora_A")[0] for name, _ in model.named_modules() if name.endswith(".lora_A")}
    if idle := sorted(layers & set(unfit)):
        raise ModelError(
            f"adapter.target_modules: {idle[0]} computes more than a product, or is not called, so that it cannot have "
            "an adapter; use auto, or others"
        )
    named = [] if isinstance(settings.target_modules, str) else settings.target_modules
    for target in named:
        if not any(layer == target or layer.endswith(f".{target}") for layer in layers):
            raise ModelError(f"adapter.target_modules: the model has no layer {target!r} that can have an adapter")


def _left_out(model: PreTrainedModel, heads: Sequence[str], unfit: Collection[str]) -> list[str] | None:
    """Linear layers that `auto` excludes: those of heads, with shared weights, or that need no adapter."""
    inside = [name for name, _ in model.named_modules() if name.startswith(tuple(f"{head}." for head in heads))]
    tables = (model.get_input_embeddings(), model.get_output_embeddings())  # PEFT itself leaves these out
    shared = {name.rpartition(".")[0] for names in shared_weights(model) for name in names}
    shared = {name for name in shared if model.get_submodule(name) not in tables}
    return [*heads, *inside, *sorted(shared | set(unfit))] or None


def _exclude(config: Any, modules: Collection[str], model: PreTrainedModel) -> None:
    """Exclude linear layers from PEFT's targets, as PEFT does itself with layers that it trains in full."""
    linear = sorted(name for name in modules if isinstance(model.get_submodule(name), nn.Linear | Conv1D))
    given = config.exclude_modules
    if not linear:
        return
    if isinstance(given, str):
        config.exclude_modules = "|".join([f"(?:{given})", *map(re.escape, linear)])
    else:
        config.exclude_modules = sorted({*(given or ()), *linear})


def _unfit_layers(model: PreTrainedModel) -> set[str]:
    """Linear layers that cannot have an adapter, since they are never called or compute more than a product."""
    unread = tuple(f".{name}" for name in UNREAD.get(model.config.model_type, ()))
    linear = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    return {name for name, part in linear.items() if name.endswith(unread) or not is_product(part)}


@torch.no_grad()
def _unreached(model: PreTrainedModel) -> set[str]:
    """Linear layers that no text reaches, such as those of a vision tower, or of attention to an encoder."""
    linear = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    # Without numbers, an expert that this text does not choose has the name of one that it does.
    kinds = {name: re.sub(r"\d+", "", name) for name, _ in linear}
    called: set[str] = set()
    handles = [part.register_forward_hook(lambda *_, kind=kinds[name]: called.add(kind)) for name, part in linear]
    model.base_model(input_ids=torch.arange(4, device=model.device)[None])
    for handle in handles:
        handle.remove()
    return {name for name in kinds if kinds[name] not in called}


@torch.no_grad()
def is_product(layer: nn.Linear) -> bool:
    """False for a subclass that computes more than a product, such as a router that chooses experts.

    In a plan, where tensors have no contents and always compare equal, the shape of the output decides.
    """
    if type(layer) is nn.Linear:
        return True
    states = torch.arange(1.0, 2 * layer.in_features + 1, device=layer.weight.device).cos().view(2, -1)
    expected = functional.linear(states, layer.weight, layer.bias)
    try:
        found = layer(states)
    except Exception:  # the model's code may raise anything
        return False
    same_shape = isinstance(found, Tensor) and found.shape == expected.shape
    return same_shape and bool(torch.isclose(found, expected, atol=1e-4).all())


def _heads(model: PreTrainedModel) -> list[str]:
    """Names of a classifier's modules outside its trunk; empty for a language model."""
    if model.get_output_embeddings() is not None:
        return []
    if model.base_model is model:
        raise ModelError(
            f"{type(model).__name__} has no trunk apart from its head, so it cannot be trained by an adapter"
        )
    return [name for name, part in model.named_children() if part is not model.base_model and list(part.parameters())]


def _whole_weights(
    model: PreTrainedModel, modules: Sequence[str], start: AdapterFolder | None
) -> tuple[set[str], list[str]]:
    """Find the weights of modules that an adapter holds in full, and the names of the modules that exist.

    Args:
        model: The base.
        modules: How the modules' names end.
        start: The adapter to start from, where modules may be missing: PEFT lists those that models could have.

    Raises:
        ModelError: There is no such module, or the adapter's file has full weights of others.
    """
    found: dict[str, set[str]] = {}
    for wanted in modules:
        found[wanted] = {
            f"{name}.{inner}"
            for name, part in model.named_modules()
            if name.endswith(wanted)  # as in PEFT, where norm also matches q_norm
            for inner, _ in part.named_parameters()
        }
        if not found[wanted] and start is None:
            raise ModelError(f"adapter.modules_to_save: the model has no module {wanted!r} with weights")
    whole = set[str]().union(*found.values())
    if start is not None:
        check_names(start, start.whole, start.whole & whole)
    return whole, sorted(name for name, weights in found.items() if weights)


def _unshare(model: nn.Module, name: str) -> None:
    """Replace a weight that other models may share by a copy."""
    weight = model.get_parameter(name)
    places = [each for each, other in model.named_parameters(remove_duplicate=False) if other is weight]
    if len(places) > 1:
        raise ModelError(
            f"adapter.modules_to_save: {' and '.join(places)} are one weight, of which PEFT trains a copy and loses "
            "it when it merges; leave it out"
        )
    part, _, last = name.rpartition(".")
    owner = model.get_submodule(part)
    owner.register_parameter(last, nn.Parameter(weight.detach().clone()))


def _whole_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's state, with quantized matrices dequantized."""
    held = {
        name: layer for name, layer in model.named_modules(remove_duplicate=False) if hasattr(layer, "saved_weight")
    }
    for name, tensor in model.state_dict().items():
        owner, _, last = name.rpartition(".")
        if owner not in held or last == "bias":
            yield name, tensor
        elif last == "packed":
            yield f"{owner}.weight", cast(Any, held[owner]).saved_weight()


@contextmanager
def _with_stack(layer: Any, adapters: Sequence[str]) -> Iterator[None]:
    """Apply the adapter of a stack of matrices (experts, or their router) within the block.

    PEFT's own method registers a parametrization whose cache all threads share: the policy in training would read the
    weights of the sampling one.

    Args:
        layer: PEFT's layer around the module that has the stack.
        adapters: The names of the active adapters; there is one.
    """
    owner = layer.get_base_layer()
    name = layer.parameter_name
    whole = layer.get_param() + layer.get_delta_weight(NAME)
    vars(owner)[name] = whole  # takes precedence over the parameter of this name
    try:
        yield
    finally:
        del vars(owner)[name]


def _with_delta(layer: Any, weight: Tensor) -> Tensor:
    """Merge a layer's adapter into its weight.

    Source: DoRA (arXiv 2402.09353), equation 5: the adapter's magnitudes times the normalized columns.
    """
    changed = weight + layer.get_delta_weight(NAME)
    magnitudes = layer.lora_magnitude_vector
    if NAME not in magnitudes:
        return changed
    is_transposed = bool(layer.fan_in_fan_out)
    lengths = changed.norm(dim=0 if is_transposed else 1)
    factors = magnitudes[NAME].weight / lengths
    return changed * (factors[None, :] if is_transposed else factors[:, None])

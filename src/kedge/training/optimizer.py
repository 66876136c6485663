"""The optimizer with its parameter groups, learning-rate schedules, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW

from kedge.models.adapters import is_frozen
from kedge.models.frozen import load_bitsandbytes
from kedge.ranks import ALONE, Ranks
from kedge.ranks.sharding import clip_shards
from kedge.training.host_state import HostState
from kedge.training.optimizer_kinds import (
    SMALLEST_IN_8_BITS,
    Optimizer,
    OptimizerKind,
    OptimizersAsOne,
    check_optimizer,
)
from kedge_base.errors import ConfigError

AdamEpsMode = Literal["torch", "tf1"]
Schedule = Literal["linear", "cosine", "constant"]

RATE = "learning_rate_multiple"
"""Parameter group key: the group's learning rate as a multiple of the schedule's; part of the optimizer's state."""

DECAY = "decay_per_unit"
"""Parameter group key of an output layer: its weight decay for outputs in the unit 1."""

UNIT = "output_unit"
"""Parameter group key of an output layer: the unit of its outputs, in which its gradients and steps are taken."""

CRITIC = "is_critic"
"""Parameter group key: True if the group belongs to a critic that shares no gradient with the policy."""

BETAS = (0.9, 0.999)
"""Decay rates β₁ and β₂ of Adam's two moments."""

FUSED_DEVICES = frozenset({"cpu", "cuda"})
"""Devices with a fused implementation; on a CPU it is two to four times as fast as the loop over parameters."""


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    kind: OptimizerKind = "adamw",
    adam_eps: float = 1e-5,
    adam_eps_mode: AdamEpsMode = "torch",
    weight_decay: float = 0.0,
    head_parameters: Iterable[nn.Parameter] = (),
    head_rate: float = 1.0,
    critic_parameters: Iterable[nn.Parameter] = (),
    inner_matrices: Iterable[nn.Parameter] = (),
    offload: bool = False,
) -> Optimizer:
    """Build an optimizer. Learning rates have the same meaning in every kind; weight decay is off by default.

    adamw:      θ ← θ − lr / (1−β₁ᵗ) · m / (√(v / (1−β₂ᵗ)) + ε)
    with tf1:   θ ← θ − lr · √(1−β₂ᵗ) / (1−β₁ᵗ) · m / (√v + ε)
    adamw8bit:  as adamw; between steps m and v have 8 bits per number, in blocks of 256 with one scale each
    adafactor:  θ ← θ − lr · u / max(1, rms(u)), u = g / √v, v of rank 1: from its means over rows and over columns
    muon:       θ ← θ − lr · 0.2 √max(rows, columns) · orthogonalized(m) for the matrices inside the model; else adamw

    tf1 is TensorFlow's ε; it equals torch's with ε/√(1−β₂ᵗ): 31.6 times as large in the first step, ten times in the
    tenth. The first published PPO results for language models used it. Adafactor has neither momentum nor a rate that
    it chooses itself, and Muon's factor gives its steps the size of Adam's.

    Args:
        parameters: Parameters to train; frozen ones are skipped.
        learning_rate: Peak step size, ≥ 0; `set_learning_rate` changes it during the run.
        kind: The kind.
        adam_eps: ε ≥ 0; not in adafactor.
        adam_eps_mode: Definition of ε: "torch" or, with adamw, "tf1".
        weight_decay: Decoupled decay per unit of learning rate, ≥ 0; applied to matrices only, not to norms and biases.
        head_parameters: Parameters of an output layer, to train at their own rate: a new head has further to go.
            `set_learning_rate` gives the unit of its outputs.
        head_rate: Learning rate of `head_parameters` as a multiple of the others', throughout the schedule.
        critic_parameters: A critic's parameters, if it shares no gradient with the policy: `set_learning_rate` can give
            them a different rate, and their gradient is clipped separately.
        inner_matrices: Parameters for muon: matrices of layers, without embeddings, output layers and heads.
        offload: Keep the state in host memory between steps; see `HostState`.

    Raises:
        ConfigError: No parameter is trainable, one is frozen under an adapter, or the kind is not available.

    Source: spec §7.35; Kingma and Ba 2015, end of section 2, gives the form used by TensorFlow. Dettmers et al. 2021
        (arXiv 2110.02861), 8 bits. Shazeer and Stern 2018 (arXiv 1804.04235), Adafactor. Jordan et al. 2024, Muon; Liu
        et al. 2025 (arXiv 2502.16982), section 2.2, its factor.
    """
    groups = _groups(parameters, weight_decay, head_parameters, head_rate, critic_parameters)
    trainable = [parameter for group in groups for parameter in group["params"]]
    if not trainable:
        raise ConfigError("nothing to train: no parameter requires a gradient")
    if frozen := sum(map(is_frozen, trainable)):
        raise ConfigError(
            f"{frozen} of the parameters to train are frozen weights under an adapter, which other models share and no "
            "checkpoint keeps; leave their requires_grad off"
        )
    sharded = any(isinstance(parameter, DTensor) for parameter in trainable)
    # Runs check this when they open; plans do not.
    check_optimizer(kind, trainable[0].device, named="optimizer", is_sharded=sharded)
    if kind == "adamw":
        built = _adamw(groups, learning_rate, adam_eps, adam_eps_mode)
    elif kind == "adamw8bit":
        library = load_bitsandbytes("optimizer=adamw8bit", trainable[0].device)
        settings = {"betas": BETAS, "eps": adam_eps, "min_8bit_size": SMALLEST_IN_8_BITS}
        built = library.optim.AdamW8bit(groups, lr=learning_rate, weight_decay=0.0, **settings)
    elif kind == "adafactor":
        from transformers.optimization import Adafactor

        # torch's Adafactor scales every step by the weight's size and limits the rate to 1/√t, so its rates differ from
        # Adam's.
        built = Adafactor(groups, lr=learning_rate, scale_parameter=False, relative_step=False, weight_decay=0.0)
    else:  # muon
        inner, others = _split(groups, {id(each) for each in inner_matrices})
        parts: list[torch.optim.Optimizer] = []
        if inner:
            parts.append(torch.optim.Muon(inner, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
        if others:
            parts.append(_adamw(others, learning_rate, adam_eps, adam_eps_mode))
        built = OptimizersAsOne(parts)
    return HostState(built) if offload else built


def _groups(
    parameters: Iterable[nn.Parameter],
    weight_decay: float,
    head_parameters: Iterable[nn.Parameter],
    head_rate: float,
    critic_parameters: Iterable[nn.Parameter],
) -> list[dict[str, Any]]:
    """Group the trainable parameters by rate, owner and decay."""
    head_parameters = list(head_parameters)
    head, critic = ({id(each) for each in several} for several in (head_parameters, critic_parameters))
    body = [parameter for parameter in parameters if id(parameter) not in head]
    groups: list[dict[str, Any]] = []
    owners = product(((body, 1.0, False), (head_parameters, head_rate, True)), (False, True))
    for (several, rate, is_head), is_critic in owners:
        trained = [each for each in several if each.requires_grad and (id(each) in critic) == is_critic]
        for matrices, decay in ((True, weight_decay), (False, 0.0)):
            if members := [each for each in trained if (each.ndim >= 2) == matrices]:
                own = {UNIT: 1.0, DECAY: decay} if is_head else {}
                groups.append({"params": members, "weight_decay": decay, RATE: rate, CRITIC: is_critic, **own})
    return groups


def _split(groups: list[dict[str, Any]], inside: set[int]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split the groups into those that muon trains and the others."""

    def half(is_inner: bool) -> list[dict[str, Any]]:
        members = ([each for each in group["params"] if (id(each) in inside) == is_inner] for group in groups)
        return [{**group, "params": own} for group, own in zip(groups, members, strict=True) if own]

    return half(True), half(False)


def _adamw(
    groups: list[dict[str, Any]],
    learning_rate: float,
    adam_eps: float,
    adam_eps_mode: AdamEpsMode,
) -> AdamW:
    """Torch's Adam."""
    trainable = [parameter for group in groups for parameter in group["params"]]
    # A fused implementation does not accept sharded and unsharded tensors in the same call.
    sharded = any(isinstance(parameter, DTensor) for parameter in trainable)
    fused = not sharded and all(parameter.device.type in FUSED_DEVICES for parameter in trainable)
    foreach = False if sharded else None
    if adam_eps_mode == "torch":
        return AdamW(groups, lr=learning_rate, betas=BETAS, eps=adam_eps, fused=fused, foreach=foreach)
    # t counts each parameter's own steps, and a group has a single ε, so each parameter gets its own group.
    groups = [{**group, "params": [parameter], "tf1_step": 0} for group in groups for parameter in group["params"]]
    optimizer = AdamW(groups, lr=learning_rate, betas=BETAS, eps=adam_eps, fused=fused, foreach=foreach)
    for group in optimizer.param_groups:
        group["tf1_eps"] = adam_eps
    optimizer.register_step_pre_hook(_convert_tf1_eps)
    return optimizer


def _convert_tf1_eps(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Set the ε with which torch's next Adam step equals TensorFlow's.

    The step count is stored in the group, hence in the optimizer's state dict, so that a resumed run continues exactly.
    """
    for group in optimizer.param_groups:
        if group["params"][0].grad is None:
            continue
        group["tf1_step"] += 1
        group["eps"] = group["tf1_eps"] / math.sqrt(1.0 - group["betas"][1] ** group["tf1_step"])


def learning_rate_at(
    step: int, num_steps: int, *, learning_rate: float, schedule: Schedule = "linear", warmup_steps: int = 0
) -> float:
    """The learning rate of one optimizer step.

    warm-up (step < w):  lr · (step + 1) / (w + 1)
    then, p = (step − w) / (num_steps − w):  lr · (1 − p)  |  lr · ½(1 + cos πp)  |  lr

    No step has a rate of zero: warm-up starts above it, and decay would reach it one step after the last.

    Args:
        step: Index of the step, from 0.
        num_steps: Steps of the whole run, ≥ 1.
        learning_rate: The peak rate.
        schedule: "linear" or "cosine" decay to 0, or "constant".
        warmup_steps: w ≥ 0.

    Source: spec §3.7 (cosine), §7.35 (linear).
    """
    if step < warmup_steps:
        return learning_rate * (step + 1) / (warmup_steps + 1)
    progress = min((step - warmup_steps) / max(num_steps - warmup_steps, 1), 1.0)
    if schedule == "linear":
        return learning_rate * (1.0 - progress)
    if schedule == "cosine":
        return learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
    return learning_rate


def set_learning_rate(
    optimizer: Optimizer, learning_rate: float, *, critic: float | None = None, value_unit: float = 1.0
) -> None:
    """Set the learning rate of the next steps; each parameter group uses its own multiple of it.

    An output layer w in the unit u learns as w/u would: gradients times u (`scale_output_gradients`), steps times u.
    Then neither the change of its outputs per step nor its gradient's share of a joint norm depends on u.

    Args:
        optimizer: The optimizer.
        learning_rate: The rate of the next steps.
        critic: The rate of a critic's groups; None for the same rate.
        value_unit: u > 0, the unit of the outputs of `head_parameters`.
    """
    for group in optimizer.param_groups:
        rate = critic if critic is not None and group[CRITIC] else learning_rate
        group["lr"] = rate * group[RATE]
        if UNIT in group:
            group[UNIT] = value_unit
            group["lr"] *= value_unit
            group["weight_decay"] = group[DECAY] / value_unit


def scale_output_gradients(optimizer: Optimizer) -> None:
    """Express the gradients of output layers in the unit of their outputs; before clipping. See `set_learning_rate`."""
    for group in optimizer.param_groups:
        if (unit := group.get(UNIT, 1.0)) != 1.0:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(unit)


def all_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parameters_of(optimizer: Optimizer, *, critic: bool) -> list[nn.Parameter]:
    """The parameters of the critic's groups, or all others."""
    return [each for group in optimizer.param_groups if group[CRITIC] == critic for each in group["params"]]


def clip_by_owner(optimizer: Optimizer, max_norm: float | None, ranks: Ranks) -> dict[str, float]:
    """Clip the gradients of the policy and of a separate critic before a step, and return the norms before that.

    They are clipped separately: in a joint norm, a large gradient of the critic would also shrink the policy's step. A
    value head with a gradient that reaches the policy's trunk shares its norm. A model without gradients is left out.

    Source: verl and OpenRLHF, where each model has a separate optimizer.
    """
    scale_output_gradients(optimizer)
    norms: dict[str, float] = {}
    for name, critic in (("policy/grad_norm", False), ("value/grad_norm", True)):
        trained = [each for each in parameters_of(optimizer, critic=critic) if each.grad is not None]
        if trained:
            norms[name] = clip_gradients(trained, max_norm, ranks)
    return norms


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None, ranks: Ranks = ALONE) -> float:
    """Clip the gradients to a joint Euclidean norm of at most `max_norm`; return the norm before clipping.

    If the norm is not finite, nothing is scaled and the norm is returned: the caller decides before any step.

    Args:
        parameters: Parameters whose gradients form one vector; parameters without a gradient are skipped.
        max_norm: Largest norm allowed; None or 0 only measures.
        ranks: The ranks that hold shards of the gradients, if they are sharded.
    """
    parameters = list(parameters)
    gradients = [each.grad for each in parameters if each.grad is not None]
    if ranks.is_sharded:
        return clip_shards(gradients, max_norm, ranks)
    norm = get_total_norm(gradients)
    measured = float(norm)
    if max_norm and math.isfinite(measured):
        clip_grads_with_norm_(parameters, max_norm, norm)
    return measured

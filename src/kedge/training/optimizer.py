"""Adam with explicit ε, learning-rate schedules, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer

from kedge.errors import ConfigError
from kedge.ranks import ALONE, Ranks
from kedge.ranks.sharding import clip_shards

AdamEpsMode = Literal["torch", "tf1"]
Schedule = Literal["linear", "cosine", "constant"]

RATE = "learning_rate_multiple"
"""Parameter group key: the group's learning rate as a multiple of the schedule's; part of the optimizer's state."""

CRITIC = "is_critic"
"""Parameter group key: whether the group belongs to a critic that shares no gradient with the policy."""

FUSED_DEVICES = frozenset({"cpu", "cuda"})
"""Devices with a fused implementation; on a CPU it is two to four times as fast as the loop over parameters."""


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    adam_eps: float = 1e-5,
    adam_eps_mode: AdamEpsMode = "torch",
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    head_parameters: Iterable[nn.Parameter] = (),
    head_rate: float = 1.0,
    critic_parameters: Iterable[nn.Parameter] = (),
) -> AdamW:
    """Adam with an explicit ε and, by default, no weight decay.

    torch:  θ ← θ − lr / (1−β₁ᵗ) · m / (√(v / (1−β₂ᵗ)) + ε)
    tf1:    θ ← θ − lr · √(1−β₂ᵗ) / (1−β₁ᵗ) · m / (√v + ε)

    The second is TensorFlow's; it equals the first with ε/√(1−β₂ᵗ) for ε: 31.6 times as large in the first step, ten
    times in the tenth. The first published PPO results for language models used it.

    Args:
        parameters: Parameters to train; frozen ones are skipped.
        learning_rate: Peak step size, ≥ 0; `set_learning_rate` changes it during the run.
        adam_eps: ε ≥ 0.
        adam_eps_mode: Definition of ε: "torch" or "tf1".
        betas: Decay rates (β₁, β₂) of the two moments, each in [0, 1).
        weight_decay: Decoupled decay per unit of learning rate, ≥ 0; applied to matrices only, not to norms and biases.
        head_parameters: Parameters to train at their own rate: a new head has further to go.
        head_rate: Their learning rate as a multiple of the others', throughout the schedule.
        critic_parameters: Those of a critic that shares no gradient with the policy: `set_learning_rate` can give them
            another rate, and their gradient is clipped apart.

    Raises:
        ConfigError: No parameter is trainable, or the mode is unknown.

    Source: spec §7.35; Kingma and Ba 2015, end of section 2, gives the form used by TensorFlow.
    """
    head_parameters = list(head_parameters)
    head, critic = ({id(each) for each in several} for several in (head_parameters, critic_parameters))
    body = [parameter for parameter in parameters if id(parameter) not in head]
    kinds = [
        ([each for each in several if (id(each) in critic) == is_critic], rate, is_critic)
        for several, rate in ((body, 1.0), (head_parameters, head_rate))
        for is_critic in (False, True)
    ]
    groups = [
        {"params": members, "weight_decay": decay, RATE: rate, CRITIC: is_critic}
        for several, rate, is_critic in kinds
        for members, decay in ((_trainable(several, matrices=True), weight_decay), (_trainable(several), 0.0))
        if members
    ]
    trainable = [parameter for group in groups for parameter in group["params"]]
    if not trainable:
        raise ConfigError("nothing to train: no parameter requires a gradient")
    # Parts and whole tensors do not mix in one call of a fused implementation.
    sharded = any(isinstance(parameter, DTensor) for parameter in trainable)
    fused = not sharded and all(parameter.device.type in FUSED_DEVICES for parameter in trainable)
    foreach = False if sharded else None
    if adam_eps_mode == "torch":
        return AdamW(groups, lr=learning_rate, betas=betas, eps=adam_eps, fused=fused, foreach=foreach)
    if adam_eps_mode == "tf1":
        # t counts each parameter's own steps, and a group has a single ε, so each parameter gets its own group.
        groups = [{**group, "params": [parameter], "tf1_step": 0} for group in groups for parameter in group["params"]]
        optimizer = AdamW(groups, lr=learning_rate, betas=betas, eps=adam_eps, fused=fused, foreach=foreach)
        for group in optimizer.param_groups:
            group["tf1_eps"] = adam_eps
        optimizer.register_step_pre_hook(_convert_tf1_eps)
        return optimizer
    raise ConfigError(f"adam_eps_mode: {adam_eps_mode!r} is unknown; expected 'torch' or 'tf1'")


def _trainable(parameters: Iterable[nn.Parameter], *, matrices: bool = False) -> list[nn.Parameter]:
    return [each for each in parameters if each.requires_grad and (each.ndim >= 2) == matrices]


def _convert_tf1_eps(optimizer: Optimizer, *_: object) -> None:
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

    Raises:
        ConfigError: The schedule is unknown.

    Source: spec §3.7 (cosine), §7.35 (linear).
    """
    if step < warmup_steps:
        return learning_rate * (step + 1) / (warmup_steps + 1)
    progress = min((step - warmup_steps) / max(num_steps - warmup_steps, 1), 1.0)
    if schedule == "linear":
        return learning_rate * (1.0 - progress)
    if schedule == "cosine":
        return learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
    if schedule == "constant":
        return learning_rate
    raise ConfigError(f"schedule: {schedule!r} is unknown; expected 'linear', 'cosine' or 'constant'")


def set_learning_rate(optimizer: Optimizer, learning_rate: float, *, critic: float | None = None) -> None:
    """Set the learning rate of the next steps; each parameter group uses its own multiple of it.

    Args:
        optimizer: The optimizer.
        learning_rate: The rate of the next steps.
        critic: The rate of a critic's groups; None for the same.
    """
    for group in optimizer.param_groups:
        rate = critic if critic is not None and group[CRITIC] else learning_rate
        group["lr"] = rate * group[RATE]


def parameters_of(optimizer: Optimizer, *, critic: bool) -> list[nn.Parameter]:
    """The parameters of the critic's groups, or all others."""
    return [each for group in optimizer.param_groups if group[CRITIC] == critic for each in group["params"]]


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None, ranks: Ranks = ALONE) -> float:
    """Clip the gradients to a joint Euclidean norm of at most `max_norm`; return the norm before clipping.

    If the norm is not finite, nothing is scaled and the norm is returned: the caller decides before any step.

    Args:
        parameters: Parameters whose gradients form one vector; those without a gradient are skipped.
        max_norm: Largest norm allowed; None or 0 only measures.
        ranks: The ranks that hold parts of the gradients, if they do.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    if ranks.is_sharded:
        return clip_shards([each.grad for each in parameters if each.grad is not None], max_norm, ranks)
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    measured = float(norm)
    if max_norm and math.isfinite(measured):
        clip_grads_with_norm_(parameters, max_norm, norm)
    return measured

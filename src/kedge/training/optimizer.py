"""Adam as reinforcement learning wants it, the learning-rate schedules, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer

from kedge.errors import ConfigError

AdamEpsMode = Literal["torch", "tf1"]
Schedule = Literal["linear", "cosine", "constant"]

RATE = "learning_rate_multiple"
"""The key of a parameter group's own rate, as a multiple of the schedule's; it is saved with the optimizer's state."""

# Where torch has a one-pass implementation; on a CPU it is two to four times as fast as its loop over the parameters.
FUSED_DEVICES = frozenset({"cpu", "cuda"})


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
) -> AdamW:
    """Adam with an explicit ε, and no weight decay unless asked for.

    torch:  θ ← θ − lr / (1−β₁ᵗ) · m / (√(v / (1−β₂ᵗ)) + ε)
    tf1:    θ ← θ − lr · √(1−β₂ᵗ) / (1−β₁ᵗ) · m / (√v + ε)

    The second is TensorFlow's, and equals the first with ε/√(1−β₂ᵗ) for ε: 31.6 times as large in the first step, ten
    times in the tenth. The first published PPO figures for language models were made with it.

    Args:
        parameters: What is trained; frozen parameters are left out.
        learning_rate: Peak step size, ≥ 0; `set_learning_rate` changes it during the run.
        adam_eps: ε ≥ 0.
        adam_eps_mode: Whose meaning of ε: "torch" or "tf1".
        betas: Decay rates (β₁, β₂) of the two moments, each in [0, 1).
        weight_decay: Decoupled decay per unit of learning rate, ≥ 0; of matrices only, never of norms and biases.
        head_parameters: Trained as well, at a rate of their own: a head that starts from nothing has far to go.
        head_rate: Their learning rate as a multiple of everybody else's, throughout the schedule.

    Raises:
        ConfigError: No parameter is trainable, or the mode is unknown.

    Source: spec §7.35; Kingma and Ba 2015, end of section 2, gives the form that TensorFlow took over.
    """
    head_parameters = list(head_parameters)
    head = {id(parameter) for parameter in head_parameters}
    body = [parameter for parameter in parameters if id(parameter) not in head]
    groups = [
        {"params": members, "weight_decay": decay, RATE: rate}
        for several, rate in ((body, 1.0), (head_parameters, head_rate))
        for members, decay in ((_trainable(several, matrices=True), weight_decay), (_trainable(several), 0.0))
        if members
    ]
    trainable = [parameter for group in groups for parameter in group["params"]]
    if not trainable:
        raise ConfigError("nothing to train: none of the parameters requires a gradient")
    fused = all(parameter.device.type in FUSED_DEVICES for parameter in trainable)
    if adam_eps_mode == "torch":
        return AdamW(groups, lr=learning_rate, betas=betas, eps=adam_eps, fused=fused)
    if adam_eps_mode == "tf1":
        # t is a parameter's own count of steps, and a group has only one ε: so a group for each parameter.
        groups = [{**group, "params": [parameter], "tf1_step": 0} for group in groups for parameter in group["params"]]
        optimizer = AdamW(groups, lr=learning_rate, betas=betas, eps=adam_eps, fused=fused)
        for group in optimizer.param_groups:
            group["tf1_eps"] = adam_eps
        optimizer.register_step_pre_hook(_convert_tf1_eps)
        return optimizer
    raise ConfigError(f"adam_eps_mode: {adam_eps_mode!r} is unknown; expected 'torch' or 'tf1'")


def _trainable(parameters: Iterable[nn.Parameter], *, matrices: bool = False) -> list[nn.Parameter]:
    return [each for each in parameters if each.requires_grad and (each.ndim >= 2) == matrices]


def _convert_tf1_eps(optimizer: Optimizer, *_: object) -> None:
    """Give torch's Adam the ε that makes its coming step TensorFlow's.

    The count lives in the group, thus in the optimizer's state dict: a resumed run continues exactly.
    """
    for group in optimizer.param_groups:
        if group["params"][0].grad is None:
            continue
        group["tf1_step"] += 1
        group["eps"] = group["tf1_eps"] / math.sqrt(1.0 - group["betas"][1] ** group["tf1_step"])


def learning_rate_at(
    step: int, num_steps: int, *, learning_rate: float, schedule: Schedule = "linear", warmup_steps: int = 0
) -> float:
    """The learning rate of one optimiser step.

    warm-up (step < w):  lr · (step + 1) / (w + 1)
    then, p = (step − w) / (num_steps − w):  lr · (1 − p)  |  lr · ½(1 + cos πp)  |  lr

    The first step of all is never wasted on a rate of zero; nor is the last, because zero would be reached one later.

    Args:
        step: Index of the step, from 0.
        num_steps: Steps of the whole run, ≥ 1.
        learning_rate: The peak.
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


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Use this learning rate from the next step on: each parameter group takes its own multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group[RATE]


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> float:
    """Scale the gradients down to a joint Euclidean norm of at most `max_norm`; return the norm they had before.

    A norm that is not finite is returned and nothing is scaled: the caller decides, before the weights are spoilt.

    Args:
        parameters: Parameters whose gradients form one vector; those without a gradient do not matter.
        max_norm: Largest norm allowed; None or 0 only measures.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    measured = float(norm)
    if max_norm and math.isfinite(measured):
        clip_grads_with_norm_(parameters, max_norm, norm)
    return measured

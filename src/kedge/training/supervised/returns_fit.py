"""Trains a critic on returns: least squares for the head, then all weights of a critic that has a separate model."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import nn
from typing_extensions import Unpack

from kedge.models import Precision
from kedge.models.pretrained import inner_matrices
from kedge.system.ranks import ALONE, PassTokens, Ranks
from kedge.training.checkpoint.loop import CheckpointedLoop, PlainLoop
from kedge.training.checkpoint.state import TrainingState
from kedge.training.optimizer import build_optimizer
from kedge.training.supervised.loop import (
    LastEvaluation,
    Outcome,
    StepCallback,
    TrainingSettings,
    evaluate,
    train_supervised,
)
from kedge.training.supervised.returns import Head, ReturnsLoss, fit_head

__all__ = ["train_critic"]


def train_critic(
    loss: ReturnsLoss,
    rows: Sequence[int],
    *,
    held_out: Sequence[int] = (),
    precision: Precision = "fp32",
    **training: Unpack[TrainingSettings],
) -> Outcome:
    """Fit the critic's head to the returns in closed form; then, if the critic is separate, fine-tune all of it.

    The least-squares fit is step 0 of a separate critic, and the only step of a head on the policy's trunk.

    Args:
        loss: Critic and responses.
        rows: The responses to fit to.
        held_out: Those to evaluate on.
        precision: As in `loss`.
        training: Learning rate, batch size and so on: the arguments of `train_supervised`.
    """
    loop = training.get("loop") or PlainLoop()
    budget = training.get("micro_batch_tokens")
    ranks = training.get("ranks", ALONE)
    if not loop.done:  # else a checkpoint has it
        fit_head(loss, rows, micro_batch_tokens=budget, ranks=ranks)
    critic = loss.actor_critic.critic
    if critic is not None:
        training["state"] = {"head": Head(loss.actor_critic)}
        head = critic.value_head
        return train_supervised(
            loss,
            critic.parameters(),
            rows,
            held_out=held_out,
            inner_matrices=inner_matrices(critic),
            head_parameters=() if head is None else head.parameters(),
            value_unit=loss.unit,
            **training,
        )
    on_step = training.get("on_step", lambda step, metrics: None)
    return _one_step(loss, rows, held_out, loop, on_step, micro_batch_tokens=budget, ranks=ranks)


def _one_step(
    loss: ReturnsLoss,
    rows: Sequence[int],
    held_out: Sequence[int],
    loop: CheckpointedLoop | PlainLoop,
    on_step: StepCallback,
    *,
    micro_batch_tokens: PassTokens,
    ranks: Ranks,
) -> Outcome:
    """Report the fitted head as the first and last step; there is nothing left to optimize."""
    head = loss.actor_critic.policy.value_head
    evaluation = LastEvaluation()
    assert head is not None
    weights = nn.ParameterList(head.parameters())
    optimizer = build_optimizer(weights, learning_rate=0.0)
    loop.restore(TrainingState({"weights": weights}, optimizer, {"evaluation": evaluation}))
    for step in loop.steps(1):
        started = time.perf_counter()
        metrics = evaluate(loss, rows, micro_batch_tokens=micro_batch_tokens, ranks=ranks)
        if held_out:
            evaluation.metrics = evaluate(loss, held_out, micro_batch_tokens=micro_batch_tokens, ranks=ranks)
            metrics |= {f"eval/{name}": value for name, value in evaluation.metrics.items()}
        on_step(step, metrics | {"time/update": time.perf_counter() - started})
    return Outcome(1, evaluation=evaluation.metrics)

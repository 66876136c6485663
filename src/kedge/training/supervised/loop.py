"""The supervised loop that fine-tuning and the reward model share: one gradient per batch, however it is split."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Required, TypedDict

from kedge.errors import ConfigError, DataError, NumericsError
from kedge.models import budget_batches
from kedge.training.checkpoint.resume import CheckpointedLoop, PlainLoop, TrainingState
from kedge.training.optimizer import (
    AdamEpsMode,
    Schedule,
    build_optimizer,
    clip_gradients,
    learning_rate_at,
    set_learning_rate,
)
from kedge.training.runtime import stream
from kedge.training.stopping import Terminated

__all__ = [
    "Outcome",
    "SupervisedLoss",
    "TrainingSettings",
    "accumulate_gradients",
    "check_lengths",
    "count_steps",
    "evaluate",
    "train_supervised",
]

Example = TypeVar("Example")
Example_contra = TypeVar("Example_contra", contravariant=True)
StepCallback = Callable[[int, dict[str, float]], None]


class SupervisedLoss(Protocol[Example_contra]):
    """A loss that is a weighted mean over examples: Σ sums / Σ weights.

    Numerator and denominator are told apart so that a batch can be computed in parts.
    """

    def weight(self, example: Example_contra) -> float:
        """What the example adds to the denominator: its counted tokens, or 1."""
        ...

    def length(self, example: Example_contra) -> int:
        """Tokens that the model reads for it; examples of like length share a forward pass."""
        ...

    def sums(self, examples: Sequence[Example_contra]) -> Mapping[str, Tensor]:
        """The numerators: `loss`, which is differentiated, and any other figures to log."""
        ...


@dataclass(frozen=True)
class Outcome:
    """How a training run ended.

    Attributes:
        num_steps: Optimiser steps taken.
        interruption: Ctrl-C or SIGTERM, where one of them ended it early; None else. The weights are those of the last
            whole step.
        evaluation: The last figures on the held-out examples, by name; empty without held-out examples.
    """

    num_steps: int
    interruption: BaseException | None = None
    evaluation: dict[str, float] = field(default_factory=dict)


@dataclass
class LastEvaluation:
    """The metrics of the last evaluation on held-out examples; resumed with the run.

    Attributes:
        metrics: By name; empty before the first evaluation.
    """

    metrics: dict[str, float] = field(default_factory=dict)

    def state_dict(self) -> dict[str, float]:
        """The metrics."""
        return dict(self.metrics)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from `state`."""
        self.metrics = dict(state)


class TrainingSettings(TypedDict, total=False):
    """The keyword arguments of `train_supervised` that the stages hand on as they are; it says what they mean."""

    learning_rate: Required[float]
    num_epochs: float
    batch_size: Required[int]
    micro_batch_tokens: int | None
    schedule: Schedule
    warmup_fraction: float
    max_grad_norm: float | None
    weight_decay: float
    adam_eps: float
    adam_eps_mode: AdamEpsMode
    num_evaluations: int
    seed: int
    on_step: StepCallback
    loop: CheckpointedLoop | PlainLoop


def train_supervised(
    objective: SupervisedLoss[Example],
    parameters: Iterable[nn.Parameter],
    examples: Sequence[Example],
    *,
    held_out: Sequence[Example] = (),
    learning_rate: float,
    num_epochs: float = 1.0,
    batch_size: int,
    micro_batch_tokens: int | None = None,
    schedule: Schedule = "cosine",
    warmup_fraction: float = 0.0,
    max_grad_norm: float | None = 1.0,
    weight_decay: float = 0.0,
    adam_eps: float = 1e-5,
    adam_eps_mode: AdamEpsMode = "torch",
    num_evaluations: int = 5,
    seed: int = 0,
    on_step: StepCallback = lambda step, metrics: None,
    loop: CheckpointedLoop | PlainLoop | None = None,
) -> Outcome:
    """Minimise an objective over shuffled batches with Adam.

    Ctrl-C or SIGTERM ends the run as if it had been shorter: the outcome says so, and the caller saves what has been
    learnt.
    (Long for its arguments alone: the whole loop is to be seen at once.)

    Args:
        objective: What is minimised.
        parameters: What is trained.
        examples: What is learnt from, at least one.
        held_out: What is only evaluated on.
        learning_rate: Peak step size.
        num_epochs: Passes over the examples, > 0; a fraction is a part of a pass.
        batch_size: Examples per optimiser step.
        micro_batch_tokens: Tokens per forward pass, None for the whole batch. It bounds memory and changes no result.
        schedule: Course of the learning rate.
        warmup_fraction: Share of the steps, in [0, 1), in which the learning rate rises.
        max_grad_norm: Gradients are clipped to this norm; None or 0 for no clipping.
        weight_decay: See `build_optimizer`, also for the next two.
        adam_eps: Adam's ε.
        adam_eps_mode: Whose meaning of ε.
        num_evaluations: Evaluations on the held-out examples, evenly over the run, the last after the last step.
        seed: Decides the order of the examples.
        on_step: Receives the number of each step, from 1, and its metrics.
        loop: Counts the steps, saves and resumes the run; None saves nothing.

    Raises:
        NumericsError: A loss or gradient was not finite; the weights are those before it. The example is named.
    """
    weights = nn.ParameterList(parameters)
    num_steps = count_steps(len(examples), num_epochs=num_epochs, batch_size=batch_size)
    warmup_steps, split = round(warmup_fraction * num_steps), micro_batch_tokens
    optimizer = build_optimizer(
        weights,
        learning_rate=learning_rate,
        adam_eps=adam_eps,
        adam_eps_mode=adam_eps_mode,
        weight_decay=weight_decay,
    )
    loop, evaluation = loop or PlainLoop(), LastEvaluation()
    loop.restore(TrainingState({"weights": weights}, optimizer, {"evaluation": evaluation}))
    taken = loop.done
    batches = _batches(len(examples), num_epochs=num_epochs, batch_size=batch_size, seed=seed)
    try:
        for step, rows in zip(loop.steps(num_steps), islice(batches, loop.done, None), strict=False):
            rate = learning_rate_at(
                step - 1, num_steps, learning_rate=learning_rate, schedule=schedule, warmup_steps=warmup_steps
            )
            set_learning_rate(optimizer, rate)
            loop.begin_changes()
            metrics = _take_step(
                objective, optimizer, examples, rows, micro_batch_tokens=split, max_grad_norm=max_grad_norm
            )
            taken = step
            if held_out and step * num_evaluations // num_steps > (step - 1) * num_evaluations // num_steps:
                evaluation.metrics = evaluate(objective, held_out, micro_batch_tokens=split)
                metrics |= {f"eval/{name}": value for name, value in evaluation.metrics.items()}
            on_step(step, metrics | {"learning_rate": rate})
    except (KeyboardInterrupt, Terminated) as interruption:
        loop.save()  # before the caller changes the weights for the model that it saves
        return Outcome(taken, interruption, evaluation.metrics)
    return Outcome(taken, evaluation=evaluation.metrics)


def count_steps(num_examples: int, *, num_epochs: float, batch_size: int) -> int:
    """Optimiser steps of a run: ⌈examples · epochs / batch size⌉, at least 1.

    Raises:
        ConfigError: There is nothing to learn from.
    """
    if num_examples < 1:
        raise ConfigError("no training examples are left; give more data or hold out fewer")
    return math.ceil(_num_draws(num_examples, num_epochs) / batch_size)


def check_lengths(lengths: Iterable[int], limit: int | None) -> None:
    """Refuse rows that the model has no positions for, before any training.

    Raises:
        DataError: The longest row is longer than `limit` tokens.
    """
    longest = max(lengths, default=0)
    if limit is not None and longest > limit:
        raise DataError(f"a row is {longest} tokens long, but the model reads at most {limit}; leave such rows out")


def accumulate_gradients(
    objective: SupervisedLoss[Example], batch: Sequence[Example], *, micro_batch_tokens: int | None
) -> dict[str, float]:
    """Add the gradient of the batch's mean loss to the parameters; return the batch's means by name.

    The divisor is the whole batch's weight, so that 1×8 and 8×1 examples give one gradient.

    Source: spec §6.30.
    """
    return _means(objective, batch, micro_batch_tokens, lambda loss: loss.backward())


@torch.no_grad()
def evaluate(
    objective: SupervisedLoss[Example], examples: Sequence[Example], *, micro_batch_tokens: int | None
) -> dict[str, float]:
    """The objective's means over the examples, without any gradient."""
    return _means(objective, examples, micro_batch_tokens, lambda loss: None)


def _means(
    objective: SupervisedLoss[Example], batch: Sequence[Example], budget: int | None, use: Callable[[Tensor], None]
) -> dict[str, float]:
    total = sum(objective.weight(example) for example in batch)
    sums: dict[str, float] = {}
    for rows in budget_batches([objective.length(example) for example in batch], budget):
        terms = objective.sums([batch[row] for row in rows])
        use(terms["loss"] / total)
        for name, term in terms.items():
            sums[name] = sums.get(name, 0.0) + float(term.detach())
    return {name: value / total for name, value in sums.items()}


def _take_step(
    objective: SupervisedLoss[Example],
    optimizer: Optimizer,
    examples: Sequence[Example],
    rows: Sequence[int],
    *,
    micro_batch_tokens: int | None,
    max_grad_norm: float | None,
) -> dict[str, float]:
    started = time.perf_counter()
    batch = [examples[row] for row in rows]
    optimizer.zero_grad()
    metrics = accumulate_gradients(objective, batch, micro_batch_tokens=micro_batch_tokens)
    norm = clip_gradients([weight for group in optimizer.param_groups for weight in group["params"]], max_grad_norm)
    if not (math.isfinite(norm) and math.isfinite(metrics["loss"])):
        culprit = _find_culprit(objective, examples, rows)
        raise NumericsError(
            f"the gradient is {norm} (loss {metrics['loss']:.4g}; {culprit}): a lower learning_rate may help"
        )
    optimizer.step()
    seconds = time.perf_counter() - started
    tokens = sum(objective.length(example) for example in batch)
    return metrics | {"grad_norm": norm, "time/update": seconds, "tokens_per_second": tokens / seconds}


def _find_culprit(objective: SupervisedLoss[Example], examples: Sequence[Example], rows: Iterable[int]) -> str:
    """The first of some examples whose loss is not finite when it is alone, in words."""
    for row in rows:
        loss = evaluate(objective, [examples[row]], micro_batch_tokens=None)["loss"]
        if not math.isfinite(loss):
            return f"example {row} alone, counted from 0 among those that are trained on, has {loss}"
    return "the loss of each example alone is finite"


def _num_draws(num_examples: int, num_epochs: float) -> int:
    return max(1, round(num_examples * num_epochs))


def _batches(num_examples: int, *, num_epochs: float, batch_size: int, seed: int) -> Iterator[Sequence[int]]:
    """Shuffle anew each pass and cut the passes, end to end, into batches; only the very last can be smaller."""
    draws = _num_draws(num_examples, num_epochs)
    order: list[int] = []
    for epoch in range(math.ceil(draws / num_examples)):
        order += torch.randperm(num_examples, generator=stream(seed, "supervised", epoch)).tolist()
    for start in range(0, draws, batch_size):
        yield order[start : min(start + batch_size, draws)]

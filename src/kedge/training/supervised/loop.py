"""The supervised training loop of SFT and reward models: one gradient per batch, for every split."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import TypedDict, Unpack

from kedge.models import Precision
from kedge.ranks import (
    ALONE,
    AdaptiveTokens,
    PassTokens,
    Prompts,
    Ranks,
    budget_metrics,
    within_memory,
)
from kedge.training.checkpoint.loop import CheckpointedLoop, PlainLoop
from kedge.training.checkpoint.state import Stateful, TrainingState
from kedge.training.optimizer import (
    AdamEpsMode,
    Schedule,
    all_parameters,
    build_optimizer,
    clip_gradients,
    learning_rate_at,
    scale_output_gradients,
    set_learning_rate,
)
from kedge.training.optimizer_kinds import Optimizer, OptimizerKind
from kedge.training.pass_trial import find_tokens
from kedge.training.runtime import Terminated, stream
from kedge_base.errors import ConfigError, DataError, NumericsError
from kedge_base.machine.memory import in_phase

Example = TypeVar("Example")
Example_contra = TypeVar("Example_contra", contravariant=True)


class Passes(TypedDict, total=False):
    """Arguments of forward passes: tokens per pass, and the ranks that share the examples."""

    micro_batch_tokens: PassTokens
    ranks: Ranks


class SupervisedLoss(Protocol[Example_contra]):
    """A loss that is a weighted mean over examples: Σ sums / Σ weights.

    Numerator and denominator are separate so that a batch can be computed in parts.
    """

    def weight(self, example: Example_contra) -> float:
        """The example's share of the denominator: its counted tokens, or 1."""
        ...

    def length(self, example: Example_contra) -> int:
        """Tokens of the example."""
        ...

    def tokens_read(self, examples: Sequence[Example_contra]) -> tuple[list[int], Prompts]:
        """Tokens that the model reads for each example alone, and those that examples share in a pass."""
        ...

    def sums(self, examples: Sequence[Example_contra]) -> Mapping[str, Tensor]:
        """The numerators: `loss`, differentiable, and other metrics to log."""
        ...


@dataclass
class Outcome:
    """The result of a training run; the evaluation is resumed with the run.

    Attributes:
        num_steps: Optimizer steps taken.
        interruption: The exception of Ctrl-C or SIGTERM if it ended training early, else None. Only an optimizer step
            or evaluation that takes longer than the grace period is cut short: then the weights have moved, and no
            checkpoint has their state.
        evaluation: The metrics of the trained weights on the held-out examples, by name; empty without such examples,
            and after an interruption.
    """

    num_steps: int
    interruption: BaseException | None = None
    evaluation: dict[str, float] = field(default_factory=dict)

    def state_dict(self) -> dict[str, float]:
        """The evaluation."""
        return dict(self.evaluation)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a `state_dict`."""
        self.evaluation = dict(state)


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of supervised training.

    Attributes:
        learning_rate: Peak learning rate.
        batch_size: Examples per optimizer step.
        num_epochs: Passes over the examples, > 0; can be a fraction.
        micro_batch_tokens: Tokens per forward pass; None for the whole batch. Limits memory without changing results.
        schedule: Learning rate schedule.
        warmup_fraction: Share of the steps, in [0, 1), with a rising learning rate.
        max_grad_norm: Gradients are clipped to this norm; None or 0 for no clipping.
        optimizer: The kind; see `build_optimizer`, as for the next four.
        offload_optimizer: Keep its state in host memory between steps.
        weight_decay: Decay of the weights.
        adam_eps: Adam's ε.
        adam_eps_mode: Where ε is added.
        num_evaluations: Evaluations on the held-out examples, evenly spaced, the last one after the last step.
        precision: Number format of the matrix products.
        seed: The seed of the order of the examples.
        order: Returns the examples of a pass, given its number from 0; None shuffles all examples.
        on_step: Called with the number of each step, from 1, and its metrics.
        loop: Counts the steps, saves and resumes the run.
        ranks: The ranks that share the examples of a batch; each has all of them.
    """

    learning_rate: float
    batch_size: int
    num_epochs: float = 1.0
    micro_batch_tokens: PassTokens = None
    schedule: Schedule = "cosine"
    warmup_fraction: float = 0.0
    max_grad_norm: float | None = 1.0
    optimizer: OptimizerKind = "adamw"
    offload_optimizer: bool = False
    weight_decay: float = 0.0
    adam_eps: float = 1e-5
    adam_eps_mode: AdamEpsMode = "torch"
    num_evaluations: int = 5
    precision: Precision = "fp32"
    seed: int = 0
    order: Callable[[int], Sequence[int]] | None = None
    on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None
    loop: CheckpointedLoop | PlainLoop = field(default_factory=PlainLoop)
    ranks: Ranks = ALONE

    @property
    def passes(self) -> Passes:
        """The arguments of forward passes."""
        return {"micro_batch_tokens": self.micro_batch_tokens, "ranks": self.ranks}


def train_supervised(
    objective: SupervisedLoss[Example],
    parameters: Iterable[nn.Parameter],
    examples: Sequence[Example],
    settings: TrainingSettings,
    *,
    held_out: Sequence[Example] = (),
    inner_matrices: Iterable[nn.Parameter] = (),
    head_parameters: Iterable[nn.Parameter] = (),
    head_rate: float = 1.0,
    value_unit: float = 1.0,
    parts: Mapping[str, Stateful] | None = None,
) -> Outcome:
    """Minimize an objective over shuffled batches.

    On Ctrl-C or SIGTERM it returns early: the outcome has the interruption, and the caller saves the model so far. If
    the weights are sharded and the ranks did not stop in the same place, nothing can be saved, and the exception is
    raised. (Over 60 lines only because of its arguments; the loop is kept in one piece.)

    Args:
        objective: The loss to minimize.
        parameters: The parameters to train.
        examples: The training examples, at least one.
        settings: The settings.
        held_out: Examples for evaluation only.
        inner_matrices: The layers' matrices; see `build_optimizer`.
        head_parameters: The output layer whose outputs have the unit `value_unit`; see `set_learning_rate`.
        head_rate: Its learning rate as a multiple of the others'.
        value_unit: That unit.
        parts: Additional parts to save and restore, by name.

    Raises:
        NumericsError: A loss or gradient is not finite; names the example. The weights are those before the step.
        KeyboardInterrupt, Terminated: See above.
    """
    weights = nn.ParameterList(parameters)
    num_steps = count_steps(len(examples), num_epochs=settings.num_epochs, batch_size=settings.batch_size)
    optimizer = build_optimizer(
        weights,
        kind=settings.optimizer,
        inner_matrices=inner_matrices,
        head_parameters=head_parameters,
        head_rate=head_rate,
        offload=settings.offload_optimizer,
        learning_rate=settings.learning_rate,
        adam_eps=settings.adam_eps,
        adam_eps_mode=settings.adam_eps_mode,
        weight_decay=settings.weight_decay,
    )
    loop = settings.loop
    outcome = Outcome(loop.done)
    budget = settings.micro_batch_tokens
    loop.restore(TrainingState({"weights": weights}, optimizer, {"evaluation": outcome, **(parts or {})}))
    if isinstance(budget, AdaptiveTokens):
        longest = sorted(examples, key=objective.length)[-2:]
        lengths, prompts = objective.tokens_read(longest)
        find_tokens(
            budget,
            lengths,
            lambda rows: objective.sums([longest[row] for row in rows])["loss"].backward(),
            optimizer,
            prompts=prompts,
            ranks=settings.ranks,
        )
    batches = draw_batches(
        len(examples), settings.num_epochs, settings.batch_size, seed=settings.seed, order=settings.order
    )
    evaluations = settings.num_evaluations if held_out else 0

    def is_due(step: int) -> bool:
        return step * evaluations // num_steps > (step - 1) * evaluations // num_steps

    try:
        for step, rows in zip(loop.steps(num_steps), batches[loop.done :], strict=False):
            rate = learning_rate_at(
                step - 1,
                num_steps,
                learning_rate=settings.learning_rate,
                schedule=settings.schedule,
                warmup_steps=round(settings.warmup_fraction * num_steps),
            )
            set_learning_rate(optimizer, rate, value_unit=value_unit)
            with in_phase("the update"):
                metrics = _take_step(objective, optimizer, examples, rows, settings)
            outcome.num_steps = step
            if is_due(step):
                metrics |= evaluate_held_out(objective, held_out, outcome, settings)
            settings.on_step(step, metrics | {"learning_rate": rate})
    except (KeyboardInterrupt, Terminated) as interruption:
        if not loop.can_save:
            raise
        loop.save()  # now, because the caller modifies the weights when it saves the model
        outcome.interruption = interruption
        outcome.evaluation = {}  # it may be that of earlier weights
    else:
        if evaluations and not is_due(outcome.num_steps):  # the run has ended early
            evaluate_held_out(objective, held_out, outcome, settings)
    return outcome


def evaluate_held_out(
    objective: SupervisedLoss[Example], held_out: Sequence[Example], outcome: Outcome, settings: TrainingSettings
) -> dict[str, float]:
    """Evaluate on the held-out examples; metrics get the prefix `eval/` and are stored in the outcome."""
    with in_phase("evaluation"):
        outcome.evaluation = evaluate(objective, held_out, **settings.passes)
    return {f"eval/{name}": value for name, value in outcome.evaluation.items()}


def count_steps(num_examples: int, *, num_epochs: float, batch_size: int) -> int:
    """Compute the optimizer steps of a run: ⌈examples · epochs / batch size⌉, at least 1.

    Raises:
        ConfigError: The examples are empty.
    """
    if num_examples < 1:
        raise ConfigError("no training examples are left; add data, or hold out fewer rows")
    return math.ceil(_num_draws(num_examples, num_epochs) / batch_size)


def check_lengths(lengths: Iterable[int], limit: int | None) -> None:
    """Reject rows that exceed the model's context, before training.

    Raises:
        DataError: The longest row has more than `limit` tokens.
    """
    longest = max(lengths, default=0)
    if limit is not None and longest > limit:
        raise DataError(f"a row has {longest} tokens, but the model reads at most {limit}; remove such rows")


def accumulate_gradients(
    objective: SupervisedLoss[Example],
    batch: Sequence[Example],
    *,
    micro_batch_tokens: PassTokens = None,
    ranks: Ranks = ALONE,
    begin: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Add the gradient of this rank's share of the batch's mean loss to the parameters; return the batch means by name.

    The divisor is the weight of the whole batch, so that 1×8 and 8×1 examples give the same gradient.

    Args:
        objective: The loss.
        batch: The examples, which all ranks have.
        micro_batch_tokens: Tokens per pass.
        ranks: They share the examples.
        begin: Clears the gradients; called first, and again before the passes are repeated with smaller parts.

    Source: spec §6.30.
    """
    total = sum(map(objective.weight, batch)) or 1  # rows without a learned token have no weight
    lengths, prompts = objective.tokens_read(batch)

    def summed() -> dict[str, float]:
        begin()
        sums: dict[str, float] = {}
        for part in ranks.plan(lengths, micro_batch_tokens, prompts):
            terms = objective.sums([batch[row] for row in part.rows])
            if torch.is_grad_enabled():  # they are off in `evaluate`
                loss = terms["loss"]
                (loss / total if part.counts else loss * 0.0).backward()
            for name, term in terms.items():
                sums[name] = sums.get(name, 0.0) + (float(term.detach()) if part.counts else 0.0)
        return sums

    sums = within_memory(micro_batch_tokens, lengths, summed, prompts=prompts, ranks=ranks)
    return {name: value / total for name, value in zip(sums, ranks.sums(list(sums.values())), strict=True)}


@torch.no_grad()
def evaluate(
    objective: SupervisedLoss[Example], examples: Sequence[Example], **passes: Unpack[Passes]
) -> dict[str, float]:
    """Compute the objective's means over the examples, without gradients."""
    return accumulate_gradients(objective, examples, **passes)


def _take_step(
    objective: SupervisedLoss[Example],
    optimizer: Optimizer,
    examples: Sequence[Example],
    rows: Sequence[int],
    settings: TrainingSettings,
) -> dict[str, float]:
    assert torch.is_grad_enabled(), "without gradients a step changes nothing"
    started = time.perf_counter()
    batch = [examples[row] for row in rows]
    metrics = accumulate_gradients(objective, batch, **settings.passes, begin=optimizer.zero_grad)
    weights = all_parameters(optimizer)
    settings.ranks.sum_gradients(weights)
    scale_output_gradients(optimizer)
    norm = clip_gradients(weights, settings.max_grad_norm, settings.ranks)
    if not (math.isfinite(norm) and math.isfinite(metrics["loss"])):
        cause = _find_nonfinite(objective, examples, rows)
        raise NumericsError(
            f"the gradient norm is {norm} (loss {metrics['loss']:.4g}; {cause}); a lower learning_rate may help"
        )
    settings.loop.begin_changes()
    optimizer.step()
    optimizer.zero_grad()  # evaluations and checkpoints need the memory
    seconds = time.perf_counter() - started
    tokens = sum(map(objective.length, batch))
    timed = {"grad_norm": norm, "time/update": seconds, "tokens_per_second": tokens / seconds}
    return metrics | timed | budget_metrics(settings.micro_batch_tokens)


def _find_nonfinite(objective: SupervisedLoss[Example], examples: Sequence[Example], rows: Iterable[int]) -> str:
    """Describe the first example with a loss that is not finite."""
    for row in rows:
        loss = evaluate(objective, [examples[row]])["loss"]
        if not math.isfinite(loss):
            return f"training example {row}, counted from 0, has the loss {loss}"
    return "the loss of each example alone is finite"


def _num_draws(num_examples: int, num_epochs: float) -> int:
    return max(1, round(num_examples * num_epochs))


def draw_batches(
    num_examples: int,
    num_epochs: float,
    batch_size: int,
    *,
    seed: int,
    order: Callable[[int], Sequence[int]] | None = None,
) -> list[list[int]]:
    """Concatenate the passes over the examples and split them into batches; only the last batch can be smaller.

    Arguments as in `TrainingSettings`.
    """

    def shuffled(epoch: int) -> Sequence[int]:
        return torch.randperm(num_examples, generator=stream(seed, "supervised", epoch)).tolist()

    draws = _num_draws(num_examples, num_epochs)
    rows = [row for epoch in range(math.ceil(draws / num_examples)) for row in (order or shuffled)(epoch)][:draws]
    return [rows[start : start + batch_size] for start in range(0, draws, batch_size)]

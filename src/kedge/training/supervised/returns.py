"""Fits a critic to returns: a least-squares start, then training; measures the explained variance."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from kedge.algorithm.critic import explained_variance, spread_of_returns
from kedge.algorithm.experience import Rollout, join_rollouts, join_rows
from kedge.algorithm.masking import in_float64
from kedge.algorithm.readout import ReadoutSums, explained_by_sums, explained_variance_interval, fit_readout
from kedge.models import ActorCritic, Precision
from kedge.models.pretrained import inner_matrices
from kedge.ranks import ALONE, PassTokens, Prompts, Ranks, evaluate_in_passes, within_memory
from kedge.training.checkpoint.state import TrainingState
from kedge.training.optimizer import build_optimizer
from kedge.training.supervised.loop import Outcome, TrainingSettings, evaluate, evaluate_held_out, train_supervised
from kedge_base.errors import ModelError
from kedge_base.machine.memory import in_phase

NUM_PARTS = 3
"""Parts of a response whose explained variance is measured: a critic may predict the end but not the start."""

FIT_TOKENS = 8192
"""Tokens per forward pass if the run sets no limit."""


@dataclass(frozen=True)
class SampledReturns:
    """Sampled responses and the return of each slot.

    Attributes:
        rollout: The responses, on the CPU.
        returns: G: the reward to go from each slot.
        mask: The slots that count: the actions, or with credit by turn the first of each turn, and one more if the
            score comes after the last one.
    """

    rollout: Rollout
    returns: Float[Tensor, "batch time"]
    mask: Bool[Tensor, "batch time"]

    @property
    def counted(self) -> Float[Tensor, " slots"]:
        """The returns that count, float64."""
        return in_float64(self.returns[self.mask])

    @property
    def mean(self) -> float:
        """The mean return."""
        return float(self.counted.mean())

    @property
    def std(self) -> float:
        """The unit of the critic's outputs; see `spread_of_returns`. 1 if all returns are 0."""
        return spread_of_returns(self.counted) or 1.0

    def select(self, rows: Sequence[int]) -> SampledReturns:
        """Select responses."""
        chosen = torch.tensor(rows, dtype=torch.long)
        return SampledReturns(self.rollout.select(chosen), self.returns[chosen], self.mask[chosen])

    def on(self, device: torch.device) -> SampledReturns:
        """Move the responses and returns to a device."""
        return SampledReturns(self.rollout.to(device), self.returns.to(device), self.mask.to(device))

    @classmethod
    def joined(cls, parts: Sequence[SampledReturns]) -> SampledReturns:
        """Join several parts; prompts are padded on the left, responses on the right."""
        return cls(
            join_rollouts([part.rollout for part in parts], pad_id=0),
            join_rows([part.returns for part in parts]),
            join_rows([part.mask for part in parts]),
        )


@dataclass(frozen=True)
class ReturnsLoss:
    """Half the mean squared error of the values, over the slots that count, in a unit that is the same for all rows.

    loss = ½·Σ((G − V)/unit)² / slots

    The examples are numbers of rows.

    Args:
        actor_critic: Policy and critic.
        sampled: The responses, training and held-out ones.
        center: The mean of the training returns, subtracted so that sums of squares lose no precision.
        unit: The standard deviation of the training returns.
        value_after_last: The state after the last action also has a value.
        precision: Number format of the matrix products.

    Source: S4, N+ (½); VAPO §4.1, after VC-PPO (Monte Carlo targets); spec §6.28.
    """

    actor_critic: ActorCritic
    sampled: SampledReturns
    center: float
    unit: float
    value_after_last: bool = False
    precision: Precision = "fp32"

    def weight(self, example: int) -> float:
        """Number of counted slots."""
        return float(self.sampled.mask[example].sum())

    def length(self, example: int) -> int:
        """Number of tokens that the critic reads, privileged ones included."""
        return self.sampled.rollout.row_lengths[example]

    def tokens_read(self, examples: Sequence[int]) -> tuple[list[int], Prompts]:
        """Tokens of each response with its prompt; passes are planned as if none were shared."""
        return [self.length(example) for example in examples], None

    def sums(self, examples: Sequence[int]) -> Mapping[str, Tensor]:
        """The loss, and the sums from which `with_explained` computes the explained variance."""
        batch = self.sampled.select(examples).on(self.actor_critic.device)
        values = self.actor_critic.values(
            batch.rollout, precision=self.precision, value_after_last=self.value_after_last
        )
        error = (batch.returns - values)[batch.mask] / self.unit
        target = (in_float64(batch.returns[batch.mask]) - self.center) / self.unit
        exact = in_float64(error.detach())
        return {
            "loss": 0.5 * error.square().sum(),
            "error": exact.sum(),
            "squared_error": exact.square().sum(),
            "return": target.sum(),
            "squared_return": target.square().sum(),
        }


def with_explained(metrics: Mapping[str, float]) -> dict[str, float]:
    """Replace the sums in a step's metrics by `explained_variance`; likewise for `eval/` metrics."""
    moments = ("return", "squared_return", "error", "squared_error")
    found = {name: value for name, value in metrics.items() if name.removeprefix("eval/") not in moments}
    for prefix in ("", "eval/"):
        if f"{prefix}return" in metrics:
            means = [metrics[f"{prefix}{name}"] for name in moments]
            sums = torch.tensor([1.0, *means], dtype=torch.float64)
            found[f"{prefix}explained_variance"] = float(explained_by_sums(sums))
    return found


@in_phase("the fit of the head")
@torch.no_grad()
def fit_head(
    loss: ReturnsLoss, rows: Sequence[int], *, micro_batch_tokens: PassTokens = None, ranks: Ranks = ALONE
) -> float:
    """Set the critic's head to a ridge regression of the returns on the trunk's states; return the penalty.

    The trunk is unchanged. Fine-tuning then starts from a head that fits the trunk's states, instead of changing the
    states to suit a head of zeros.

    Args:
        loss: Critic and responses.
        rows: The rows to fit to.
        micro_batch_tokens: Tokens per forward pass; None for 8,192.
        ranks: The ranks that share the rows; each has all of them and gets the same head.

    Raises:
        ModelError: The states are not finite.

    Source: LP-FT, Kumar et al. 2022 (arXiv 2202.10054).
    """
    lengths = [loss.length(row) for row in rows]
    budget = micro_batch_tokens or FIT_TOKENS

    def summed() -> list[ReadoutSums]:
        halves: list[ReadoutSums] = []
        for part in ranks.plan(lengths, budget):
            batch = loss.sampled.select([rows[place] for place in part.rows]).on(loss.actor_critic.device)
            states = loss.actor_critic.value_states(
                batch.rollout, precision=loss.precision, value_after_last=loss.value_after_last
            ).float()
            states = states[batch.mask[batch.mask | batch.rollout.action_mask]]
            halves = halves or [ReadoutSums.empty(states.shape[1]) for _ in range(2)]
            if not part.counts:
                continue
            targets = in_float64(batch.returns[batch.mask]) - loss.center
            half = (batch.rollout.group % 2)[:, None].expand(batch.mask.shape)[batch.mask].bool()
            for sums, chosen in zip(halves, (~half, half), strict=True):
                sums.add(states[chosen], targets[chosen.to(targets.device)])
        return halves

    halves = within_memory(budget, lengths, summed, ranks=ranks)
    if ranks.are_several:
        dim = len(halves[0].features)
        halves = [ReadoutSums.of(ranks.summed(sums.flat()), dim) for sums in halves]
    if not all(sums.gram.isfinite().all() and math.isfinite(sums.square) for sums in halves):
        raise ModelError("the critic's hidden states are not finite, so no head can be fitted to them")
    readout = fit_readout([sums for sums in halves if sums.count])
    Head(loss.actor_critic).set(readout.weight, readout.offset + loss.center)
    return readout.penalty


@dataclass(frozen=True)
class Head:
    """The last layer of a critic, and the shift added to its output.

    In a value head, the shift is the bias. In a separate critic it is the score shift, which is not one of its weights,
    so checkpoints have to store it.
    """

    actor_critic: ActorCritic

    @torch.no_grad()
    def set(self, weight: Float[Tensor, " dim"], offset: float) -> None:
        """Make the values weight·state + offset."""
        critic = self.actor_critic.critic
        linear = self.actor_critic.value_head
        assert isinstance(linear, nn.Linear), "a critic has a linear head"
        linear.weight.copy_(weight[None])
        if linear.bias is not None:
            linear.bias.fill_(offset if critic is None else 0.0)
        if critic is not None:
            critic.shift.fill_(-offset)

    def state_dict(self) -> dict[str, float]:
        """The score shift of a separate critic."""
        critic = self.actor_critic.critic
        return {} if critic is None else {"shift": float(critic.shift)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a `state_dict`."""
        if (critic := self.actor_critic.critic) is not None:
            critic.shift.fill_(state["shift"])


def train_critic(
    loss: ReturnsLoss,
    rows: Sequence[int],
    *,
    held_out: Sequence[int] = (),
    **training: Any,
) -> Outcome:
    """Fit the critic's head to the returns in closed form; then, if the critic is separate, fine-tune all of it.

    The least-squares fit is step 0 of a separate critic, and the only step of a head on the policy's trunk.

    Args:
        loss: Critic and responses.
        rows: The responses to fit to.
        held_out: The responses to evaluate on.
        training: Learning rate, batch size and so on: the fields of `TrainingSettings`.
    """
    settings = TrainingSettings(**training)
    show = settings.on_step
    settings = replace(settings, on_step=lambda step, metrics: show(step, with_explained(metrics)))
    if not settings.loop.done:  # otherwise the checkpoint has it
        fit_head(loss, rows, **settings.passes)
    critic = loss.actor_critic.critic
    head = loss.actor_critic.value_head
    weights = nn.ParameterList(() if head is None else head.parameters())
    if critic is not None:
        return train_supervised(
            loss,
            critic.parameters(),
            rows,
            settings,
            held_out=held_out,
            inner_matrices=inner_matrices(critic),
            head_parameters=weights,
            value_unit=loss.unit,
            parts={"head": Head(loss.actor_critic)},
        )
    # The head has been fitted in closed form; report this as its only step.
    outcome = Outcome(1)
    optimizer = build_optimizer(weights, learning_rate=0.0)
    settings.loop.restore(TrainingState({"weights": weights}, optimizer, {"evaluation": outcome}))
    for step in settings.loop.steps(1):
        started = time.perf_counter()
        metrics = evaluate(loss, rows, **settings.passes)
        if held_out:
            metrics |= evaluate_held_out(loss, held_out, outcome, settings)
        settings.on_step(step, metrics | {"time/update": time.perf_counter() - started})
    return outcome


@in_phase("evaluation")
@torch.no_grad()
def measure_explained(
    loss: ReturnsLoss, rows: Sequence[int], *, micro_batch_tokens: PassTokens = None, ranks: Ranks = ALONE
) -> dict[str, Any]:
    """Measure the explained variance of the critic's values on some rows, such as the held-out ones, for
    `summary.json`.

    `explained_variance` covers all slots, with an interval over prompts. `explained_by_third` covers the first, middle
    and last third of each response, relative to the variance there; None if no response has a slot there.
    """
    chosen = loss.sampled.select(rows)

    def evaluate(places: list[int]) -> list[Tensor]:
        rollout = chosen.select(places).on(loss.actor_critic.device).rollout
        found = loss.actor_critic.values(rollout, precision=loss.precision, value_after_last=loss.value_after_last)
        return [found.cpu()]

    lengths = [loss.length(row) for row in rows]
    [values] = evaluate_in_passes(evaluate, lengths, micro_batch_tokens or FIT_TOKENS, ranks=ranks)
    places = (chosen.mask.cumsum(1) - 1) * NUM_PARTS // chosen.mask.sum(1, keepdim=True)
    whole = explained_variance_interval(values, chosen.returns, chosen.mask, chosen.rollout.group)
    thirds = (chosen.mask & (places == number) for number in range(NUM_PARTS))
    by_third = [float(explained_variance(values, chosen.returns, part)) if part.any() else None for part in thirds]
    return {"explained_variance": whole.as_json(), "explained_by_third": by_third}

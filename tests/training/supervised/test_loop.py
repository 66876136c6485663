"""The supervised loop on a loss computed by hand: one gradient per batch, for any split and interruption."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kedge.ranks import AdaptiveTokens, Prompts
from kedge.training.supervised.loop import (
    TrainingSettings,
    accumulate_gradients,
    count_steps,
    evaluate,
    train_supervised,
)
from kedge_base.errors import ConfigError, NumericsError

Pull = tuple[float, float]


class WeightedPull:
    """½·weight·(x − target)² per example: the minimum is the weighted mean of the targets."""

    def __init__(self, start: float = 0.0) -> None:
        self.point = nn.Parameter(torch.tensor([start], dtype=torch.float64))
        self.seen: list[list[Pull]] = []

    def weight(self, example: Pull) -> float:
        return example[1]

    def length(self, example: Pull) -> int:
        return int(example[1])

    def tokens_read(self, examples: Sequence[Pull]) -> tuple[list[int], Prompts]:
        return [self.length(example) for example in examples], None

    def sums(self, examples: Sequence[Pull]) -> dict[str, Tensor]:
        self.seen.append(list(examples))
        targets, weights = torch.tensor(examples, dtype=torch.float64).unbind(1)
        return {"loss": (0.5 * weights * (self.point - targets) ** 2).sum(), "target": (weights * targets).sum()}


PULLS = [(1.0, 1.0), (2.0, 3.0), (-4.0, 2.0), (0.5, 5.0), (3.0, 1.0), (1.5, 4.0), (-1.0, 2.0), (7.0, 6.0)]


def run(objective: WeightedPull, examples: Sequence[Pull] = tuple(PULLS), *, held_out: Sequence[Pull] = (), **settings):
    rows: list[dict[str, float]] = []
    outcome = train_supervised(
        objective,
        [objective.point],
        examples,
        TrainingSettings(
            on_step=lambda step, metrics: rows.append({"step": step, **metrics}),
            **{"batch_size": 4, "learning_rate": 0.1, **settings},
        ),
        held_out=held_out,
    )
    return outcome, rows


@pytest.mark.parametrize("micro_batch_tokens", [1, 5, 6, 11, 23, None])
def test_the_gradient_does_not_depend_on_the_split(micro_batch_tokens):
    objective = WeightedPull(start=2.0)
    means = accumulate_gradients(objective, PULLS, micro_batch_tokens=micro_batch_tokens)
    total = sum(weight for _, weight in PULLS)
    assert objective.point.grad is not None
    assert objective.point.grad.item() == pytest.approx(sum(w * (2.0 - t) for t, w in PULLS) / total, abs=1e-12)
    assert means["loss"] == pytest.approx(sum(0.5 * w * (2.0 - t) ** 2 for t, w in PULLS) / total, abs=1e-12)
    assert means["target"] == pytest.approx(sum(w * t for t, w in PULLS) / total, abs=1e-12)


def test_gradients_of_passes_before_the_one_that_failed_are_dropped():
    """Passes of 11 tokens; the second one fails, when the first has left its gradient."""

    class Failing(WeightedPull):
        def sums(self, examples: Sequence[Pull]) -> dict[str, Tensor]:
            if len(self.seen) == 1:
                self.seen.append([])
                raise MemoryError
            return super().sums(examples)

    objective, budget = Failing(start=2.0), AdaptiveTokens(11)
    optimizer = torch.optim.SGD([objective.point])
    accumulate_gradients(objective, PULLS, micro_batch_tokens=budget, begin=optimizer.zero_grad)
    assert (budget.tokens, len(objective.seen[0])) == (6, 2)
    total = sum(weight for _, weight in PULLS)
    assert objective.point.grad is not None
    assert objective.point.grad.item() == pytest.approx(sum(w * (2.0 - t) for t, w in PULLS) / total, abs=1e-12)


def test_a_micro_batch_holds_examples_of_like_length_the_longest_first():
    objective = WeightedPull()
    evaluate(objective, PULLS, micro_batch_tokens=10)
    lengths = [[objective.length(example) for example in part] for part in objective.seen]
    assert lengths == [[6], [5, 4], [3, 2, 2, 1, 1]]


def test_it_finds_the_minimum_and_says_how():
    objective = WeightedPull(start=-3.0)
    outcome, rows = run(objective, num_epochs=300, batch_size=8, held_out=[(3.0, 1.0)])
    expected = sum(w * t for t, w in PULLS) / sum(w for _, w in PULLS)
    assert objective.point.item() == pytest.approx(expected, abs=1e-4)
    assert outcome.num_steps == len(rows) == 300
    assert outcome.evaluation["loss"] == pytest.approx(0.5 * (expected - 3.0) ** 2, abs=1e-3)
    assert [row["step"] for row in rows] == list(range(1, 301))
    assert {"loss", "grad_norm", "learning_rate", "time/update", "tokens_per_second"} <= rows[0].keys()
    assert rows[0]["learning_rate"] == 0.1
    assert rows[150]["learning_rate"] == pytest.approx(0.05)
    assert objective.point.grad is None  # freed after each step


@given(num_examples=st.integers(1, 12), num_epochs=st.sampled_from([0.5, 1.0, 2.0, 2.5]), batch_size=st.integers(1, 15))
def test_every_pass_sees_every_example_once_and_only_the_last_batch_is_smaller(num_examples, num_epochs, batch_size):
    objective = WeightedPull()
    examples = [(float(index), 1.0) for index in range(num_examples)]
    outcome, _ = run(objective, examples, num_epochs=num_epochs, batch_size=batch_size)
    sizes = [len(batch) for batch in objective.seen]
    assert len(sizes) == outcome.num_steps == count_steps(num_examples, num_epochs=num_epochs, batch_size=batch_size)
    assert all(size == batch_size for size in sizes[:-1])
    drawn = [example for batch in objective.seen for example in batch]
    assert len(drawn) == max(1, round(num_examples * num_epochs))
    times_seen = [drawn.count(example) for example in examples]
    assert max(times_seen) - min(times_seen) <= 1


def test_the_seed_decides_the_order_and_nothing_else_does():
    def order(seed: int) -> list[list[Pull]]:
        objective = WeightedPull()
        torch.rand(3)
        run(objective, num_epochs=2, seed=seed)
        return objective.seen

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1)[:2] != order(1)[2:]


def test_evaluations_are_spread_evenly_and_the_last_step_has_one():
    _, rows = run(WeightedPull(), num_epochs=7, batch_size=8, held_out=PULLS[:2], num_evaluations=3)
    assert [row["step"] for row in rows if "eval/loss" in row] == [3, 5, 7]
    _, rows = run(WeightedPull(), num_epochs=3, batch_size=8, held_out=PULLS[:2], num_evaluations=9)
    assert [row["step"] for row in rows if "eval/loss" in row] == [1, 2, 3]
    _, rows = run(WeightedPull(), num_epochs=5, batch_size=8)
    assert not any("eval/loss" in row for row in rows)


def test_an_interruption_leaves_what_was_learned():
    def stop_after_three(step: int, metrics: dict[str, float]) -> None:
        if step == 3:
            raise KeyboardInterrupt

    objective = WeightedPull()
    settings = TrainingSettings(learning_rate=0.1, batch_size=2, on_step=stop_after_three)
    outcome = train_supervised(objective, [objective.point], PULLS, settings)
    assert isinstance(outcome.interruption, KeyboardInterrupt)
    assert outcome.num_steps == 3
    assert objective.point.item() != 0.0


def test_a_gradient_that_is_not_finite_stops_the_run_before_it_spoils_the_weights():
    objective = WeightedPull(start=2.0)
    with pytest.raises(NumericsError, match=r"gradient norm is inf.*learning_rate"):
        run(objective, [(math.inf, 1.0)])
    assert objective.point.item() == 2.0


@pytest.mark.parametrize("row", [0, 5])
@pytest.mark.parametrize(("target", "loss"), [(math.nan, "nan"), (1e200, "inf")])  # whose square alone overflows
def test_the_example_to_blame_is_named(row, target, loss):
    examples = [*PULLS]
    examples[row] = (target, 1.0)
    objective = WeightedPull()
    with pytest.raises(NumericsError, match=rf"training example {row}, .* has the loss {loss}"):
        run(objective, examples, batch_size=8)
    assert objective.point.item() == 0.0


def test_a_step_without_a_gradient_fails():
    class Detached(WeightedPull):
        def sums(self, examples: Sequence[Pull]) -> dict[str, Tensor]:
            return {name: term.detach() for name, term in super().sums(examples).items()}

    with pytest.raises(RuntimeError, match="does not require grad"):
        run(Detached())
    with torch.no_grad(), pytest.raises(AssertionError, match="changes nothing"):
        run(WeightedPull())


def test_nothing_to_learn_from_is_refused():
    with pytest.raises(ConfigError, match="no training examples"):
        run(WeightedPull(), [])

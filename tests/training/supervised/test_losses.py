"""The supervised losses on tiny random models of three families."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

from kedge.data import Comparison, EncodedExample, Ranking
from kedge.models import LanguageModel, ScalarModel, score_rows
from kedge.models.packing.trunk import Trunk
from kedge.training.supervised.loop import TrainingSettings, accumulate_gradients, evaluate, train_supervised
from kedge.training.supervised.losses import CompletionLoss, RankedResponses, RankingLoss
from tests.float64 import in_float64
from tests.tiny import FAMILIES, Family, tiny_causal_lm, tiny_reward_model, tiny_tokenizer

PAD, EOS = 0, 2
EXAMPLES = [
    EncodedExample([5, 6, 7], [8, 9, EOS]),
    EncodedExample([10], [11, EOS]),
    EncodedExample([12, 13], [14, 15, 16, 17, 18, EOS]),
    EncodedExample([], [19, 20, EOS]),
]
COMPARISONS = [
    RankedResponses(rows=([5, 6, 7, EOS], [5, 6, 8, 9, EOS]), ranks=(0.0, 1.0), lengths=(3, 4)),
    RankedResponses(rows=([10, 11, EOS], [10, 12, 13, 14, EOS]), ranks=(1.0, 2.0), lengths=(2, 2)),
]
RANKING = RankedResponses(
    rows=([20, 21, EOS], [20, 22, 23, EOS], [20, 24, EOS], [20, EOS]), ranks=(1.0, 2.0, 2.0, 4.0), lengths=(9, 5, 9, 0)
)


def completion_loss(family: Family = "llama") -> CompletionLoss:
    return CompletionLoss(LanguageModel(tiny_causal_lm(family), tiny_tokenizer()))


def ranking_loss(family: Family = "llama") -> RankingLoss:
    return RankingLoss(ScalarModel(tiny_reward_model(family), tiny_tokenizer()))


def gradient(objective, examples, micro_batch_tokens: int | None) -> torch.Tensor:
    objective.model.zero_grad()
    accumulate_gradients(objective, examples, micro_batch_tokens=micro_batch_tokens)
    return torch.cat([weight.grad.flatten() for weight in objective.model.parameters() if weight.grad is not None])


def one_by_one(objective: CompletionLoss, example: EncodedExample) -> list[float]:
    """The loss of each counted token from transformers' own forward pass on the row alone, without padding."""
    row = [*example.prompt, *example.completion]
    logits = objective.model.causal(torch.tensor([row])).logits[0].double()
    logits[:, PAD] = -math.inf
    first = max(len(example.prompt), 1)
    return [-(logits[t - 1, row[t]] - logits[t - 1].logsumexp(0)).item() for t in range(first, len(row))]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_completion_loss_is_the_mean_over_completion_tokens_of_the_unpadded_rows(family):
    objective = completion_loss(family)
    losses = [loss for example in EXAMPLES for loss in one_by_one(objective, example)]
    assert len(losses) == 3 + 2 + 6 + 2
    assert evaluate(objective, EXAMPLES, micro_batch_tokens=14)["loss"] == pytest.approx(sum(losses) / 13, abs=1e-5)


def test_eos_has_its_share_of_the_loss_and_the_prompt_none():
    objective = completion_loss()
    example = EncodedExample([5, 6, 7], [EOS])
    assert objective.weight(example) == 1
    assert evaluate(objective, [example], micro_batch_tokens=1)["loss"] == pytest.approx(
        one_by_one(objective, example)[0], abs=1e-5
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("make", "examples"), [(completion_loss, EXAMPLES), (ranking_loss, [*COMPARISONS, RANKING])])
def test_the_gradient_does_not_depend_on_the_split_or_the_order(family, make, examples):
    whole = gradient(make(family), examples, None)
    assert whole.norm() > 0.1
    for rows, budget in ((examples, 1), (examples, 12), (examples[::-1], None)):
        other = gradient(make(family), rows, budget)
        assert (other - whole).norm() < 1e-6 * whole.norm()


START = [40, 41, 42, 43, 44]
WITH_PROMPTS = [
    RankedResponses(([*START, 5, 6, 7, 8, EOS], [*START, 5, 6, 9, EOS]), ranks=(0.0, 1.0), lengths=(3, 4), margin=0.2),
    RankedResponses(([*START, 30, 31, EOS], [*START, 32, EOS]), ranks=(0.0, 1.0), lengths=(3, 4)),
    RankedResponses(
        ([*START, 30, 33, EOS], [*START, 34, EOS], [*START, 35, 36, 37, EOS]), ranks=(1.0, 2.0, 2.0), lengths=(3, 4, 5)
    ),
    RankedResponses(([60, 61, EOS], [60, 62, 63, EOS]), ranks=(0.0, 1.0), lengths=(3, 4)),
]
"""Examples of two, two, three and two responses to a prompt, three of which begin alike."""


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_training_on_rows_that_share_nothing(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(budget: int | None) -> tuple[torch.Tensor, int]:
        objective = ranking_loss(family)
        in_float64(objective.model, monkeypatch)
        assert objective.model.trunk is not None
        read: list[int] = []
        objective.model.trunk.model.register_forward_pre_hook(
            lambda module, inputs, named: read.append(named["input_ids"].numel()), with_kwargs=True
        )
        settings = TrainingSettings(learning_rate=0.01, num_epochs=2, batch_size=4, micro_batch_tokens=budget)
        train_supervised(objective, objective.model.parameters(), WITH_PROMPTS, settings)
        return torch.cat([each.detach().flatten() for each in objective.model.parameters()]), sum(read)

    with mock.patch.object(Trunk, "shares_up_to", 0):
        expected, num_tokens = trained(None)
    assert num_tokens == 2 * sum(len(row) for example in WITH_PROMPTS for row in example.rows)
    for budget, num_read in ((None, 31), (20, 36), (1, 42)):
        found, read = trained(budget)
        assert read == 2 * num_read
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


def test_the_tokens_of_examples_that_share_a_beginning() -> None:
    """Counted by hand: what its responses begin with once, and the numbers of pieces that examples have in common."""
    objective = ranking_loss()
    lengths, prompts = objective.tokens_read(WITH_PROMPTS)
    assert prompts is not None
    assert lengths == [12, 10, 14, 6]
    assert [sum(tokens for _, tokens in each) for each in prompts] == lengths
    first = prompts[0][0]
    assert first[1] == 5
    assert [first in each for each in prompts] == [True, True, True, False]
    with mock.patch.object(Trunk, "shares_up_to", 9):  # the longest row has ten tokens
        lengths, _ = objective.tokens_read(WITH_PROMPTS)
    assert lengths == [objective.length(example) for example in WITH_PROMPTS] == [19, 15, 24, 7]


def test_an_untrained_pair_costs_log_2_and_two_ranked_responses_are_a_pair():
    objective = ranking_loss()
    assert objective.model.head is not None
    nn.init.zeros_(objective.model.head.weight)
    figures = evaluate(objective, [*COMPARISONS, RANKING], micro_batch_tokens=None)
    assert figures == pytest.approx({"loss": math.log(2), "accuracy": 0.5}, abs=1e-6)


def test_the_ranking_loss_is_the_mean_over_prompts_of_the_mean_over_their_pairs():
    objective = ranking_loss()
    scores = [score_rows(objective.model, example.rows).tolist() for example in (*COMPARISONS, RANKING)]
    # The ranks 1, 2, 2, 4: five pairs, since the two in the middle are tied.
    decided = [[(0, 1)], [(0, 1)], [(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)]]
    costs = [
        sum(math.log1p(math.exp(row[j] - row[i])) for i, j in pairs) / len(pairs)
        for row, pairs in zip(scores, decided, strict=True)
    ]
    right = [sum(row[i] > row[j] for i, j in pairs) / len(pairs) for row, pairs in zip(scores, decided, strict=True)]
    figures = evaluate(objective, [*COMPARISONS, RANKING], micro_batch_tokens=20)
    assert figures == pytest.approx({"loss": sum(costs) / 3, "accuracy": sum(right) / 3}, abs=1e-5)


def test_a_margin_is_what_the_chosen_one_should_lead_by():
    objective = ranking_loss()
    plain = COMPARISONS[0]
    chosen, rejected = score_rows(objective.model, plain.rows).tolist()
    demanding = RankedResponses(plain.rows, plain.ranks, plain.lengths, margin=0.75)
    expected = math.log1p(math.exp(rejected - chosen + 0.75))
    assert evaluate(objective, [demanding], micro_batch_tokens=1)["loss"] == pytest.approx(expected, abs=1e-5)
    assert evaluate(objective, [demanding], micro_batch_tokens=1)["accuracy"] == float(chosen > rejected)


def test_records_become_rows_the_best_first():
    tokenizer = tiny_tokenizer()
    pair = RankedResponses.encode(tokenizer, Comparison("A", " sun", " sea", margin=0.5))
    ranked = RankedResponses.encode(tokenizer, Ranking("A", (" sea", " rope", " sun"), (3.0, 2.0, 1.0)))
    texts = [tokenizer.decode(row, skip_special_tokens=False) for row in (*pair.rows, *ranked.rows)]
    assert texts == ["A sun<eos>", "A sea<eos>", "A sun<eos>", "A rope<eos>", "A sea<eos>"]
    assert (pair.ranks, pair.lengths, pair.margin) == ((0.0, 1.0), (4, 4), 0.5)
    assert (ranked.ranks, ranked.lengths, ranked.margin) == ((1.0, 2.0, 3.0), (4, 5, 4), 0.0)


def test_ranks_that_float32_cannot_tell_apart_are_an_order():
    """As of scores that count seconds or votes."""
    objective = ranking_loss()
    for example in (COMPARISONS[0], RANKING):
        first, *_ = example.ranks
        large = replace(example, ranks=tuple(2.0**40 + (rank - first) / 8 for rank in example.ranks))
        assert evaluate(objective, [large]) == evaluate(objective, [example])


@pytest.mark.parametrize(("make", "examples"), [(completion_loss, EXAMPLES), (ranking_loss, [*COMPARISONS, RANKING])])
def test_a_few_examples_are_memorized(make, examples):
    objective = make()
    before = evaluate(objective, examples, micro_batch_tokens=None)["loss"]
    settings = TrainingSettings(learning_rate=0.02, num_epochs=25, batch_size=4)
    train_supervised(objective, objective.model.parameters(), examples, settings)
    assert evaluate(objective, examples, micro_batch_tokens=None)["loss"] < 0.2 * before


def test_bf16_is_near_fp32():
    exact = completion_loss()
    rough = CompletionLoss(exact.model, precision="bf16")
    # bf16 keeps 8 bits of the products.
    assert evaluate(rough, EXAMPLES, micro_batch_tokens=14)["loss"] == pytest.approx(
        evaluate(exact, EXAMPLES, micro_batch_tokens=14)["loss"], rel=0.02
    )

"""Agreement of a reward model with ranked data, against hand computations."""

from __future__ import annotations

import pytest
import torch

from kedge.models import ScalarModel, score_rows
from kedge.training.supervised.losses import RankedResponses
from kedge.training.supervised.reward_model import measure_agreement, split_pairs
from tests.tiny import tiny_reward_model, tiny_tokenizer

EOS = 2


@pytest.fixture
def model() -> ScalarModel:
    return ScalarModel(tiny_reward_model(), tiny_tokenizer())


def test_pairs_are_all_but_ties_the_better_first():
    better, worse = split_pairs(torch.tensor([5.0, 3.0, 2.0, 0.0]), (1.0, 2.0, 2.0, 4.0))
    assert better.tolist() == [5.0, 5.0, 5.0, 3.0, 2.0]
    assert worse.tolist() == [3.0, 2.0, 0.0, 0.0, 0.0]
    assert [len(side) for side in split_pairs(torch.tensor([1.0, 2.0]), (3.0, 3.0))] == [0, 0]


def test_rows_are_scored_in_the_order_given(model):
    rows = [[5, 6, 7, EOS], [8, EOS], [9, 10, 11, 12, EOS], [13, 14, EOS]]
    together = score_rows(model, rows, micro_batch_tokens=7)
    apart = [score_rows(model, [row]).item() for row in rows]
    assert together.tolist() == pytest.approx(apart, abs=1e-5)


def test_accuracies_are_means_over_prompts(model):
    rows = [[5, 6, EOS], [7, EOS], [8, 9, EOS], [10, EOS], [11, 12, 13, EOS]]
    scores = score_rows(model, rows).tolist()
    pair = RankedResponses((rows[0], rows[1]), ranks=(1.0, 2.0), lengths=(4, 4))
    triple = RankedResponses((rows[2], rows[3], rows[4]), ranks=(1.0, 2.0, 3.0), lengths=(9, 3, 5))
    agreement = measure_agreement(model, [pair, triple])
    right = [float(scores[0] > scores[1]), sum(scores[i] > scores[j] for i, j in ((2, 3), (2, 4), (3, 4))) / 3]
    assert agreement.accuracy.value == pytest.approx(sum(right) / 2)
    # A tie in length counts half; in two of the triple's three pairs the longer response is better.
    assert agreement.length_accuracy.value == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert len(agreement.chosen) == 4
    assert agreement.chosen == pytest.approx([scores[0], scores[2], scores[2], scores[3]])
    assert agreement.rejected == pytest.approx([scores[1], scores[3], scores[4], scores[4]])
    summary = agreement.summary()
    assert len(summary["chosen_scores"]) == len(summary["rejected_scores"]) == 21
    assert summary["chosen_scores"][0] == pytest.approx(min(agreement.chosen))
    assert summary["chosen_scores"][10] == pytest.approx(sum(sorted(agreement.chosen)[1:3]) / 2)
    assert summary["chosen_scores"][-1] == pytest.approx(max(agreement.chosen))
    assert summary["num_pairs"] == sum(part["num_pairs"] for part in summary["calibration_bins"]) == 4

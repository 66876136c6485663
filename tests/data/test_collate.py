import pytest
import torch

from kedge.data import (
    Comparison,
    Demonstration,
    Ranking,
    collate_comparisons,
    collate_demonstrations,
    collate_rankings,
)
from kedge.errors import ModelError
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer(add_bos=True)
PAD, BOS, EOS = 0, 1, 2


def letters(text: str) -> list[int]:
    """Ids of letters that the tiny tokenizer never merges."""
    ids = [TOKENIZER.convert_tokens_to_ids(letter) for letter in text]
    assert None not in ids
    return ids


def test_demonstrations_by_hand():
    rows = [Demonstration("Q", "XZ"), Demonstration("QQ", "X"), Demonstration("", "Z")]
    batch = collate_demonstrations(rows, TOKENIZER)
    q, x, z = letters("QXZ")
    assert batch.ids.tolist() == [[BOS, q, x, z, EOS], [BOS, q, q, x, EOS], [BOS, z, EOS, PAD, PAD]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.loss_mask.int().tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 1, 1], [0, 1, 1, 0, 0]]


def test_comparisons_put_the_chosen_half_first():
    batch = collate_comparisons([Comparison("Q", "X", "ZZ", margin=1.5), Comparison("Q", "Z", "X")], TOKENIZER)
    q, x, z = letters("QXZ")
    assert batch.ids.tolist() == [
        [BOS, q, x, EOS, PAD],
        [BOS, q, z, EOS, PAD],
        [BOS, q, z, z, EOS],
        [BOS, q, x, EOS, PAD],
    ]
    assert batch.attention_mask.equal(batch.ids != PAD)
    assert batch.margins.equal(torch.tensor([1.5, 0.0]))


def test_rankings_keep_a_prompts_answers_together():
    lists = [Ranking("Q", ("X", "Z", "XX"), (2.0, 1.0, 3.0)), Ranking("X", ("Q", "Z", "QQ"), (1.0, 1.0, 2.0))]
    batch = collate_rankings(lists, TOKENIZER)
    assert batch.ranks.tolist() == [[2.0, 1.0, 3.0], [1.0, 1.0, 2.0]]
    assert [row.tolist().count(EOS) for row in batch.ids] == [1] * 6
    assert batch.ids[3].tolist()[:3] == [BOS, *letters("XQ")]


def test_a_comparison_is_a_ranking_of_two():
    comparison = Comparison("Q", "X", "Z")
    batch = collate_rankings([comparison], TOKENIZER)
    assert batch.ids.equal(collate_comparisons([comparison], TOKENIZER).ids)
    assert batch.ranks[0, 0] < batch.ranks[0, 1]


def test_what_cannot_share_a_batch():
    with pytest.raises(ValueError, match=r"ranked lists of \[2, 3\] answers"):
        collate_rankings([Comparison("Q", "X", "Z"), Ranking("Q", ("X", "Z", "Q"), (1.0, 2.0, 3.0))], TOKENIZER)


@pytest.mark.parametrize("pad", [None, "<eos>"])
def test_padding_is_never_the_end_of_a_text(pad):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = pad
    with pytest.raises(ModelError, match="pad token is missing or is its EOS"):
        collate_demonstrations([Demonstration("Q", "X")], tokenizer)

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.data import Mixture, Prompt, PromptStream
from kedge.data.sources import Sources, numbered_rows

ORIGINS = [0] * 30 + [1] * 10


def test_a_pass_holds_the_shares_and_later_passes_the_rows_that_were_left_out():
    mixture = Mixture(ORIGINS, (0.25, 0.75), seed=3)
    passes = [mixture.order(epoch) for epoch in range(3)]
    for order in passes:
        assert Counter(ORIGINS[row] for row in order) == {0: 10, 1: 30}
    # The large source goes on where it stopped; of the small one each row comes three times in every pass.
    assert sorted(row for order in passes for row in order if row < 30) == list(range(30))
    assert Counter(row for row in passes[0] if row >= 30) == dict.fromkeys(range(30, 40), 3)
    assert passes[0] != sorted(passes[0])
    assert passes == [Mixture(ORIGINS, (1, 3), seed=3).order(epoch) for epoch in range(3)]
    assert passes[0] != Mixture(ORIGINS, (1, 3), seed=4).order(0)


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    shares=st.lists(st.floats(0.01, 10), min_size=4, max_size=4),
)
def test_a_pass_is_as_long_as_the_data(sizes, shares):
    origins = [source for source, size in enumerate(sizes) for _ in range(size)]
    mixture = Mixture(origins, shares[: len(sizes)], seed=0)
    order = mixture.order(2)
    assert len(order) == len(origins)
    exact = [share / sum(shares[: len(sizes)]) * len(origins) for share in shares[: len(sizes)]]
    assert all(abs(count - wanted) < 1 for count, wanted in zip(mixture.counts, exact, strict=True))


def test_a_source_without_a_share_is_left_out():
    assert {ORIGINS[row] for row in Mixture(ORIGINS, (0, 1), seed=0).order(0)} == {1}


def test_a_restored_stream_of_a_mixture_continues_where_it_was():
    prompts = [Prompt(str(index)) for index in range(40)]
    first, second = (PromptStream(prompts, seed=0, mixture=Mixture(ORIGINS, (1, 1), seed=0)) for _ in range(2))
    first.next(57)
    second.load_state_dict(first.state_dict())
    assert first.next(50) == second.next(50)


def test_rows_know_their_source(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "x"}\n' * 2)
    names = tuple(str(tmp_path / f"{name}.jsonl") for name in "ab")
    assert [index for index, _ in numbered_rows(Sources(names))] == [0, 0, 1, 1]


@pytest.mark.parametrize("source", [["a", "b"], [{"prompt": "x"}] * 2])
def test_rows_from_python_are_one_source(source):
    assert [index for index, _ in numbered_rows(source)] == [0, 0]

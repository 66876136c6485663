import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.data import Comparison, Demonstration, Prompt, PromptStream, Ranking, split_eval
from kedge.data.prompts import Mixture
from kedge_base.errors import DataError

POOL = [Prompt(str(index)) for index in range(10)]


def texts(prompts) -> list[str]:
    return [prompt.text for prompt in prompts]


def test_a_pass_visits_every_prompt_once_and_the_next_in_another_order():
    stream = PromptStream(POOL, seed=0)
    first, second = stream.next(10), stream.next(10)
    assert sorted(texts(first)) == sorted(texts(second)) == sorted(texts(POOL))
    assert texts(first) != texts(second)
    assert texts(first) != texts(POOL)


def test_the_draw_depends_on_the_seed_and_not_on_the_chunks():
    def drawn(seed: int, *chunks: int) -> list[str]:
        stream = PromptStream(POOL, seed=seed)
        return [text for chunk in chunks for text in texts(stream.next(chunk))]

    assert drawn(3, 35) == drawn(3, 7, 7, 7, 7, 7) == drawn(3, 1, 34)
    assert drawn(3, 35) != drawn(4, 35)


def test_a_curriculum_starts_with_the_easy_prompts_and_shuffles_the_later_passes():
    levels = [3, 1, 2, 1.5, 3, 1, 2, 2, 1, 3]
    pool = [Prompt(str(index), {"steps": level}) for index, level in enumerate(levels)]
    stream = PromptStream(pool, seed=0, curriculum="steps")
    first = stream.next(7)
    resumed = PromptStream(pool, seed=0, curriculum="steps")
    resumed.load_state_dict(stream.state_dict())
    first += resumed.next(3)
    assert [prompt.columns["steps"] for prompt in first] == sorted(levels)
    assert sorted(texts(first)) == sorted(texts(pool))
    easy = texts(first[:3])
    assert any(texts(PromptStream(pool, seed=seed, curriculum="steps").next(3)) != easy for seed in range(1, 6))
    second = [prompt.columns["steps"] for prompt in resumed.next(10)]
    assert sorted(second) == sorted(levels) != second


def test_a_prompt_that_rests_is_left_out_of_the_next_passes_and_comes_back():
    stream = PromptStream(POOL, seed=0, rest=2)
    first = stream.next(10)
    assert stream.note(first[:4], [0.0, 0.0, 0.0, 0.2]) == pytest.approx(0.3)
    tired = set(texts(first[:3]))
    for _ in range(2):
        assert sorted(texts(stream.next(7))) == sorted(set(texts(POOL)) - tired)
    assert sorted(texts(stream.next(10))) == sorted(texts(POOL))
    assert PromptStream(POOL, seed=0, rest=2).state_dict() == {"epoch": 0, "position": 0, "num_prompts": 10}


def test_a_prompt_that_rests_after_the_end_of_its_pass_is_left_out_of_the_one_under_way():
    """An update of four of ten prompts draws the last two of a pass with the first two of the next."""
    stream = PromptStream(POOL, seed=0, rest=1)
    stream.next(8)
    update = stream.next(4)
    stream.note(update, [0.0, 0.0, 1.0, 1.0])
    rest_of_pass = [stream.next(1)[0] for _ in range(6)]
    left = [prompt for prompt in POOL if prompt not in update[2:]]
    assert sorted(each.text for each in rest_of_pass) == sorted(each.text for each in left if each not in update[:2])
    saved = stream.state_dict()
    assert sorted(each.text for each in stream.next(10)) == sorted(each.text for each in POOL)
    stream.load_state_dict(saved)
    assert sorted(each.text for each in stream.next(10)) == sorted(each.text for each in POOL)


def test_a_prompt_that_has_spread_again_no_longer_rests():
    stream = PromptStream(POOL, seed=0, rest=3)
    first = stream.next(10)
    stream.note(first, [0.0, *[1.0] * 9])
    stream.note(first[:1], [1.0])
    assert len({prompt.text for prompt in stream.next(10)}) == 10


@pytest.mark.parametrize("num_updates", [1, 2, 3, 4])
def test_prompts_left_out_of_a_pass_are_resumed_although_none_rests_any_more(num_updates):
    """Two prompts and three per update: a pass that would be empty has both, and then both have spread again."""
    whole, resumed = (PromptStream(POOL[:2], seed=0, rest=2) for _ in range(2))
    for spread in [0.0, 0.0, 1.0, 1.0][:num_updates]:
        whole.note(whole.next(3), [spread] * 3)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert [prompt.text for prompt in resumed.next(4)] == [prompt.text for prompt in whole.next(4)]


def test_a_pass_has_all_prompts_where_all_of_them_rest():
    stream = PromptStream(POOL, seed=0, rest=5)
    stream.note(stream.next(10), [0.0] * 10)
    assert sorted(texts(stream.next(10))) == sorted(texts(POOL))


def drawn_by_spread(seed: int = 0, **settings) -> PromptStream:
    """A stream over four prompts in its first pass, of which three are known."""
    stream = PromptStream(POOL[:4], seed=seed, by_spread=True, **settings)
    by_text = {prompt.text: prompt for prompt in stream.next(4)}
    stream.note([by_text["0"], by_text["1"], by_text["2"]], [0.25, 0.05, 0.0])
    return stream


def test_a_prompt_is_drawn_in_proportion_to_its_spread():
    # The mean of the three is 0.1: weights 2.5, 0.5, the least 0.25, and 1 for the prompt that was not sampled. Of the
    # four draws of a pass each gets 4 / 4.25 times its weight, rounded up or down.
    expected = [2.5 * 4 / 4.25, 0.5 * 4 / 4.25, 0.25 * 4 / 4.25, 4 / 4.25]
    counts = [texts(drawn_by_spread(seed).next(4)) for seed in range(400)]
    for text, mean in zip("0123", expected, strict=True):
        found = [count.count(text) for count in counts]
        assert set(found) <= {int(mean), int(mean) + 1}
        assert sum(found) / 400 == pytest.approx(mean, abs=0.1)  # four standard errors of 0.5 / 20
    orders = {tuple(each) for each in counts if sorted(each) == ["0", "0", "1", "3"]}
    assert ("0", "3", "0", "1") in orders  # equal ones are not drawn in a row


def test_shares_of_sources_are_kept_whatever_the_prompts_spreads():
    origins = [0] * 6 + [1] * 4
    stream = PromptStream(POOL, seed=0, by_spread=True, mixture=Mixture(origins, [0.3, 0.7], seed=0))
    for _ in range(4):
        drawn = stream.next(10)
        assert sum(origins[POOL.index(prompt)] for prompt in drawn) == 7
        stream.note(drawn, [1.0 if origins[POOL.index(prompt)] == 0 else 0.01 for prompt in drawn])


def test_what_is_noted_counts_from_the_next_pass_on_and_no_spread_anywhere_draws_evenly():
    stream = drawn_by_spread()
    once = texts(stream.next(2))
    stream.note(POOL[:4], [0.0, 0.0, 0.0, 1.0])
    assert once + texts(stream.next(2)) == texts(drawn_by_spread().next(4))
    assert texts(stream.next(4)).count("3") in (3, 4)  # weights 1/4 and 4: 16 / 4.75 of 4 draws
    stream.note(POOL[:4], [0.0] * 4)
    assert sorted(texts(stream.next(4))) == ["0", "1", "2", "3"]


def test_a_prompt_that_rests_has_no_weight():
    stream = drawn_by_spread(rest=1)
    assert "2" not in texts(stream.next(3))


@given(
    st.lists(st.tuples(st.integers(1, 6), st.sets(st.integers(0, 5), max_size=6)), min_size=1, max_size=20),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_what_is_known_of_prompts_is_resumed_at_any_point(steps, rest, is_mixed, by_spread):
    pool = POOL[:4]
    mixture = Mixture([0, 0, 0, 1], [1, 2], seed=3) if is_mixed else None
    whole = PromptStream(pool, seed=0, rest=rest, by_spread=by_spread, mixture=mixture)
    for count, tired in steps:
        split = PromptStream(pool, seed=0, rest=rest, by_spread=by_spread, mixture=mixture)
        split.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        drawn = whole.next(count)
        assert texts(split.next(count)) == texts(drawn)
        whole.note(drawn, [0.0 if number in tired else 0.1 * (number + 1) for number in range(len(drawn))])


@pytest.mark.parametrize(
    ("value", "found"), [(None, "null"), ("a", "text"), (True, "true"), (float("nan"), "not a finite")]
)
def test_a_curriculum_needs_a_number_in_every_prompt(value, found):
    pool = [Prompt("easy", {"steps": 1}), Prompt("The tide", {"steps": value})]
    with pytest.raises(DataError, match=rf"data\.curriculum=steps: .*'The tide': field 'steps' is {found}"):
        PromptStream(pool, seed=0, curriculum="steps")
    assert PromptStream([Prompt("a", {"steps": Decimal("1.5")})], seed=0, curriculum="steps").next(1)  # from Parquet
    with pytest.raises(DataError, match="'easy': field 'level' is missing"):
        PromptStream(pool, seed=0, curriculum="level")


@given(before=st.integers(0, 25))
def test_a_restored_stream_continues_where_it_was(before):
    stream = PromptStream(POOL, seed=1)
    stream.next(before)
    resumed = PromptStream(POOL, seed=1)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert texts(resumed.next(23)) == texts(stream.next(23))


def test_invalid_streams_are_rejected():
    with pytest.raises(DataError, match="the list of prompts is empty"):
        PromptStream([], seed=0)
    with pytest.raises(DataError, match="saved with 10 prompts, but the data has 9"):
        PromptStream(POOL[:9], seed=0).load_state_dict(PromptStream(POOL, seed=0).state_dict())


prompt_lists = st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=40).filter(lambda names: len(set(names)) > 1)


@given(prompts=prompt_lists, fraction=st.floats(0.01, 0.9), seed=st.integers(0, 5))
def test_no_prompt_is_in_both_parts(prompts, fraction, seed):
    records: list[Comparison | Ranking] = [Comparison(prompt, str(index), "x") for index, prompt in enumerate(prompts)]
    split = split_eval(records, fraction, seed)
    assert not {record.prompt for record in split.train} & {record.prompt for record in split.eval}
    assert sorted([*split.train, *split.eval], key=records.index) == records
    assert split.train == [record for record in records if record in split.train]
    assert split.train
    assert split.eval
    assert split == split_eval(records, fraction, seed)


def test_the_fraction_is_of_the_records():
    records = [Demonstration(str(index), "x") for index in range(200)]
    assert len(split_eval(records, 0.05, 0).eval) == 10
    assert len(split_eval(records[:100], 0.07, 0).eval) == 7  # although 0.07 · 100 > 7 in floating point
    assert split_eval(records, 0.05, 0) != split_eval(records, 0.05, 1)
    assert split_eval(records, 0.0, 0).eval == []


def test_every_kind_of_record_is_split():
    assert len(split_eval([Prompt("a"), Prompt("a"), Prompt("b")], 0.3, 0).train) in (1, 2)
    mixed = [Comparison("a", "b", "c"), Ranking("a", ("b", "c"), (1.0, 2.0)), Comparison("d", "b", "c")]
    assert {len(split_eval(mixed, 0.3, seed).eval) for seed in range(8)} == {1, 2}
    plain_texts = [Demonstration("", text) for text in "aabbc"]
    split = split_eval(plain_texts, 0.4, 0)
    assert not {record.completion for record in split.train} & {record.completion for record in split.eval}


def test_rows_that_share_one_prompt_are_held_out_one_by_one():
    # A classification turned into preferences: 40 reviews under one instruction, the first two equal.
    records = [Comparison("Good or bad?", f"good {max(index, 1)}", "bad") for index in range(40)]
    split = split_eval(records, 0.1, 0)
    assert (len(split.train), len(split.eval)) in ((36, 4), (35, 5))
    assert not set(split.train) & set(split.eval)
    assert not split.by_prompt
    assert split_eval([*records, Comparison("Else?", "a", "b")], 0.1, 0).by_prompt


def test_what_cannot_be_split():
    with pytest.raises(DataError, match="all 2 rows are equal"):
        split_eval([Prompt("a"), Prompt("a")], 0.5, 0)
    with pytest.raises(DataError, match="the only row"):
        split_eval([Prompt("a")], 0.5, 0)

"""Messages between kedge and a worker: values survive a round trip on one line, and anything else is rejected."""

from __future__ import annotations

import datetime
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge_base.workers.codec import decode, encode, own_copy

texts = st.text(st.characters())
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts, st.binary(),
    st.decimals(allow_nan=False), st.dates(), st.times(), st.datetimes(),
    st.datetimes(timezones=st.just(datetime.timezone.utc)),
)  # fmt: skip
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=12)


@given(st.dictionaries(texts, values))
def test_what_goes_in_comes_out(message):
    line = encode(message)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    back = decode(line)
    assert back == message
    assert [type(value) for value in back.values()] == [type(value) for value in message.values()]


def test_not_a_number_passes_and_lone_surrogates_do():
    back = decode(encode({"x": [float("nan"), float("-inf"), "\ud800"]}))
    assert repr(back) == "{'x': [nan, -inf, '\\ud800']}"


def test_a_copy_has_nothing_in_common_with_its_value_but_other_objects():
    shared = object()
    value = {"a": [1, ({2}, [shared])], "b": np.zeros(2)}
    copy = own_copy(value)
    copy["a"][1][0].add(3)
    copy["a"][1][1].append(4)
    copy["b"][0] = 5.0
    assert value["a"] == [1, ({2}, [shared])]
    assert value["b"].tolist() == [0.0, 0.0]
    assert copy["a"] == [1, ({2, 3}, [shared, 4])]


def itself() -> list:
    looped: list = []
    looped.append(looped)
    return looped


def deep() -> list:
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    return nested


@pytest.mark.parametrize("value", [itself(), deep(), memoryview(b"x"), torch.ones(1, requires_grad=True) * 2], ids=type)
def test_what_cannot_be_copied_is_shared(value):
    assert own_copy(value) is value


@pytest.mark.parametrize("value", [object(), {1, 2}, {Decimal(1): 2}, 1j, itself(), deep()], ids=type)
def test_what_cannot_be_sent_is_refused(value):
    with pytest.raises((TypeError, ValueError, RecursionError)):
        encode({"value": value})


@pytest.mark.parametrize(
    "row",
    [
        {"kedge:type": "code", "value": "x"},
        {"kedge:type": "date", "value": "never"},
        {"kedge:type": "decimal", "value": "many"},
        {"kedge:type": ["date"], "value": "x"},
        {"kedge:type": "date", "value": 1},
    ],
)
def test_rows_that_look_like_a_type_of_ours_pass_as_they_are(row):
    assert decode(encode({"row": row})) == {"row": row}


@pytest.mark.parametrize("line", [b"", b"garbage\n", b"[1]\n", b"\xff\n", b"nul"])
def test_what_is_no_message_is_refused(line):
    with pytest.raises(ValueError, match=r"Expecting value|not a message|can't decode byte"):
        decode(line)

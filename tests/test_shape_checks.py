"""A call is checked unless one with the same shapes and types has passed the checks."""

import random
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from kedge.algorithm.masking import masked_mean
from tests.shape_checks import checked_once

Matrix = Float[Tensor, "rows columns"]
Row = Float[Tensor, " rows"]


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def checked(function: Any) -> Any:
    return checked_once(function, beartype)


def test_a_call_with_other_shapes_or_types_is_checked_after_one_that_passed():
    calls = []

    @checked
    def add(matrix: Matrix, row: Row, by: Literal["rows", "columns"] = "rows", *, scale: float = 1.0) -> None:
        calls.append(by)

    matrix, row = torch.zeros(2, 3), torch.zeros(2)
    for _ in range(2):
        add(matrix, row)
        add(matrix, row=row, scale=2.0)
    assert len(calls) == 4
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((matrix, torch.zeros(3)), {}),
        ((matrix.double(), row.int()), {}),
        ((matrix[0], row), {}),
        (([[0.0]], row), {}),
        ((matrix, row, "both"), {}),
        ((matrix, row), {"scale": "2"}),
        ((matrix, None), {}),
    ]
    for args, kwargs in wrong:
        with pytest.raises(TypeCheckError):
            add(*args, **kwargs)
    assert len(calls) == 4, "wrong arguments do not reach the function"


@pytest.mark.parametrize("wrong", [torch.zeros(3), None, [torch.zeros(2)]], ids=["shape", "nothing", "list"])
def test_a_result_of_another_kind_is_checked_without_a_second_call(wrong):
    results = [torch.zeros(2), torch.zeros(2), wrong, torch.ones(2)]

    @checked
    def first(matrix: Matrix) -> Row:
        return results.pop(0)

    matrix = torch.zeros(2, 3)
    first(matrix)
    first(matrix)
    with pytest.raises(TypeCheckError):
        first(matrix)
    assert first(matrix).sum() == 2, "what was refused is not returned later"


def test_what_containers_hold_is_checked():
    @checked
    def of_list(rows: list[Row]) -> None: ...

    @checked
    def of_dict(rows: dict[str, Row]) -> None: ...

    @checked
    def of_pair(*, pair: Pair, row: Row) -> tuple[Row, Row]:
        return pair

    right, wrong = torch.zeros(2), torch.zeros(2, 2)
    of_list([right]), of_dict({"a": right}), of_pair(pair=Pair(right, right), row=right)
    for function, argument in ((of_list, [wrong]), (of_dict, {"a": wrong}), (of_dict, {1: right})):
        with pytest.raises(TypeCheckError):
            function(argument)
    with pytest.raises(TypeCheckError):
        of_pair(pair=Pair(right, wrong), row=right)


def test_a_dataclass_is_checked_when_it_is_made():
    from tests.shape_checks import _jaxtyped

    @_jaxtyped(typechecker=beartype)
    @dataclass(frozen=True)
    class Both:
        matrix: Matrix
        row: Row

    Both(torch.zeros(2, 3), torch.zeros(2))
    assert Both(torch.zeros(2, 3), torch.ones(2)).row.sum() == 2
    with pytest.raises(TypeCheckError):
        Both(torch.zeros(2, 3), torch.zeros(3))


def test_the_algorithm_is_checked_and_the_checks_draw_nothing_from_random():
    state = random.getstate()
    for rows in (2, 3):
        masked_mean(torch.zeros(rows, 3), torch.ones(rows, 3, dtype=torch.bool))
    with pytest.raises(TypeCheckError):
        masked_mean(torch.zeros(2, 3), torch.ones(2, 4, dtype=torch.bool))
    checked_list = checked(_of_list)
    checked_list([torch.zeros(2), torch.ones(2)])
    assert random.getstate() == state


def _of_list(rows: list[Row]) -> None: ...

"""Prompts from the tasks of reasoning-gym."""

from __future__ import annotations

import sys

import pytest

from kedge.data import read_rows
from kedge.data.sources import rows_of
from kedge_base import generated
from kedge_base.errors import DataError
from tests.reasoning import reasoning_gym
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer


@pytest.fixture(autouse=True)
def package():
    generated.open_task.cache_clear()
    generated.open_entry.cache_clear()
    with reasoning_gym():
        yield
    generated.open_task.cache_clear()
    generated.open_entry.cache_clear()


def test_a_source_has_the_rows_of_its_task():
    source = "reasoning-gym:sums,size=2,seed=1,most=7,word=and"
    assert [row.value for row in rows_of(source)] == [
        {"question": "2 and 0?", "answer": "2", "entry": f"{source}#0"},  # 100 · 10⁶ = 2 modulo 7
        {"question": "2 and 1?", "answer": "3", "entry": f"{source}#1"},
    ]


def test_seeds_have_no_rows_in_common():
    """Row i of the package's tasks is drawn with the seed plus i, so its seeds 1 and 2 share all rows but one."""
    most = 10**9
    first, second = (
        {row.value["question"] for row in rows_of(f"reasoning-gym:drawn,size=200,seed={seed},most={most}")}
        for seed in (1, 2)
    )
    assert len(first) == len(second) == 200
    assert not first & second


def test_without_parameters_a_source_is_always_the_same():
    rows = list(rows_of("reasoning-gym:sums"))
    assert len(rows) == 500
    given = list(rows_of("reasoning-gym:sums,seed=0,size=500"))
    assert [row.value["question"] for row in rows] == [row.value["question"] for row in given]


def test_values_are_json_and_may_hold_commas():
    task = generated.open_task('reasoning-gym:sums,signs=["+","-"],most=3,share=1')
    assert (task.config.signs, task.config.most, task.config.share) == (["+", "-"], 3, 1)


def test_questions_go_through_the_chat_template_and_the_entry_reaches_the_reward():
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    [prompt] = read_rows("reasoning-gym:sums,size=1", "prompts", tokenizer=tokenizer).records
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "0 plus 0?"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt.text == asked
    assert prompt.columns["entry"] == "reasoning-gym:sums,size=1#0"


def test_several_names_are_read_one_after_the_other():
    rows = list(rows_of(["reasoning-gym:sums,size=1", "reasoning-gym:countdown,size=2"]))
    assert [row.value["entry"].partition(",")[0] for row in rows] == [
        "reasoning-gym:sums",
        *["reasoning-gym:countdown"] * 2,
    ]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("reasoning-gym:sum", "reasoning-gym has no task 'sum'; did you mean sums?"),
        ("reasoning-gym:zz", "no task 'zz'; the package has 6 tasks"),
        ("reasoning-gym:sums,least=1", "sums has no parameter 'least'; it has most, share, word, signs, seed, size"),
        ("reasoning-gym:sums,most=many", "most=many: expected a value such as 9"),
        ("reasoning-gym:sums,size=all", "size=all: expected a value such as 500"),
        ("reasoning-gym:sums,size=2000000", "size=2000000: expected 1 to 1,000,000"),
        ("reasoning-gym:sums,size=0", "size=0: expected 1 to 1,000,000"),
        ("reasoning-gym:sums,share=half", "share=half: expected a value such as 0.5"),
        ("reasoning-gym:sums,most=0", "reasoning-gym:sums,most=0: most must be positive"),
    ],
)
def test_a_mistake_is_one_line(source, line):
    with pytest.raises(DataError, match=line.replace("?", r"\?")):
        list(rows_of(source))


def test_a_row_that_cannot_be_made_is_one_line(monkeypatch):
    def refuse(task, index):
        raise ValueError("Seed must be between 0\nand 2**32 - 1")

    monkeypatch.setattr(type(generated.open_task("reasoning-gym:sums")), "__getitem__", refuse)
    with pytest.raises(DataError, match=r"reasoning-gym:sums,seed=5000: row 0: Seed must be between 0 and 2"):
        list(rows_of("reasoning-gym:sums,seed=5000"))


def test_without_the_package_the_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(DataError, match=r"needs the package reasoning-gym: pip install .*\[reasoning-gym"):
        list(rows_of("reasoning-gym:sums"))


@pytest.mark.parametrize("reference", ["", "sums#0", "reasoning-gym:sums", "reasoning-gym:sums#-1", 'x"#1'])
def test_what_is_no_entry_is_refused(reference):
    with pytest.raises(DataError, match="is not the entry of a row"):
        generated.find_entry(reference)


def test_an_entry_that_does_not_exist_is_refused():
    with pytest.raises(DataError, match="the task has 2 entries"):
        generated.find_entry("reasoning-gym:sums,size=2#2")

"""Verifiers as the `reward_funcs` of TRL's trainers: every one is called with all that such a trainer has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kedge_tasks import verify

number: Any = verify.number
"""Its declared parameters are those that kedge passes."""

CASES: Mapping[str, tuple[Mapping[str, Any], str, str]] = {
    "gsm8k": ({"answer": "6 * 7 = 42\n#### 42"}, "It is 42.", "It is 41."),
    "gsm8k_strict": ({"answer": "#### 42"}, "#### 42", "42"),
    "number": ({"answer": 42}, r"\boxed{42}", r"\boxed{41}"),
    "math": ({"answer": "x^2-1"}, r"\boxed{(x-1)(x+1)}", r"\boxed{(x-1)^2}"),
    "choice": ({"answer": "B", "choices": ["red", "green"]}, "The answer is B.", "The answer is A."),
    "exact": ({"answer": "Ahoy"}, "Ahoy", "ahoy"),
    "normalized": ({"answer": "Ahoy!"}, "ahoy", "a hoy"),
    "f1": ({"answer": "Ahoy there"}, "there, ahoy!", "avast"),
    "pattern": ({"pattern": r"\Aland"}, "land ho", "no land"),
    "tags": ({}, "<think>Two.</think><answer>2</answer>", "2"),
    "json_schema": ({"schema": '{"type": "integer"}'}, "7", '"7"'),
    "instructions": (
        {"instructions": [{"kind": "no_commas"}, {"kind": "max_words", "count": 2}]},
        "Aye aye",
        "Aye, no",
    ),
    "instructions_partial": ({"instructions": [{"kind": "no_commas"}]}, "Aye aye", "Aye, aye"),
    "code": ({"test_list": ["assert f(2) == 4"]}, "def f(x):\n    return 2 * x", "def f(x):\n    return x"),
    "code_stdio": ({"input_output": '{"inputs": ["2"], "outputs": ["2"]}'}, "print(input())", "print(3)"),
}


def trained(
    function: Callable[..., Any],
    texts: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    *,
    is_chat: bool,
    **more: Any,
) -> list[float | None]:
    """The rewards of a group as TRL 1.16 gets them in `GRPOTrainer._calculate_rewards`; its own words are in its docs.

    It passes prompts, completions and tokens, each column of the data, its state and two functions for logging. Texts
    are lists of messages if the prompts are.
    """
    prompts: Sequence[Any] = more.get("prompts", ["Ahoy?"] * len(texts))
    completions: Sequence[Any] = texts
    if is_chat:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
        completions = [[{"role": "assistant", "content": text}] for text in texts]
    rewards = function(
        prompts=prompts,
        completions=completions,
        completion_ids=[[1, 2]] * len(texts),
        **columns,
        trainer_state=SimpleNamespace(global_step=3),
        log_extra=lambda column, values: None,
        log_metric=lambda name, value: None,
    )
    assert isinstance(rewards, list)
    assert len(rewards) == len(texts)
    assert all(reward is None or isinstance(reward, float) for reward in rewards)
    return rewards


def test_every_verifier_has_a_case() -> None:
    untried = {"instruction_text", "reasoning_gym"}  # no verifier, and one that needs its package
    assert {*CASES} == {*verify.__all__} - untried, "CASES needs a row, a right and a wrong response for each verifier"


@pytest.mark.parametrize("is_chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize("name", CASES)
def test_a_verifier_scores_what_a_trainer_passes(name: str, is_chat: bool) -> None:
    row, right, wrong = CASES[name]
    if name in ("math", "json_schema"):
        pytest.importorskip({"math": "math_verify", "json_schema": "jsonschema"}[name])
    columns = {column: [entry] * 2 for column, entry in row.items()}
    function = getattr(verify, name)
    found = trained(function, [right, wrong], {**columns, "source": ["log"] * 2, "id": [7, 8]}, is_chat=is_chat)
    assert found == [1.0, 0.0]
    assert found == function(completions=[right, wrong], **columns), "the same as in kedge"
    if columns:
        mixed = {column: [None, *entries] for column, entries in columns.items()}
        assert trained(function, ["?", right, wrong], mixed, is_chat=is_chat) == [None, 1.0, 0.0], (
            "a row of another task"
        )
        nothing = {column: [None] for column in columns}
        assert trained(function, ["?"], nothing, is_chat=is_chat) == [None]


@pytest.mark.parametrize("name", CASES)
def test_kedge_passes_what_a_verifier_names(name: str) -> None:
    """By its signature, which has no `**columns`: other columns are not sent to its process."""
    function = getattr(verify, name)
    names = {*inspect.signature(function).parameters}
    assert {"completions", "stopped", *CASES[name][0]} <= names
    assert function.__name__ == name
    with pytest.raises(TypeError, match="unexpected keyword argument 'anser'"):
        function(completions=[], anser=[], **{column: [] for column in CASES[name][0]})


def test_the_last_message_of_the_assistant_is_judged() -> None:
    def said(*messages: tuple[str, Any]) -> list[dict[str, Any]]:
        return [{"role": role, "content": content} for role, content in messages]

    completions = [
        said(("assistant", "41"), ("tool", "43"), ("assistant", "So 42.")),
        said(("assistant", "42"), ("tool", "43")),
        said(("assistant", [{"type": "text", "text": "It is "}, {"type": "text", "text": "42."}])),
        said(("assistant", None)),
        said(("tool", "42")),
        [{"content": "42"}],
        [],
    ]
    count = len(completions)
    found = number(
        prompts=[said(("user", "42?"))] * count,
        completions=completions,
        completion_ids=[[1]] * count,
        answer=[42] * count,
    )
    assert found == [1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    assert [each.reason for each in found[3:5]] == ["no answer found"] * 2


def test_a_thought_that_the_prompt_opened_is_no_answer() -> None:
    columns = {"answer": [42, 42]}
    texts = ["Perhaps 42", "Perhaps 41</think>42"]
    assert trained(verify.number, texts, columns, is_chat=False, prompts=["Q <think>\n"] * 2) == [0.0, 1.0]
    found = number(
        prompts=[[{"role": "user", "content": "Q"}, {"role": "assistant", "content": "<think>"}]] * 2,
        completions=[[{"role": "assistant", "content": text}] for text in texts],
        completion_ids=[[1]] * 2,
        **columns,
    )
    assert found == [0.0, 1.0]
    tagged = "Two.</think><answer>2</answer>"
    assert trained(verify.tags, [tagged], {}, is_chat=False, prompts=["Q <think>"]) == [1.0]
    assert trained(verify.tags, [tagged], {}, is_chat=True, prompts=["Q <think>"]) == [0.0], "the user's words"


def test_settings_are_given_by_partial() -> None:
    function = partial(verify.tags, names=("a", "b"))
    assert trained(function, ["<a>x</a><b>y</b>"], {}, is_chat=True) == [1.0]

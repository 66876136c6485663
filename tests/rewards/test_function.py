"""Reward functions: their arguments, valid return values, and the errors for invalid ones."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.rewards import CallLimits, FunctionReward, Responses, WeightedReward
from kedge.rewards.function import load_function
from kedge.rewards.source import checked_scores
from kedge.rewards.weighted import GuardedReward
from kedge.training.runtime import Terminated, stopping
from kedge_base.errors import RewardError
from kedge_base.generators import seeded


def responses(count: int = 3, **columns: list) -> Responses:
    return Responses(
        prompts=[f"prompt {index}" for index in range(count)],
        completions=["x" * (index + 1) for index in range(count)],
        prompt_ids=[[7]] * count,
        response_ids=[[5] * (index + 1) for index in range(count)],
        stopped=[True] * count,
        columns=columns,
        max_new_tokens=8,
    )


def lengths(prompts, completions, **columns):
    return [len(text) for text in completions]


class Judge:
    """A callable object, sync or async, works like a function."""

    def __call__(self, completions):
        return [1.5 for _ in completions]


class AsyncJudge:
    async def __call__(self, completions):
        await asyncio.sleep(0)
        return [2.5 for _ in completions]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lengths, [1, 2, 3]),
        (lambda completions: [len(text) for text in completions], [1, 2, 3]),
        (lambda completions, **others: [len(others["answer"][0])] * len(completions), [2, 2, 2]),
        (lambda completions, answer: [float(a) for a in answer], [10, 20, 30]),
        (
            lambda prompts, completions, /, **columns: [len(p + c) for p, c in zip(prompts, completions, strict=False)],
            [9, 10, 11],
        ),
        (lambda completion_ids, max_new_tokens: [max_new_tokens - len(ids) for ids in completion_ids], [7, 6, 5]),
        (lambda stopped, missing=4: [missing * done for done in stopped], [4, 4, 4]),
        (functools.partial(lambda completions, scale: [scale] * len(completions), scale=3), [3, 3, 3]),
        (Judge(), [1.5, 1.5, 1.5]),
        (AsyncJudge(), [2.5, 2.5, 2.5]),
    ],
)
def test_a_function_gets_what_its_signature_names(function, expected):
    reward = FunctionReward(function)
    assert reward.score(responses(answer=["10", "20", "30"])) == expected


def test_a_catch_all_gets_everything_once():
    seen = {}

    def spy(prompts, **everything):
        seen.update(everything)
        return [0.0] * len(prompts)

    FunctionReward(spy).score(responses(answer=[1, 2, 3]))
    assert set(seen) == {"completions", "prompt_ids", "completion_ids", "stopped", "answer", "max_new_tokens", "seed"}


def test_a_conversation_is_text_and_its_messages_are_a_column():
    question = [{"role": "user", "content": "Why?"}]

    def for_messages(prompts, completions):
        asked, said = ([messages[-1]["content"] for messages in batch] for batch in (prompts, completions))
        return [len(question + answer) for question, answer in zip(asked, said, strict=True)]

    def here(prompts, completions, messages, **columns):
        assert all(isinstance(text, str) for text in (*prompts, *completions))
        return for_messages(messages, [[{"role": "assistant", "content": text}] for text in completions])

    assert FunctionReward(here).score(responses(messages=[question] * 3)) == [5, 6, 7]


def test_a_function_that_empties_its_lists_changes_nothing():
    cards = [1, 2]  # of a prompt with three responses

    def greedy(prompts, completion_ids, cards, answer):
        left = [float(len(hand)) for hand in cards if hand.pop()]
        for each in (prompts, completion_ids[0], answer[0]["of"]):
            each.clear()
        return left

    answer = [{"of": [each]} for each in "abc"]
    batch = responses(answer=answer, cards=[cards] * 3)
    terms = WeightedReward([(FunctionReward(greedy, name=name), 1.0) for name in ("first", "second")])
    assert terms.score_terms(batch).scores == [2.0, 2.0, 2.0]
    assert batch == responses(answer=[{"of": [each]} for each in "abc"], cards=[[1, 2]] * 3)


@pytest.mark.parametrize(
    "returned",
    [
        [1, 2.5, None],
        (1.0, 2.5, None),
        [np.float32(1), np.float64(2.5), None],
        [torch.tensor(1), torch.tensor([2.5]), None],
        [True, Fraction(5, 2), None],
    ],
)
def test_every_kind_of_real_number_is_a_score(returned):
    scores = checked_scores(returned, name="f", lengths=[3, 3, 3])
    assert scores == [1.0, 2.5, None]
    assert all(score is None or type(score) is float for score in scores)


@pytest.mark.parametrize("array", [torch.tensor([1.0, 2.0]), np.array([1, 2]), torch.tensor([1, 2], dtype=torch.int32)])
def test_a_tensor_or_array_is_a_list(array):
    assert checked_scores(array, name="f", lengths=[1, 2]) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1.0], ["judge returned 1 scores for 2 responses"]),
        (None, ["judge returned None (of type NoneType)", "list of 2 numbers"]),
        (3.0, ["judge returned 3.0 (of type float)"]),
        ({0: 1.0, 1: 2.0}, ["(of type dict)"]),
        (iter([1.0, 2.0]), ["iterator"]),
        ([1.0, "2"], ["response 1", "'2' (of type str)", "a number, or None"]),
        ([[1.0], [2.0]], ["response 0 a list of 1 numbers", "one number, or a list of 3, one per response token"]),
        ([[1.0], [2.0]], ["; if that is the response's score, take it out of the list, as scores.squeeze(-1) does"]),
        (([0.0, 1.0], {}, 5), ["3 scores for 2 responses", "one per response: the first part, which has 2, without"]),
        (torch.ones(2, 1), ["response 0 a list of 1 numbers"]),
        (torch.tensor(1.0), ["returned tensor(1.)"]),
        ([math.nan, 0], ["response 0 nan", "finite"]),
        ([0, -math.inf], ["response 1 -inf", "finite"]),
        ([0, 10**400], ["response 1 inf", "finite"]),
        ([0, -1e39], ["response 1 -1e+39", "infinite in fp32"]),
        ([0, -1e38], ["response 1 -1e+38, whose sums and squares are infinite in fp32; expected a number up to 1e+12"]),
        ([0, [1.0, 1e20]], ["token 1 of response 1 1e+20"]),
        ([0, 1j], ["response 1", "(of type complex)"]),
        ([0, [1.0, 2.0, 3.0]], ["response 1 a list of 3 numbers", "a list of 2, one per response token"]),
        ([0, np.zeros(3)], ["response 1 a list of 3 numbers"]),
        ([0, []], ["response 1 a list of 0 numbers"]),
        ([0, [1.0, None]], ["token 1 of response 1 None", "a number, one per response token"]),
        ([0, [[1.0], [2.0]]], ["token 0 of response 1 [1.0] (of type list)"]),
        ([0, [0.5, math.nan]], ["token 1 of response 1 nan", "finite"]),
    ],
)
def test_a_broken_contract_is_named(returned, words):
    with pytest.raises(RewardError) as caught:
        checked_scores(returned, name="judge", lengths=[3, 2])
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "returned",
    [
        [[0.5, 1, True], 2.0, None],
        [np.array([0.5, 1.0, 1.0]), torch.tensor([2.0]), None],
        (torch.tensor([0.5, 1.0, 1.0]), torch.tensor(2.0), None),
        [[np.float32(0.5), torch.tensor(1), Fraction(1)], 2, None],
    ],
)
def test_an_entry_may_be_a_list_of_one_number_per_token(returned):
    scores = checked_scores(returned, name="f", lengths=[3, 2, 4])
    assert scores == [[0.5, 1.0, 1.0], 2.0, None]
    assert all(type(number) is float for number in scores[0])


def test_an_array_of_one_number_is_that_of_the_token_where_others_have_one_per_token():
    returned = [np.ones(2), np.ones(1), torch.ones(3)]
    assert checked_scores(returned, name="f", lengths=[2, 1, 3]) == [[1.0, 1.0], [1.0], [1.0, 1.0, 1.0]]
    assert checked_scores([np.ones(1), torch.ones(1)], name="f", lengths=[1, 3]) == [1.0, 1.0]


def test_a_matrix_has_a_row_per_response():
    assert checked_scores(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), name="f", lengths=[2, 2]) == [[1.0, 2.0], [3.0, 4.0]]


@given(st.lists(st.one_of(st.floats(), st.text(), st.none(), st.booleans(), st.integers()), max_size=4))
def test_any_return_value_is_scores_or_a_one_line_error(returned):
    good = len(returned) == 2 and all(not isinstance(entry, str) and math.isfinite(entry or 0) for entry in returned)
    if good:
        assert checked_scores(returned, name="f", lengths=[3, 3]) == [None if x is None else float(x) for x in returned]
    else:
        with pytest.raises(RewardError, match=r"\Af [^\n]*\Z"):
            checked_scores(returned, name="f", lengths=[3, 3])


def test_an_exception_is_one_line_with_its_place():
    def divides(completions):
        return [1 / 0 for _ in completions]

    def shouts(completions):
        raise OSError("service\n\tdown")

    @torch.no_grad()
    def parses(completions):
        return [json.loads(text) for text in completions]

    with pytest.raises(RewardError, match=r"parses raised JSONDecodeError: .* \(test_function.py:\d+\)"):
        FunctionReward(parses).score(responses())
    with pytest.raises(RewardError, match=r"\Ashouts raised OSError: service down \(.*\)\Z"):
        FunctionReward(shouts).score(responses())
    with pytest.raises(RewardError, match=r"divides raised ZeroDivisionError: division.* \(test_function.py:\d+\)"):
        FunctionReward(divides).score(responses())


class Lengths(torch.nn.Module):
    """A module is a reward if its `forward` is a reward function."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, completions):
        return self.scale * torch.tensor([float(len(text)) for text in completions])


def test_a_torch_module_whose_forward_takes_completions_is_a_reward_function():
    given = responses()
    assert FunctionReward(Lengths()).score(given) == [2.0 * len(text) for text in given.completions]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (torch.nn.Linear(3, 1), r"Linear\(input.*\) does not take `completions`.* kedge\.LoadedModel"),
        (lambda prompts: [0.0], "does not take `completions`"),
        (lambda queries, replies: [0.0], "expected f\\(prompts, completions"),
        (7, "must be callable"),
    ],
)
def test_a_wrong_signature_is_found_before_any_call(function, message):
    with pytest.raises(RewardError, match=message):
        FunctionReward(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda completions: [float(len(completions[0][0]["content"]))],
        lambda completions: [len(each["content"]) for each in completions],
        lambda completions: [len(each[-1]["content"]) for each in completions],
        lambda completions: [len(each.get("content", "")) for each in completions],
        lambda completions: [len(each[0].get("content")) for each in completions],
        lambda completions: [len(each.content) for each in completions],
        lambda completions, prompts: [len(each[-1]["content"]) for each in prompts],
        lambda completions: [each["role"] == "assistant" for each in completions],
    ],
)
def test_a_text_that_is_taken_for_a_message_is_explained(function):
    with pytest.raises(RewardError, match=r"raised (Type|Attribute)Error: .* \(test_function\.py:\d+\)") as caught:
        FunctionReward(function).score(responses())
    assert str(caught.value).endswith(
        "; prompts and completions are texts, also those of conversations: use `completion`, not "
        '`completion[0]["content"]`; a prompt\'s messages are in the column `messages`'
    )


@pytest.mark.parametrize("function", [lambda completions: completions[9], lambda completions: completions["a"]])
def test_other_mistakes_are_not_explained_by_messages(function):
    with pytest.raises(RewardError) as caught:
        FunctionReward(function).score(responses())
    assert "conversations" not in str(caught.value)


@pytest.mark.parametrize("name", ["environments", "trainer_state", "log_metric", "log_extra"])
def test_arguments_that_trl_alone_passes_are_no_columns(name):
    taken: dict = {}
    exec(f"def f(completions, {name}, **more): return [0.0] * len(completions)", taken)
    with pytest.raises(RewardError, match=rf"^f takes '{name}': in TRL .*; remove it, or give it a default$"):
        FunctionReward(taken["f"]).check({"answer": ["a"]})
    assert FunctionReward(taken["f"]).score(responses(**{name: ["a", "b", "c"]})) == [0.0] * 3


def test_columns_are_checked_before_a_run():
    reward = FunctionReward(lambda completions, answer: [0.0], name="exact")
    reward.check(["answer", "id"])
    with pytest.raises(RewardError, match=r"exact takes 'answer'.*\(columns: id\)"):
        reward.check(["id"])
    with pytest.raises(RewardError, match="takes 'answer'"):
        reward.score(responses())
    for columns, remedy in (
        (["Answer", "Body"], "set data.columns.answer=Answer, or set the parameter's value"),
        (["answers"], "set data.columns.answer=answers, or"),
        (["Body"], r"add the column, name another one \(data.columns.answer=COLUMN\), or set the parameter's value"),
    ):
        with pytest.raises(RewardError, match=remedy):
            reward.check(columns)


def test_a_column_with_the_name_of_an_argument_is_passed_under_another():
    def exact(completions, given_completions, stopped, given_stopped, given_given_stopped):
        return [len(given_completions[0]) + given_stopped[0] + given_given_stopped[0] + stopped[0]]

    reward = FunctionReward(exact)
    given = {"completions": [[5, 6]], "stopped": [10], "given_stopped": [100], "seed": [3]}
    reward.check(list(given))
    assert reward.score(responses(1, **given)) == [2 + 100 + 10 + 1]
    with pytest.raises(RewardError, match="takes 'given_completions'"):
        reward.check(["stopped", "given_stopped"])


def test_the_seed_is_an_argument():
    def draws(completions, seed):
        return [seed] * len(completions)

    assert FunctionReward(draws).score(replace(responses(), seed=5)) == [5, 5, 5]
    assert FunctionReward(draws, settings={"seed": 3}).score(responses()) == [3, 3, 3]


def test_exits_and_cancellations_become_reward_errors():
    def leaves(completions):
        sys.exit("enough")

    async def cancels(completions):
        raise asyncio.CancelledError

    with pytest.raises(RewardError, match=r"leaves raised SystemExit: enough \(test_function.py"):
        FunctionReward(leaves).score(responses())
    with pytest.raises(RewardError, match=r"cancels raised CancelledError \(test_function.py:\d+\)$"):
        FunctionReward(cancels).score(responses())


def test_settings_are_fixed_arguments():
    def scaled(completions, *, scale):
        return [scale * len(text) for text in completions]

    reward = FunctionReward(scaled, settings={"scale": 2})
    reward.check([])
    assert reward.score(responses()) == [2, 4, 6]
    with pytest.raises(RewardError, match="no setting 'scael'; it takes completions, scale"):
        FunctionReward(scaled, settings={"scael": 2})


def test_async_functions_run_concurrently():
    begun = {name: asyncio.Event() for name in ("1", "2")}

    def waits(name):
        async def judge(completions):
            begun[name].set()
            for each in begun.values():  # one after the other, the first would wait for ever
                await asyncio.wait_for(each.wait(), 30)
            return [float(name)] * len(completions)

        return FunctionReward(judge, name=name)

    reward = WeightedReward([(waits("1"), 1.0), (FunctionReward(lengths), 1.0), (waits("2"), 10.0)])
    assert reward.score(responses()) == [22.0, 23.0, 24.0]


def test_async_works_inside_a_running_event_loop():
    async def notebook_cell():
        return FunctionReward(AsyncJudge()).score(responses())

    assert asyncio.run(notebook_cell()) == [2.5] * 3


def test_what_a_module_makes_once_serves_all_calls_and_functions():
    """A semaphore belongs to the loop in which a task first waited for it, as connections of HTTP clients do."""
    gate, loops = asyncio.Semaphore(1), set()

    async def one(text):
        async with gate:
            loops.add(asyncio.get_running_loop())
            await asyncio.sleep(0)
            return float(len(text))

    async def judge(completions):
        return await asyncio.gather(*map(one, completions))

    async def other(completions):
        return await judge(completions)

    first = FunctionReward(judge)
    assert [first.score(responses()) for _ in range(2)] == [[1.0, 2.0, 3.0]] * 2
    started = [source.start(responses()) for source in (FunctionReward(judge), FunctionReward(other), first)]
    assert [collect() for collect in started] == [[1.0, 2.0, 3.0]] * 3
    assert FunctionReward(lambda completions: judge(completions)).score(responses()) == [1.0, 2.0, 3.0]
    assert len(loops) == 1


def test_a_task_that_exits_ends_its_call_and_no_other():
    async def leave():
        sys.exit("enough")

    async def judge(completions):
        await asyncio.gather(leave(), asyncio.sleep(0))

    for _ in range(2):
        with pytest.raises(RewardError, match="judge raised SystemExit: enough"):
            FunctionReward(judge).score(responses())
    assert FunctionReward(AsyncJudge()).score(responses()) == [2.5] * 3


def test_the_loop_is_closed_when_the_process_ends():
    code = """
import asyncio, atexit
from kedge.rewards import FunctionReward, Responses
loops = []
atexit.register(lambda: print(loops[0].is_closed(), closed))
closed = []

async def judge(completions):
    loops.append(asyncio.get_running_loop())
    asyncio.create_task(left_behind())
    return [1.0]

async def left_behind():
    try:
        await asyncio.sleep(100)
    finally:
        closed.append("cancelled")

batch = Responses(prompts=["p"], completions=["c"], prompt_ids=[[1]], response_ids=[[2]], stopped=[True])
print(FunctionReward(judge).score(batch))
"""
    ended = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("[1.0]\nTrue ['cancelled']\n", "")


def test_async_functions_are_checked_like_plain_ones():
    async def short(completions):
        return [1.0]

    async def raises(completions):
        raise KeyError("key")

    with pytest.raises(RewardError, match="short returned 1 scores for 3 responses"):
        FunctionReward(short).score(responses())
    with pytest.raises(RewardError, match="raises raised KeyError"):
        WeightedReward([(FunctionReward(raises), 1.0), (FunctionReward(short), 1.0)]).score(responses())


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(RewardError, match=r"columns\['answer'\] has 2 entries; expected 3"):
        responses(answer=[1, 2])


def test_a_function_that_draws_gets_the_numbers_of_its_seed() -> None:
    def noisy(completions):
        return [random.random() + np.random.random() + float(torch.rand(())) for _ in completions]

    before = random.getstate()
    reward = FunctionReward(noisy)
    first = reward.score(replace(responses(), seed=3))
    assert reward.score(replace(responses(), seed=4)) != first
    assert reward.score(replace(responses(), seed=3)) == first
    assert random.getstate() == before


def test_an_async_function_waits_for_no_turn() -> None:
    """The one event loop would wait, with all episodes and other calls."""

    async def quick(completions):
        return [1.0 for _ in completions]

    found: list[list[float]] = []
    with seeded(0):  # as a plain function in another thread
        thread = threading.Thread(target=lambda: found.append(FunctionReward(quick).score(responses())), daemon=True)
        thread.start()
        thread.join(10)
    assert found == [[1.0, 1.0, 1.0]]


went_on = []


def interrupted(completions):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
    went_on.append(completions)
    return [0.0] * len(completions)


@pytest.mark.parametrize("on_error", ["stop", "drop", 0.0])
def test_a_signal_that_ends_the_run_is_not_the_functions_error(on_error):
    """It is not tried again either."""
    guarded = GuardedReward(FunctionReward(interrupted), CallLimits(retries=3, on_error=on_error))
    with pytest.raises(Terminated), stopping(grace_seconds=0.2):
        guarded.score(responses())
    assert not went_on


def test_a_signal_while_a_file_is_imported_is_not_the_files_error(tmp_path):
    (tmp_path / "slow.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(30)\n")
    with pytest.raises(Terminated), stopping(grace_seconds=0.2):
        load_function(f"{tmp_path}/slow.py:f")


@pytest.mark.parametrize("name", ["last_turns", "episodes"])
def test_a_column_of_an_argument_by_turns_is_passed_as_given(name):
    def asks(completions, **columns):
        return [float(value) for value in columns[f"given_{name}"]]

    assert FunctionReward(asks).score(responses(**{name: [1, 2, 3]})) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("told", "pace"),
    [
        ([3, 2.5, 4, None], (4.0, 1)),
        (["10"], (0.0, 1)),
        ([None], (0.0, 1)),
        ([[9]], (0.0, 1)),
        ([(9, 4)], (9.0, 4)),
        ([(9, 0), (9, 4.0), (1, 2, 3), ("9", 4), ()], (0.0, 1)),
    ],
)
def test_a_check_of_rows_may_tell_how_long_a_response_takes(told, pace):
    def rated(completions, level):
        return [1.0] * len(completions)

    rated.check_rows = lambda level: level[0]
    reward = FunctionReward(rated)
    for each in told:
        reward.check({"level": [each]})
    assert reward.pace == pace

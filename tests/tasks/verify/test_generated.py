"""Answers to the tasks of reasoning-gym."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kedge_base import generated
from kedge_base.errors import RewardError
from kedge_tasks.verify import reasoning_gym as verify
from kedge_tasks.verify.generated import REFUSED, reasoning_gym
from tests import reasoning

SUMS = "reasoning-gym:sums,size=9#5"  # the answer is 5


@pytest.fixture
def package():
    generated.open_task.cache_clear()
    generated.open_entry.cache_clear()
    with reasoning.reasoning_gym():
        yield
    generated.open_task.cache_clear()
    generated.open_entry.cache_clear()


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("text", "whole", "score", "reason"),
    [
        ("5", True, 1.0, "right"),
        (" 5\n", True, 1.0, "right"),
        ("It is <answer>4</answer>, no, <answer> 5 </answer>.", True, 1.0, "right"),
        ("<answer>5</answer> and so", False, 1.0, "right"),
        ("<think>Is it <answer>4</answer>?</think> 5", True, 1.0, "right"),
        ("5", False, 0.0, "cut off"),
        ("6", True, 0.5, "partly right"),
        ("9", True, 0.01, "wrong value"),
        ("five", True, 0.0, "wrong format"),
        ("1" * 20_000, True, 0.0, "wrong format"),
        ("1e9999999", True, 0.0, "wrong format"),
        ("", True, 0.0, "no answer found"),
        ("<answer></answer>", True, 0.0, "no answer found"),
        ("forever", True, 0.0, "took too long"),
    ],
)
def test_a_response_is_scored_by_its_task(text, whole, score, reason):
    [verdict] = verify([text], entry=[SUMS], stopped=[whole])
    assert (float(verdict), verdict.reason) == (score, reason)


@pytest.mark.usefixtures("package")
def test_off_the_main_thread_no_zeros_are_given():
    with ThreadPoolExecutor(1) as pool, pytest.raises(RewardError, match=r"^reasoning_gym needs the main thread"):
        pool.submit(verify, ["5"], [SUMS]).result()


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("task", "text", "evaluated"),
    [
        ("countdown", "(25 + 3) * 4 - 7/2", True),
        ("countdown", "9**9", False),
        ("countdown", "9* *9**9", False),
        ("countdown", "1" * 10, False),
        ("countdown", "exit()", False),
        ("countdown", "9+" * 150 + "9", False),
        ("spiral_matrix", "[[1, 2], ['a']]", True),
        ("spiral_matrix", "7", True),
        ("spiral_matrix", "[exit()]", False),
        ("spiral_matrix", "exit()", False),
        ("spiral_matrix", "[" * 3000, False),
        ("spiral_matrix", "[9**9]", False),
    ],
)
def test_nothing_of_a_response_is_executed(task, text, evaluated):
    entry = f"reasoning-gym:{task},size=1#0"
    [verdict] = verify([text], entry=[entry])
    assert generated.open_task(f"reasoning-gym:{task},size=1").scored == ([text] if evaluated else [])
    assert verdict.reason == ("right" if evaluated else "wrong format")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("reasoning-gym:game_of_life_halting,size=1#0", "game_of_life_halting cannot be a reward: it accepts any text"),
        ("reasoning-gym:simple_integration,size=1#0", "it executes a response to score it"),
        ("5", "column 'entry', prompt 1: '5' is not usable; expected a row of the prompts reasoning-gym:NAME"),
        ("reasoning-gym:sums,size=1#7", "the task has 1 entries"),
    ],
)
def test_rows_are_checked_before_a_run(entry, line):
    with pytest.raises(RewardError, match=line):
        reasoning_gym.check_rows(entry=[entry])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that the package leaves open
def test_every_task_of_the_package_takes_its_own_answer_and_no_other():
    """Those without an answer of their own have several right ones."""
    factory = pytest.importorskip("reasoning_gym.factory")
    generated.open_task.cache_clear()
    generated.open_entry.cache_clear()
    taken: set[str] = set()
    for name in sorted(set(factory.DATASETS) - set(REFUSED)):
        entries = [f"reasoning-gym:{name},size=2,seed=3#{number}" for number in range(2)]
        answers = [str(generated.find_entry(entry)[2]["answer"]) for entry in entries]
        if all(float(each) == 1 for each in verify(answers, entry=entries)):
            taken.add(name)
        for text in ("I do not know.", "__import__('os').abort()", "9**9**9**9", "(" * 500):
            assert max(map(float, verify([text] * 2, entry=entries))) <= 0.25, (name, text)
    without = set(factory.DATASETS) - set(REFUSED) - taken
    assert without == {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}

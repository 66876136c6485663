"""`path/to/file.py:function` and `package.module:function`: how names resolve, and the errors if they do not."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from pathlib import Path

import pytest

from kedge.rewards import load_function
from kedge.rewards.penalties import too_long
from kedge_base.errors import RewardError
from kedge_base.term_names import source_name
from kedge_base.texts import names_function

RUN_CONTROL = "kedge.control(env='CartPole-v1')"
SWEEP = "kedge.sweep('ppo', {'num_epochs': [1, 2]}, model='m', prompts='p.jsonl', reward='r.py:f')"


@pytest.fixture(autouse=True)
def restored_imports(monkeypatch, tmp_path):
    """Loading a function makes folders importable; a test leaves none of them behind, and none of their modules.

    Installed modules stay: torch cannot be imported twice, and a second copy of a module of kedge would not be the one
    that later tests replace functions of.
    """
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        module = sys.modules[name]
        places = [*getattr(module, "__path__", ()), getattr(module, "__file__", None) or ""]
        if any(Path(place).is_relative_to(tmp_path) for place in places):
            del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rewards.py:score", True),
        ("a:b/rewards.py:score", True),
        ("package.module:score", True),
        ("package.module:Judge.score", True),
        ("rewards.py", True),
        ("org/model", False),
        ("runs/reward/model", False),
        (r"C:\models\reward", False),
        ("model:", False),
        ("model:7b", False),
    ],
)
def test_functions_and_models_are_told_apart(text, expected):
    assert names_function(text) is expected


def test_a_file_runs_as_a_module_of_its_own(tmp_path):
    path = write(tmp_path / "my-reward.v2.py", "def f(completions):\n    return [__name__ for _ in completions]\n")
    first, second = load_function(f"{path}:f"), load_function(f"{path}:f")
    (name,) = first(completions=["x"])
    assert sys.modules[name].f is first
    assert second(completions=["x"]) != [name]


def test_the_newest_text_of_a_file_is_run(tmp_path):
    path = write(tmp_path / "r.py", "def f(completions): return [1.0]\n")
    assert load_function(f"{path}:f")(completions=["x"]) == [1.0]
    write(path, "def f(completions): return [200.0]\n")
    assert load_function(f"{path}:f")(completions=["x"]) == [200.0]


def test_a_file_has_its_own_name_unless_that_is_another_modules(tmp_path):
    text = "def f(completions): return [__name__]\n"
    name = load_function(f"{write(tmp_path / 'own_name_a.py', text)}:f")(completions=["x"])
    again = load_function(f"{tmp_path / 'own_name_a.py'}:f")(completions=["x"])
    assert (name, again) == (["own_name_a"], ["own_name_a"])
    for taken in ("math", "json", "kedge", "own_name_a", "with.dots"):
        [name] = load_function(f"{write(tmp_path / 'other' / f'{taken}.py', text)}:f")(completions=["x"])
        assert name.startswith("kedge_reward_")
    assert math.sqrt(4) == 2.0


def test_a_module_of_the_users_script_is_not_replaced(tmp_path, monkeypatch):
    path = write(tmp_path / "imported_before.py", "def f(completions): return [1.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = importlib.import_module("imported_before")
    assert load_function(f"{path}:f") is not before.f
    assert sys.modules["imported_before"] is before


@pytest.mark.parametrize("started", ["kedge.ppo(model='m', prompts=['p'], reward='r.py:f')", RUN_CONTROL, SWEEP])
def test_a_script_that_names_its_own_function_starts_no_run(tmp_path, started):
    text = f"import kedge\ndef f(completions): return [1.0]\n{started}\n"
    path = write(tmp_path / "r.py", text)
    with pytest.raises(RewardError, match=r"raised ConfigError: .* under `if __name__ == \"__main__\":` \(r.py:3\)"):
        load_function(f"{path}:f")


def test_a_script_that_runs_the_command_starts_no_run_either(tmp_path):
    """Its process would import the script again, in a chain of processes without end."""
    nested = "from kedge_base.machine.invocation import refuse_nested_run as refuse; refuse()"
    text = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {nested!r}], check=True)\n"
    path = write(tmp_path / "r.py", f"{text}def f(completions): return [1.0]\n")
    with pytest.raises(RewardError, match=r"raised CalledProcessError: .* \(r.py:2\)"):
        load_function(f"{path}:f")
    assert subprocess.run([sys.executable, "-c", nested]).returncode == 0


def test_the_line_of_a_module_is_its_own(tmp_path, monkeypatch):
    write(tmp_path / "raising_module.py", "import json\n\njson.loads('x')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardError, match=r"raised JSONDecodeError: .* \(raising_module.py:3\)"):
        load_function("raising_module:f")


def test_a_path_may_hold_colons(tmp_path):
    path = write(tmp_path / "a:b" / "r.py", "def f(completions): return [3.0]\n")
    assert load_function(f"{path}:f")(completions=["x"]) == [3.0]


@pytest.mark.parametrize("statement", ["from .neighbor_a import SCALE", "from neighbor_a import SCALE"])
def test_files_beside_it_can_be_imported(tmp_path, statement):
    write(tmp_path / "neighbor_a.py", "SCALE = 5.0\n")
    path = write(tmp_path / "r.py", f"{statement}\ndef f(completions): return [SCALE]\n")
    assert load_function(f"{path}:f")(completions=["x"]) == [5.0]


def test_neighbors_of_the_same_name_do_not_mix(tmp_path):
    functions = []
    for folder, scale in (("one", 1.0), ("two", 2.0)):
        write(tmp_path / folder / "shared.py", f"SCALE = {scale}\n")
        path = write(tmp_path / folder / "r.py", "from .shared import SCALE\ndef f(completions): return [SCALE]\n")
        functions.append(load_function(f"{path}:f"))
    assert [function(completions=["x"]) for function in functions] == [[1.0], [2.0]]


def test_modules_installed_or_in_the_working_directory(tmp_path, monkeypatch):
    assert load_function("kedge.rewards.penalties:too_long") is too_long
    write(
        tmp_path / "judges_here" / "lengths.py",
        "class Judge:\n    @staticmethod\n    def f(completions): return [4.0]\n",
    )
    monkeypatch.chdir(tmp_path)
    assert load_function("judges_here.lengths:Judge.f")(completions=["x"]) == [4.0]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("missing.py:f", ["'missing.py' does not exist", "path/to/file.py:function"]),
        ("r.py", ["is not the name of a function", "path/to/file.py:function"]),
        ("r.py:", ["is not the name of a function"]),
        (":f", ["is not the name of a function"]),
        ("no_such_package.module:f", ["'no_such_package.module' not found", "no module 'no_such_package'"]),
        ("kedge.rewards.penaltys:too_long", ["no module 'kedge.rewards.penaltys'"]),
        ("kedge.rewards.penalties:too_lnog", ["no 'too_lnog'", "did you mean 'too_long'"]),
        ("not-a-module:f", ["neither a dotted module name nor a .py file"]),
        ("python:vowels", ["reward python:vowels is a function that was passed from Python; pass it again, or name"]),
        ("{tmp}/r.py:NUMBER", ["is of type float, not a function"]),
        ("{tmp}/r.py:other", ["no 'other'", "it has f, wrong"]),
        ("{tmp}/r.py:wrong", ["wrong(text) does not take `completions`"]),
        ("{tmp}/syntax.py:f", ["syntax.py', line 2"]),
        ("{tmp}/raises.py:f", ["raises.py' raised ValueError: no key (raises.py:1)"]),
        ("{tmp}/imports.py:f", ["raised ModuleNotFoundError: No module named 'never_installed' (imports.py:1)"]),
    ],
)
def test_what_cannot_be_loaded_is_one_clear_line(tmp_path, spec, words):
    write(tmp_path / "r.py", "NUMBER = 1.0\ndef f(completions): return [0.0]\ndef wrong(text): return [0.0]\n")
    write(tmp_path / "syntax.py", "x = 1\ndef f(:\n")
    write(tmp_path / "raises.py", "raise ValueError('no key')\n")
    write(tmp_path / "imports.py", "import never_installed\n")
    with pytest.raises(RewardError) as caught:
        load_function(spec.format(tmp=tmp_path))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_module_whose_own_import_fails_is_not_called_missing(tmp_path, monkeypatch):
    write(tmp_path / "half_module.py", "import never_installed\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RewardError, match=r"'half_module' raised ModuleNotFoundError.*never_installed"):
        load_function("half_module:f")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("openai:llama3:8b@http://127.0.0.1:8000/v1", "llama3:8b"),
        ("openai:Qwen/Qwen3-8B@https://gpu7/v1", "Qwen3-8B"),
        ("openai:gpt-4.1-mini", "gpt-4.1-mini"),
    ],
)
def test_a_judge_is_named_like_its_model(source, name):
    assert source_name(source) == name

"""Names that moved between packages work for one release, and the line says the present one."""

from __future__ import annotations

import importlib
import sys

import pytest

from kedge.config import config_from_settings, load_config
from kedge.config.loading.load import resolved_yaml
from kedge_base.errors import KedgeError, RewardError
from kedge_base.importing import find_named
from kedge_base.packages import MOVED, current_name
from kedge_tasks.verify import gsm8k
from tests.forking import forked_python

OLD = "kedge.rewards.verify:gsm8k"
NEW = "kedge_tasks.verify:gsm8k"
LINE = f"{OLD} is now {NEW}; the old name works until the next release"


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_a_moved_module_is_the_same_under_both_names(old, new):
    with pytest.warns(FutureWarning, match=f"^{old} is now {new}; the old name works until the next release$"):
        module = importlib.import_module(old)
    try:
        assert module is importlib.import_module(new)
        assert module.__name__ == module.__spec__.name == new
    finally:
        for name in [name for name in sys.modules if name == old or name.startswith(f"{old}.")]:
            del sys.modules[name]


def test_what_a_script_imports_by_an_old_name_is_what_kedge_raises():
    script = (
        "from kedge.errors import RewardError\nfrom kedge.system.texts import printable\n"
        "from kedge.rewards.verify import gsm8k\nimport kedge_base.errors, kedge_base.texts, kedge_tasks.verify\n"
        "assert RewardError is kedge_base.errors.RewardError and printable is kedge_base.texts.printable\n"
        "assert gsm8k is kedge_tasks.verify.gsm8k"
    )
    done = forked_python(f"import kedge\n{script}")
    assert done.returncode == 0, done.stderr
    assert "kedge.errors is now kedge_base.errors" in done.stderr


@pytest.mark.parametrize("form", ["text", "list", "mapping"])
def test_a_configuration_with_an_old_name_is_that_with_the_new_one(form, tmp_path):
    """So that a run that was made before the move is resumed after it."""
    given = {"text": OLD, "list": [{"source": OLD, "weight": 1.0}], "mapping": {OLD: 1.0}}[form]
    new = {"text": NEW, "list": [{"source": NEW, "weight": 1.0}], "mapping": {NEW: 1.0}}[form]
    with pytest.warns(FutureWarning, match=LINE):
        config = config_from_settings("ppo", {"reward": given, "evaluate.judge": OLD})
    expected = config_from_settings("ppo", {"reward": new, "evaluate.judge": NEW})
    assert config == expected
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(expected).replace(NEW, OLD), encoding="utf-8")
    with pytest.warns(FutureWarning, match=LINE):
        assert load_config(path) == expected


def test_a_function_is_found_by_its_old_name():
    with pytest.warns(FutureWarning, match=LINE):
        assert find_named(OLD, word="reward", error=RewardError) is gsm8k


@pytest.mark.parametrize(
    "name", ["kedge.rewards.verifying:f", "kedge.errorsome", "kedge.inspection.x", "mykedge.errors", "kedge.ppo"]
)
def test_other_names_are_left_alone(name):
    assert current_name(name) == name


@pytest.mark.parametrize("text", ["kedge.system", "kedge.system.jsonl", "kedge.errors: why?", "kedge.system/own.py:f"])
def test_folders_files_and_texts_are_no_names(text):
    """By hand: only `module:name` is one in a setting, and a path is none anywhere."""
    config = config_from_settings("ppo", {"out": text, "data.prompts": [text], "reward": {text: 1.0}})
    assert (config.out, config.data.prompts, config.reward[0].source) == (text, [text], text)


def test_errors_keep_their_kind():
    assert issubclass(RewardError, KedgeError)

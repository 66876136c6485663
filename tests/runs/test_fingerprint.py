"""The files that a resumed run must find unchanged."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from kedge.config import load_config
from kedge.config.schema.root import Config
from kedge.rewards import RewardTerm
from kedge.runs.fingerprint import changed_inputs, input_hashes, lost_inputs
from kedge_tasks.verify import gsm8k


@pytest.mark.parametrize("name", ["model.safetensors", "value_head/model.safetensors", "config.json", "tokenizer.json"])
def test_a_changed_file_of_a_model_folder_is_noticed(name: str, tmp_path: Path) -> None:
    file = tmp_path / "model" / name
    file.parent.mkdir(parents=True)
    file.write_text("before")
    config = load_config(overrides=[f"model={tmp_path / 'model'}"])
    saved = input_hashes(config)
    assert changed_inputs(saved, input_hashes(config)) == []
    file.write_text("after")
    (line,) = changed_inputs(saved, input_hashes(config))
    assert line == "model: the files have changed since the run started"


def test_files_that_are_not_found_in_another_folder_are_not_called_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "rewards.py").write_text("x = 1")
    config = load_config(overrides=["data.prompts=[rows.jsonl, org/name]"], flags={"reward": ["rewards.py:f"]})
    saved = input_hashes(config)
    assert saved.keys() == {"data.prompts", "reward"}
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    here = f"is not found in {tmp_path}/elsewhere; resume from the folder in which the run was started"
    lost = [f"data.prompts: rows.jsonl, org/name {here}", f"reward: rewards.py:f {here}"]
    assert lost_inputs(config, saved, input_hashes(config)) == lost
    assert lost_inputs(config, saved, input_hashes(config), allowed=["data"]) == lost[1:]
    in_memory = load_config(overrides=["data.prompts=[python:in_memory]"])
    [given] = lost_inputs(in_memory, saved, {"reward": saved["reward"]})
    assert given == "data.prompts was given from Python, or as text; give it again in the same way"


def test_everything_that_a_run_reads_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "model/config.json": "{}",
        "model/chat_template.jinja": "{{ messages }}",
        "model/additional_chat_templates/tools.jinja": "{{ tools }}",
        "model/modeling.py": "x = 1",
        "data/deep/train.ndjson": "{}",
        "data/test.jsonl": "{}",
        "data/rows.csv": "prompt",
        "data/rows.TSV.gz": "compressed",
        "data/more.jsonl.gz": "compressed",
        "code/reward.py": "import json, words\nfrom lists import (\n    rare,\n)\nfrom package import part\n",
        "code/words.py": "import deeper",
        "code/lists.py": "",
        "code/rare.py": "",
        "code/unread.py": "",
        "package/__init__.py": "",
        "package/part.py": "from . import sibling",
        "package/sibling.py": "",
        "deeper.py": "x = 1",
        "judge.py": "import words",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    overrides = ["model=model", "data.prompts=[data:train]", "rlhf.labeler=judge:rank"]
    config = load_config(overrides=overrides, flags={"reward": ["code/reward.py:length"]})
    saved = input_hashes(config)
    noticed = {}
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text} ")
        noticed[name] = {line.partition(":")[0] for line in changed_inputs(saved, input_hashes(config))}
        (tmp_path / name).write_text(text)
    folders = {"model": {"model"}, "data": {"data.prompts"}, "code": {"reward"}, "package": {"reward"}}
    expected = {name: folders.get(name.partition("/")[0], {"reward"}) for name in files}
    assert noticed == expected | {"judge.py": {"rlhf.labeler"}, "code/unread.py": set(), "code/rare.py": set()}
    before = input_hashes(config)["data.prompts"]
    (tmp_path / "data/deep/train.ndjson").rename(tmp_path / "data/train.ndjson")
    assert input_hashes(config)["data.prompts"] != before


def hash_of(*values: object) -> str:
    return input_hashes(load_config(), {"data.prompts": [{"prompt": "a", "more": values}]})["data.prompts"]


def test_rows_with_sets_and_objects_have_one_hash_in_every_process() -> None:
    """In another process, sets of texts have another order, as sets of these numbers have here, and objects another
    address.
    """
    sets = [set[object](), set[object]()]
    for one, numbers in zip(sets, ([0, 8], [8, 0]), strict=True):
        for number in numbers:
            one.add(number)
    assert list(sets[0]) != list(sets[1])
    hashes = {hash_of(one, frozenset(one), thing, 0.5) for one in sets for thing in (object(), object())}
    assert len(hashes) == 1
    assert hash_of({"a", "b"}) != hash_of({"a", "c"})
    assert hash_of(object()) != hash_of(1j)
    assert hash_of(" at 0x1") != hash_of("")


@pytest.mark.parametrize("code", ["from helpers.words import length", "import broken\nimport helpers.words"])
def test_modules_are_found_in_folders_without_init_and_beside_a_file_that_cannot_be_read(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helpers").mkdir()
    words = tmp_path / "helpers" / "words.py"
    words.write_text("def length(text): ...")
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "reward.py").write_text(code)
    config = load_config(flags={"reward": ["reward.py:length"]})
    saved = input_hashes(config)
    words.write_text("def length(text): return 1")
    assert changed_inputs(saved, input_hashes(config)) == ["reward: the files have changed since the run started"]


def test_relative_imports_of_a_file_are_followed(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("from .words import length")
    words = tmp_path / "words.py"
    words.write_text("length = len")
    config = load_config(flags={"reward": [f"{tmp_path}/reward.py:length"]})
    saved = input_hashes(config)
    words.write_text("length = abs")
    assert changed_inputs(saved, input_hashes(config))


def test_a_changed_judge_of_evaluations_is_noticed(tmp_path: Path) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text("x = 1")
    config = load_config(overrides=[f"evaluate.judge={judge}:f"])
    saved = input_hashes(config)
    judge.write_text("x = 2")
    assert changed_inputs(saved, input_hashes(config)) == [
        "evaluate.judge: the files have changed since the run started"
    ]


def written(folder: Path, text: str) -> Any:
    """The function of a file, as a notebook's cell or a module defines it."""
    path = folder / f"cell_{len(list(folder.iterdir()))}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module.score


SCORE = "def score(completions):\n    return [float(len(text)) for text in completions]\n"


def test_a_function_that_was_passed_from_python_is_known_by_its_text(tmp_path: Path) -> None:
    config = Config()
    first, same = (input_hashes(config, {"reward": written(tmp_path, SCORE)}) for _ in range(2))
    other = input_hashes(config, {"reward": written(tmp_path, SCORE.replace("float", "-float"))})
    assert changed_inputs(first, same) == []
    [line] = changed_inputs(first, other)
    assert line == "reward.code: the code has changed since the run started"
    for allowed in ("reward", "reward.code"):
        assert changed_inputs(first, other, allowed=[allowed]) == []
    in_class = SCORE.replace("def score", "class score:\n  def step").replace("\n    ", "\n      ")
    games = [written(tmp_path, in_class + end) for end in ("", "  x = 1\n")]
    played = [input_hashes(config, {"environment.source": game}) for game in games]
    assert len(changed_inputs(*played)) == 1


def test_a_function_whose_text_is_not_known_is_not_compared(tmp_path: Path) -> None:
    config = Config()
    names: dict[str, Any] = {}
    exec(SCORE, names)
    known = input_hashes(config, {"reward": [written(tmp_path, SCORE)]})
    for other in (names["score"], lambda completions: [0.0], len, [], RewardTerm(gsm8k)):
        unknown = input_hashes(config, {"reward": other})
        assert unknown == {}
        assert changed_inputs(known, unknown) == changed_inputs(unknown, known) == []

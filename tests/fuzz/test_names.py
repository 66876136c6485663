"""Names and texts from data: nothing is written outside the run's folder, and no escapes reach the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fuzz.folders import copied
from tests.fuzz.outcome import kedge
from tests.tiny import CHAT_TEMPLATE, save_tiny_policy, save_tiny_reward_model, tiny_tokenizer

ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\x08\u202e"
NAMES = ["../../x", "/tmp/x", "a/b", "..", "a\nb: c", f"x{ESCAPES}", "a|b](http://x)", "x" * 300, "{0.__class__}", " "]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    save_tiny_policy(folder / "policy", tokenizer=tokenizer)
    save_tiny_reward_model(folder / "reward", tokenizer=tokenizer)
    (folder / "f.py").write_text("def f(completions, **columns):\n    return [1.0 for _ in completions]\n")
    return folder


def run(base: Path, tmp_path: Path, stage: str, rows: list[Any], **settings: Any) -> tuple[int, str, Path]:
    """Run a stage on some prompts; only its output folder may appear."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    document = {
        "model": str(base / "policy"),
        "reward": {f"{base / 'f.py'}:f": 1},
        "data": {"prompts": str(home / "prompts.jsonl")},
        "rollout": {"num_prompts": 1, "max_new_tokens": 2},
        "ppo": {"num_updates": 1, "num_epochs": 1},
        "runtime": {"report": False, "num_threads": 1},
        "out": str(home / "out" / "run"),
        **settings,
    }
    (home / "run.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    code, said = kedge(stage, "--config", str(home / "run.yaml"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]
    assert {path.name for path in home.iterdir()} <= {"prompts.jsonl", "run.yaml", "out"}
    assert sorted(path.name for path in (home / "out").glob("*")) in ([], ["run"])
    return code, said, home / "out" / "run"


@pytest.mark.parametrize("name", NAMES)
def test_a_rewards_name_is_only_a_name(name: str, base: Path, tmp_path: Path) -> None:
    reward = [{"source": f"{base / 'f.py'}:f", "name": name}, {"source": str(base / "reward"), "name": name}]
    code, said, out = run(base, tmp_path, "ppo", [{"prompt": "Why?"}], reward=reward)
    assert code == 0, said
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert metrics[0][f"score/{name}"] == 1.0
    assert (out / "model" / "config.json").is_file()
    card = (out / "model" / "README.md").read_text(encoding="utf-8")
    assert card.count("\n| reward |") == 1
    assert "\x1b" not in card


def test_prompts_send_no_escapes_to_the_terminal(base: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"Why{ESCAPES}?", "id": ESCAPES, "<script>": "<script>alert(1)</script>"}]
    code, said, out = run(base, tmp_path, "generate", rows)
    assert code == 0, said
    [row] = [json.loads(line) for line in (out / "responses.jsonl").read_text(encoding="utf-8").splitlines()]
    assert (row["prompt"], row["id"]) == (rows[0]["prompt"], ESCAPES)


def test_columns_with_the_names_of_outputs_are_all_kept(base: Path, tmp_path: Path) -> None:
    given = {"completion": "c", "stopped": "s", "score": "n", "given_completion": "g", "../x": 1, "id": "i"}
    code, said, out = run(base, tmp_path, "generate", [{"prompt": "Why?", **given}], reward=str(base / "reward"))
    assert code == 0, said
    [row] = [json.loads(line) for line in (out / "responses.jsonl").read_text(encoding="utf-8").splitlines()]
    assert isinstance(row["score"], float)
    assert set(given.values()) <= {value for value in row.values() if not isinstance(value, bool)}


@pytest.mark.parametrize("name", ["prompts", "completions", "completion_ids", "seed", "max_new_tokens"])
def test_columns_with_the_names_of_arguments_are_kept(name: str, base: Path, tmp_path: Path) -> None:
    code, said, out = run(base, tmp_path, "generate", [{"prompt": "Why?", name: 1}])
    assert code == 0, said
    [row] = [json.loads(line) for line in (out / "responses.jsonl").read_text(encoding="utf-8").splitlines()]
    assert row[name] == 1


@pytest.mark.parametrize("rounds", [["prompt", "Why?"], {"kedge:type": "bytes", "value": "AAAA"}])
def test_columns_of_every_shape_reach_the_function(rounds: Any, base: Path, tmp_path: Path) -> None:
    code, said, _ = run(base, tmp_path, "generate", [{"prompt": "Why?", "shape": rounds}])
    assert code == 0, said


def test_a_models_name_is_only_a_name(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "home" / "out"
    strange = copied(base / "policy", base / f"mo\ndel | [x](y) {ESCAPES}")
    code, said, out = run(base, tmp_path, "ppo", [{"prompt": "Why?"}], model=str(strange))
    assert code == 0, said
    assert out.parent == folder
    card = (out / "model" / "README.md").read_text(encoding="utf-8")
    assert "\x1b" not in card
    assert card.count("\n# ") == 1


def test_a_rewards_own_code_may_not_be_taken_from_the_data(base: Path, tmp_path: Path) -> None:
    (base / "trap.py").write_text(f"open({str(tmp_path / 'trap')!r}, 'w')\n")
    rows = [{"prompt": "Why?", "reward": f"{base / 'trap.py'}:f", "__class__": "x", "self": 1, "timeout": 2}]
    code, said, _ = run(base, tmp_path, "generate", rows)
    assert code == 0, said
    assert not (tmp_path / "trap").exists()

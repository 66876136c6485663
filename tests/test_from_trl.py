"""docs/from-trl.md: kedge's scripts have the settings of TRL's beside them, and run."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.config import config_from_settings
from kedge.config.translation import translate
from tests.tiny import save_tiny_policy, save_tiny_reward_model

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "from-trl.md").read_text(encoding="utf-8")
THEIRS, OURS = (re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) for kind in ("py", "python"))
NUM_UPDATES = 2


def arguments(listing: str, *names: str) -> dict[str, Any]:
    """The literal arguments of the call of a function with one of these names."""
    calls = (node for node in ast.walk(ast.parse(listing)) if isinstance(node, ast.Call))
    [call] = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] in names]
    literal = [(keyword.arg, ast.literal_eval(keyword.value)) for keyword in call.keywords]
    return {name: value for arg, found in literal for name, value in ({arg: found} if arg else found).items()}


@pytest.mark.parametrize("number", [0, 1])
def test_a_script_has_the_settings_of_the_one_before_it(number: int) -> None:
    given = arguments(THEIRS[number], "PPOConfig")
    translated, lines = translate("TRL", given)
    ours = arguments(OURS[number], "ppo", "PpoTrainer")
    assert [line for line in lines if "no counterpart" in line] == []
    # The limit of the old trainer is an argument of `generate`; TRL gets models and data as objects.
    more = {"max_new_tokens": 64, "reward": "path/to/reward", "prompts": "prompts.jsonl", "model": "path/or/hub-id"}
    expected = config_from_settings("ppo", translated, {**more, "out": ours["out"]})
    found = config_from_settings("ppo", {"reward": "path/to/reward", **ours})
    assert found.model_dump() == expected.model_dump()


@pytest.mark.parametrize("number", [0, 1])
def test_a_script_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_policy(tmp_path / "path" / "or" / "hub-id")
    save_tiny_reward_model(tmp_path / "path" / "to" / "reward")
    rows = [json.dumps({"prompt": f"The boat {number}"}) for number in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    small = {"num_updates": NUM_UPDATES, "num_prompts": 4, "max_new_tokens": 6}
    train, trainer = kedge.ppo, kedge.PpoTrainer
    monkeypatch.setattr(kedge, "ppo", lambda **given: train(**{**given, **small}))
    monkeypatch.setattr(kedge, "PpoTrainer", lambda **given: trainer(**{**given, **small}))
    exec(compile(OURS[number], "from-trl.md", "exec"), {})
    [run] = (tmp_path / "runs").iterdir()
    assert len((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == NUM_UPDATES


def test_the_page_is_short() -> None:
    assert len(PAGE.split()) <= 1200

"""How a stage ends: the calls that follow it and the one that resumes it, for the shell and for Python."""

from __future__ import annotations

import ast
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kedge.config import Config, config_from_settings, load_config
from kedge.runs import ending
from kedge.runs.calls import TO_FILL_IN, Call
from kedge.runs.ending import chained, resumable, say_next
from kedge.runs.next_calls import next_calls, resuming_call

FOLDER = Path("runs/my run")


def shell_calls(config: Config, stage: str, **names: str) -> list[str]:
    return [call.shell() for call in next_calls(config, stage, FOLDER, **names)]


def test_a_call_is_quoted_for_the_shell_and_for_python() -> None:
    call = Call("ppo", {"model": ("a b",), "prompts": ("p", "q"), "reward": TO_FILL_IN}, {"data.template": "tldr"})
    words = "kedge ppo --model 'a b' --prompts p --prompts q --reward REWARD data.template=tldr"
    assert call.shell() == words
    assert call.python() == (
        "kedge.ppo(model='a b', prompts=['p', 'q'], reward=reward, **{'data.template': 'tldr'})"
    )  # fmt: skip


def test_control_characters_do_not_reach_the_terminal() -> None:
    line = Call("ppo", {"resume": ("it's\n\x1b[31m \\ red",)}).shell()
    assert line.isprintable()
    # The words that bash makes of it.
    words = subprocess.run(["bash", "-c", f"printf '%s|' {line}"], capture_output=True, text=True, check=True).stdout
    assert words == "kedge|ppo|--resume|it's\n\x1b[31m \\ red|"


def test_after_fine_tuning_come_the_reward_model_and_a_look_at_responses() -> None:
    config = load_config(None, ["data.demonstrations=d.jsonl", "data.template=tldr"], {"model": "m"}, "small-cpu")
    assert shell_calls(config, "sft") == [
        "kedge reward --model 'runs/my run/model' --comparisons COMPARISONS --demonstrations d.jsonl "
        "--preset small-cpu data.template=tldr",
        "kedge generate --model 'runs/my run/model' --prompts d.jsonl --preset small-cpu data.template=tldr",
    ]


def test_names_of_columns_stay_with_the_data_that_they_name() -> None:
    config = load_config(None, ["data.demonstrations=d.jsonl", "data.columns.prompt=email"], {"model": "m"})
    named = [
        load_config(overrides=[word for word in shlex.split(call) if word.startswith("data.")]).data.columns
        for call in shell_calls(config, "sft")
    ]
    assert named == [{"demonstrations.prompt": "email"}, {"prompt": "email"}]


def test_held_out_prompts_are_those_to_evaluate_on() -> None:
    settings: dict[str, Any] = {"model": "m", "prompts": "p.jsonl", "reward": "rm", "data.eval_prompts": "held.jsonl"}
    [call] = shell_calls(config_from_settings("ppo", settings), "ppo")
    assert "--prompts held.jsonl" in call


def test_after_the_reward_model_comes_ppo_on_its_prompts() -> None:
    config = config_from_settings("reward", {"model": "sft/model", "comparisons": "c.jsonl"})
    assert shell_calls(config, "reward") == [
        "kedge ppo --model sft/model --prompts c.jsonl --reward 'runs/my run/model'"
    ]


def test_after_ppo_comes_the_evaluation_against_the_start() -> None:
    settings: dict[str, Any] = {"model": "sft/model", "prompts": "p.jsonl", "reward": {"rm": 1.0, "f.py:g": 0.5}}
    config = config_from_settings("ppo", {**settings, "max_new_tokens": 9})
    [line] = shell_calls(config, "ppo")
    assert line == (
        "kedge evaluate --model 'runs/my run/model' --against sft/model --prompts p.jsonl --judge rm "
        "rollout.max_new_tokens=9"
    )
    [call] = next_calls(config_from_settings("ppo", {"model": "m"}), "ppo", FOLDER)
    assert call.python().endswith("prompts=prompts, judge=judge)")  # passed from Python: only the user knows them


def test_after_a_critic_comes_ppo_with_what_shaped_its_returns() -> None:
    """Other settings, such as the critic's own, do not matter to PPO."""
    overrides = ["data.prompts=p.jsonl", "reward=f.py:g", "gamma=0.9", "rollout.temperature=0.7", "num_responses=8"]
    config = load_config(None, overrides, {"model": "m"}, stage="critic")
    assert shell_calls(config, "critic") == [
        "kedge ppo --model m --prompts p.jsonl --reward f.py:g --critic 'runs/my run/model' rollout.temperature=0.7 "
        "ppo.gamma=0.9"
    ]
    weighted = config_from_settings("critic", {"model": "m", "reward": [{"source": "f.py:g", "weight": 2.0}]})
    assert "--reward REWARD --critic" in shell_calls(weighted, "critic")[0]


def test_what_the_shell_resumes_is_the_folder() -> None:
    line = resuming_call(Config(), "ppo", FOLDER, by_command=True).shell()
    assert shlex.split(line) == ["kedge", "ppo", "--resume", "runs/my run"]


def test_python_resumes_with_the_whole_call() -> None:
    settings = {"model": "m", "prompts": "p.jsonl", "reward": "rm", "num_updates": 7, "preset": "small-cpu", "out": "o"}
    config = config_from_settings("ppo", settings)
    line = resuming_call(config, "ppo", FOLDER, by_command=False).python()
    assert line == (
        "kedge.ppo(model='m', prompts='p.jsonl', reward='rm', out='runs/my run', resume=True, preset='small-cpu', "
        "**{'ppo.num_updates': 7})"
    )
    [parsed] = ast.parse(line).body
    assert isinstance(parsed, ast.Expr)
    in_memory = config_from_settings("ppo", {"model": "m", "reward": [{"source": "f.py:g", "weight": 2.0}]})
    line = resuming_call(in_memory, "ppo", FOLDER, by_command=False).python()
    assert "prompts=prompts, reward=reward" in line


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(ending, "say", lines.append)
    monkeypatch.setattr(ending, "is_command_line", lambda: True)
    return lines


def interrupt(config: Config, folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt), resumable(config, folder, "ppo"):
        raise KeyboardInterrupt


def test_an_interruption_says_how_to_resume_if_there_is_something_to(tmp_path: Path, said: list[str]) -> None:
    interrupt(Config(), tmp_path)
    assert said == []
    (tmp_path / "checkpoints" / "update-000001").mkdir(parents=True)
    interrupt(Config(), tmp_path)
    assert said == [f"Resume: kedge ppo --resume {shlex.quote(str(tmp_path))}"]
    with chained():
        interrupt(Config(), tmp_path)
    assert len(said) == 1  # the chain says so itself


def test_a_chain_is_resumed_from_a_finished_stage(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "finished.json").touch()
    interrupt(Config(), tmp_path)
    assert len(said) == 1


def test_the_last_lines_name_model_report_and_next_calls(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "report.html").touch()
    say_next(config_from_settings("ppo", {"model": "m"}), tmp_path, "ppo")
    assert [line.split()[0] for line in said] == ["Model:", "Report:", "Next:"]
    with chained():
        say_next(Config(), tmp_path, "sft")
    assert len(said) == 3

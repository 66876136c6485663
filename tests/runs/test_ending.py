"""How a stage ends: the calls that follow it and the one that resumes it, for the shell and for Python."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kedge.config import Config, config_from_settings, load_config, resolved_yaml
from kedge.runs import ending
from kedge.runs.calls import TO_FILL_IN, Call, following_call, next_calls
from kedge.runs.ending import chained, resumable, say_next
from kedge_base.errors import ConfigError, OutOfMemoryError

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


@pytest.mark.parametrize(
    "token",
    [
        "\n",
        "###",
        "[/INST]",
        "1e5",
        "null",
        "yes",
        "|",
        "a: b",
        "'",
        '"',
        "\\",
        " ",
        "é\t",
        "<|end|>",
        "7",
        7,
        [7, "7"],
    ],
)
def test_a_setting_in_a_call_keeps_its_value(token: Any) -> None:
    [*_, word] = shlex.split(Call("ppo", {}, {"rollout.stop_token": token}).shell())
    assert load_config(overrides=[word]).rollout.stop_token == token


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


def test_names_of_columns_follow_data_that_is_read_in_another_role() -> None:
    for stage, role, of_prompts in (("reward", "comparisons", 0), ("sft", "demonstrations", 1)):
        given: dict[str, Any] = {"model": "m", role: "c.jsonl", f"data.columns.{role}.prompt": "question"}
        call = shell_calls(config_from_settings(stage, given), stage)[of_prompts]
        assert "--prompts c.jsonl" in call
        named = load_config(overrides=[word for word in shlex.split(call) if word.startswith("data.")]).data.columns
        assert named == {"prompts.prompt": "question"}


def test_after_ppo_comes_the_evaluation_against_the_start() -> None:
    settings: dict[str, Any] = {"model": "sft/model", "prompts": "p.jsonl", "reward": {"rm": 1.0, "f.py:g": 0.5}}
    config = config_from_settings("ppo", {**settings, "max_new_tokens": 9})
    [line] = shell_calls(config, "ppo")
    assert line == (
        "kedge evaluate --model 'runs/my run/model' --against sft/model --prompts TEST_PROMPTS --judge rm "
        "rollout.max_new_tokens=9"
    )
    [call] = next_calls(config_from_settings("ppo", {"model": "m"}), "ppo", FOLDER)
    assert call.python().endswith("prompts=test_prompts, judge=judge)")  # passed from Python: only the user knows them


def test_a_next_call_has_the_settings_that_it_reads() -> None:
    """A call with `data.eval_fraction=0.1` would look like one on the held-out tenth of the prompts."""
    settings: dict[str, Any] = {"model": "m", "prompts": "p.jsonl", "reward": "rm", "data.max_prompt_tokens": 64}
    config = config_from_settings("ppo", {**settings, "data.eval_fraction": 0.1, "data.curriculum": "level"})
    [line] = shell_calls(config, "ppo")
    assert line.endswith("--judge rm data.max_prompt_tokens=64")
    following = shell_calls(config_from_settings("critic", {"model": "m", "data.eval_fraction": 0.1}), "critic")
    assert following[0].endswith(" data.eval_fraction=0.1"), "PPO holds prompts out"
    with pytest.raises(ConfigError, match=r"eval_fraction is not a setting of evaluate"):
        config_from_settings("evaluate", {"eval_fraction": 0.1})


def test_after_sft_the_shares_of_the_demonstrations_are_not_those_of_comparisons() -> None:
    config = config_from_settings("sft", {"model": "m", "data": {"demonstrations": ["a", "b"], "mix": [0.7, 0.3]}})
    assert not any("data.mix" in line for line in shell_calls(config, "sft"))


@pytest.mark.parametrize("stage", ["reward", "critic"])
@pytest.mark.parametrize(
    ("data", "mix", "kept"),
    [
        ({"prompts": ["a", "b"]}, [0.7, 0.3], "[0.7, 0.3]"),
        ({"prompts": ["a", "b"]}, {"b": 0.3, "a": 0.7}, "[0.7, 0.3]"),
        ({"prompts": ["a", "b"], "comparisons": ["c", "d"]}, {"a": 1, "b": 2, "c": 3, "d": 4}, "[1.0, 2.0]"),
        ({"prompts": ["a"], "demonstrations": ["c", "d"]}, [0.7, 0.3], ""),
        ({"prompts": ["a", "b"], "comparisons": ["c", "d"]}, {"c": 0.7, "d": 0.3}, ""),
        ({"prompts": ["python:prompts", "python:more"]}, [0.7, 0.3], ""),
    ],
)
def test_a_next_call_mixes_the_sources_of_its_prompts(
    stage: str, data: dict[str, list[str]], mix: object, kept: str
) -> None:
    """The command would otherwise end with an error, since the shares are those of other sources, or not mix."""
    config = config_from_settings(stage, {"model": "m", "reward": "rm", "data": {**data, "mix": mix}})
    words = shlex.split(shell_calls(config, stage)[0])
    assert [word for word in words if word.startswith("data.mix")] == [f"data.mix={kept}"] * bool(kept)
    settings = [word for word in words if "=" in word]
    load_config(None, settings, {"data.prompts": data["prompts"]}, stage="ppo")


@pytest.mark.parametrize("mix", [[0.7, 0.3], {"a": 0.7, "b": 0.3}])
def test_prompts_of_comparisons_are_mixed_as_those_were(mix: object) -> None:
    config = config_from_settings("reward", {"model": "m", "data": {"comparisons": ["a", "b"], "mix": mix}})
    assert shell_calls(config, "reward") == [
        "kedge ppo --model m --prompts a --prompts b --reward 'runs/my run/model' 'data.mix=[0.7, 0.3]'"
    ]


def after_critic(*overrides: str, preset: str | None = None) -> tuple[str, Config]:
    """The command after a critic, and the configuration that it resolves to."""
    given = {"model": "m", "data.prompts": ["p.jsonl"], "reward": [{"source": "f.py:g"}]}
    [line] = shell_calls(load_config(None, overrides, given, preset, stage="critic"), "critic")
    words = shlex.split(line)
    options = {name: words.pop(words.index(name) + 1) for name in words if name.startswith("--")}
    flags = {"model": options["--model"], "reward": options["--reward"], "ppo.critic_init": options["--critic"]}
    fields = [word for word in words[2:] if not word.startswith("--")]
    return line, load_config(None, fields, flags, options.get("--preset"), stage="ppo")


def test_after_a_critic_comes_ppo_with_its_settings_of_ppo_and_sampling() -> None:
    """The critic's own settings, such as its number of responses, do not matter to PPO."""
    line, _ = after_critic("gamma=0.9", "rollout.temperature=0.7", "num_responses=8")
    assert line == (
        "kedge ppo --model m --prompts p.jsonl --reward f.py:g --critic 'runs/my run/model' "
        "rollout.temperature=0.7 ppo.gamma=0.9"
    )


@pytest.mark.parametrize(
    ("preset", "overrides", "kind", "expected"),
    [
        (None, ["ppo.value_loss={hl_gauss: [-1,3,101]}"], "auto", {"value_loss": {"hl_gauss": (-1, 3, 101)}}),
        (None, ["ppo.critic=separate", "ppo.critic_learning_rate=1e-4"], "separate", {"critic_learning_rate": 1e-4}),
        (None, ["ppo.critic=detached"], "separate", {"critic": "separate"}),
        (None, ["ppo.critic=frozen"], "frozen", {}),
        (None, ["critic.kind=shared", "ppo.critic={readout: 3}"], {"readout": 3}, {}),
        ("vapo", ["critic.kind=shared"], "shared", {"value_gae_lambda": 1.0}),
        ("rloo", ["ppo.critic=shared", "ppo.value_warmup_updates=2"], "separate", {"value_warmup_updates": 2}),
        (None, ["schedules={ppo.kl_coef: {1: 0.2}}"], "auto", {}),
    ],
)
def test_the_command_after_a_critic_is_valid_whatever_was_set(
    preset: str | None, overrides: list[str], kind: object, expected: dict[str, object]
) -> None:
    _, config = after_critic(*overrides, preset=preset)
    assert config.ppo.critic == kind
    assert {name: config.ppo.model_dump()[name] for name in expected} == expected
    assert bool(config.schedules) == any(each.startswith("schedules") for each in overrides)


@pytest.mark.parametrize("stage", ["sft", "reward", "critic", "ppo"])
def test_a_stage_that_trained_an_adapter_is_followed_by_one_that_trains_one(stage: str) -> None:
    config = config_from_settings(stage, {"model": "m", "adapter": {"kind": "lora", "rank": 4}})
    for line in shell_calls(config, stage):
        trains = line.split()[1] in ("reward", "ppo")
        assert (" adapter.kind=lora adapter.rank=4" in line) == trains


def test_rewards_keep_their_weights_and_those_with_settings_are_left_to_the_user() -> None:
    weighted = config_from_settings("critic", {"model": "m", "reward": {"f.py:g": 0.5, "rm": 1.0}})
    [call] = next_calls(weighted, "critic", FOLDER)
    assert "--reward f.py:g=0.5 --reward rm=1.0 --critic" in call.shell()
    assert "reward={'f.py:g': 0.5, 'rm': 1.0}" in call.python()
    named = config_from_settings("critic", {"model": "m", "reward": [{"source": "f.py:g", "name": "mine"}]})
    assert "--reward REWARD --critic" in shell_calls(named, "critic")[0]


def test_a_result_in_python_shows_the_same_next_call(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": "m", "max_new_tokens": 6, "data.eval_prompts": ["python:in_memory"]}
    config = config_from_settings("critic", settings)
    (tmp_path / "config.yaml").write_text(f"# stage: critic\n{resolved_yaml(config)}", encoding="utf-8")
    assert following_call(tmp_path) == (
        f"kedge.ppo(model='m', prompts=prompts, reward=reward, critic='{tmp_path / 'model'}', "
        "**{'rollout.max_new_tokens': 6})"
    )
    assert following_call(tmp_path / "gone") == ""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(ending, "say", lines.append)
    monkeypatch.setattr(ending, "is_command_line", lambda: True)
    return lines


def interrupt(config: Config, folder: Path, error: BaseException | None = None) -> None:
    run: Any = SimpleNamespace(folder=folder, stage="ppo", has_started=True, config=config)
    with pytest.raises((KeyboardInterrupt, OutOfMemoryError)), resumable(run):
        raise error or KeyboardInterrupt


def test_an_interruption_says_how_to_resume_if_there_is_something_to(tmp_path: Path, said: list[str]) -> None:
    interrupt(Config(), tmp_path)
    assert said == []
    (tmp_path / "config.yaml").touch()
    interrupt(Config(), tmp_path)
    assert said == [f"Resume: kedge ppo --resume {shlex.quote(str(tmp_path))}"]
    with chained():
        interrupt(Config(), tmp_path)
    assert len(said) == 1  # the chain says so itself


def test_python_resumes_with_the_same_call(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "is_command_line", lambda: False)
    (tmp_path / "config.yaml").touch()
    interrupt(Config(), tmp_path)
    interrupt(Config(), tmp_path, OutOfMemoryError("full", {"adapter.kind": "lora"}))
    how = f"Resume: the same call of kedge.ppo with out={str(tmp_path)!r}, resume="
    assert said == [f"{how}True", f"{how}['adapter.kind'], **{{'adapter.kind': 'lora'}}"]


def test_the_last_lines_name_model_report_and_next_calls(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "report.html").touch()
    say_next(config_from_settings("ppo", {"model": "m"}), tmp_path, "ppo")
    assert [line.split()[0] for line in said] == ["Model:", "Report:", "Next:"]
    with chained():
        say_next(Config(), tmp_path, "sft")
    assert len(said) == 3


def test_calls_name_every_preset() -> None:
    settings = {"model": "m", "prompts": "p.jsonl", "reward": "rm", "preset": ["small-cpu", "grpo"], "out": "o"}
    config = config_from_settings("ppo", settings)
    [following] = next_calls(config, "ppo", FOLDER)
    assert "preset=['small-cpu', 'grpo']" in following.python()
    assert "--preset small-cpu --preset grpo" in following.shell()

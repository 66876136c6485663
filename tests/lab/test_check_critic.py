"""`kedge evaluate --critic`: a finished critic is checked as it was during its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.cli import main
from kedge.config import config_from_settings
from kedge.stages.ppo import run_ppo
from kedge_base.errors import ConfigError, KedgeError
from kedge_base.run_folder.record_format import CRITIC_CHECKS_FILE, read_json_lines
from kedge_inspect.doctor import examine
from kedge_inspect.page.checks import critic
from kedge_inspect.page.verdict import describe_run
from kedge_inspect.record import read_run
from kedge_lab.check_critic import PROMPTS_AT_ONCE, run_check_critic
from tests.stages.ppo.test_critic_check import HELD_OUT, SETTINGS, vowels
from tests.stages.ppo.test_episodes import EPISODES
from tests.stages.ppo.test_ppo import PROMPTS, configure
from tests.tiny import save_tiny_policy, save_tiny_reward_model

CHECK = {"ppo.critic_check.size": [32, 2, 3], "runtime.report": False}


def check(out: Path, **settings: Any) -> dict[str, Any]:
    """The row of a check of a critic on the held-out prompts."""
    config = config_from_settings("evaluate", {**CHECK, "out": str(out), **settings})
    run_check_critic(config, prompts=HELD_OUT, reward=vowels)
    [row] = read_json_lines(out / CRITIC_CHECKS_FILE)
    return row


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    policy = save_tiny_policy(folder / "policy")
    trained = save_tiny_reward_model(folder / "critic", seed=3)
    runs: dict[str, dict[str, Any]] = {
        "shared": {"missing_eos_score": "auto"},
        "separate": {"critic_init": str(trained), "checkpoint.every": 1, "checkpoint.keep": 9},
        "adapter": {"critic_init": str(trained), "adapter": {"kind": "lora", "rank": 4}},
        "scheduled": {
            "reference": str(policy),
            "schedules": {
                "ppo.gamma": {1: 0.5},
                "ppo.kl_coef": {1: 0.1, 2: 0.0},
                "rollout.max_new_tokens": {1: 3},
                "rollout.temperature": {1: 0.5},
            },
        },
    }
    for name, more in runs.items():
        config = configure(policy, folder / name, **{**SETTINGS, "num_updates": 2, "critic_check": 1, **more})
        run_ppo(config, prompts=PROMPTS, eval_prompts=HELD_OUT, reward=vowels)
    return folder


@pytest.mark.parametrize(
    ("run", "name", "update"),
    [("shared", "shared", 2), ("separate", "separate@1", 1), ("adapter", "adapter", 2), ("scheduled", "scheduled", 2)],
)
def test_the_critic_of_a_run_is_checked_as_in_the_run(place, tmp_path, run, name, update):
    rows = {row["update"]: row for row in read_json_lines(place / run / CRITIC_CHECKS_FILE)}
    assert check(tmp_path / "check", critic=str(place / name)) == rows[update]


def test_with_another_reward_its_first_scores_set_the_penalty_for_no_stop_token(place, tmp_path):
    """The run's reward is a function, with which `auto` is no penalty, so no checkpoint has one."""
    settings = {"critic": str(place / "shared"), "reward": str(place / "critic"), "out": str(tmp_path / "check")}
    result = run_check_critic(config_from_settings("evaluate", {**CHECK, **settings}), prompts=HELD_OUT)
    assert result.test.num_prefixes > 0


def test_the_python_function_is_the_same_and_says_where_its_files_are(place, tmp_path, capsys):
    out, settings = tmp_path / "check", {**CHECK, "runtime.report": True}
    result = kedge.check_critic(critic=place / "shared", prompts=HELD_OUT, reward=vowels, out=out, **settings)
    last = "".join(capsys.readouterr().err.splitlines(keepends=True)[-2:])
    assert last == f"Result: {out / 'summary.json'}\nReport: {out / 'report.html'}\n"
    row = read_json_lines(place / "shared" / CRITIC_CHECKS_FILE)[-1]
    assert result.summary["pairs_across"] == row["pairs_across"]
    assert f"The critic of {place / 'shared'} was checked" in repr(result)


def test_a_trained_critic_is_checked_as_at_the_start_of_ppo(place, tmp_path):
    ours = {name: value for name, value in SETTINGS.items() if not name.startswith(("critic", "ppo.critic", "missing"))}
    settings = {f"ppo.{name}": value for name, value in ours.items()}
    settings |= {"rollout.max_new_tokens": 8, "rollout.missing_eos_score": -2.0, "model": str(place / "policy")}
    found = check(tmp_path / "check", critic=str(place / "critic"), **settings)
    assert found == read_json_lines(place / "separate" / CRITIC_CHECKS_FILE)[0]
    record = read_run(tmp_path / "check")
    assert critic(record)["figures"][0]["critic"]["value"] == pytest.approx(found["pairs_across"]["value"], rel=1e-4)
    assert describe_run(record)[0].startswith("The critic of ")
    assert not [gap for gap in examine(record).gaps if not gap.rule.startswith("critic")]


def test_prompts_that_the_reward_leaves_out_do_not_end_the_check(tmp_path):
    policy = save_tiny_policy(tmp_path / "policy")
    trained = save_tiny_reward_model(tmp_path / "critic", seed=3)
    others = [f"Riddle {number}" for number in range(PROMPTS_AT_ONCE)]  # all that are sampled first

    def some(prompts: list[str], completions: list[str]) -> list[float | None]:
        pairs = zip(prompts, completions, strict=True)
        return [None if prompt in others else len(text) / 20 for prompt, text in pairs]

    given: dict[str, Any] = {"critic": trained, "model": policy, "reward": some, "rollout.max_new_tokens": 8, **CHECK}
    result = kedge.check_critic(prompts=[*others, *HELD_OUT], out=tmp_path / "check", **given)
    assert result.test.num_prompts == len(HELD_OUT)
    with pytest.raises(KedgeError, match="enough scored continuations"):
        kedge.check_critic(prompts=others, out=tmp_path / "none", **given)


def test_the_critic_of_a_run_of_episodes_is_refused(place, tmp_path):
    run_ppo(configure(place / "policy", tmp_path / "played", num_updates=1, **EPISODES), prompts=PROMPTS)
    assert "an episode" in refused(critic=str(tmp_path / "played"))


def refused(**settings: Any) -> str:
    with pytest.raises(KedgeError) as error:
        run_check_critic(config_from_settings("evaluate", settings), prompts=HELD_OUT)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_reward_without_a_critic_is_refused(monkeypatch, capsys):
    flags = ["--model", "m", "--prompts", "Once upon a time", "--judge", "j", "--reward", "r"]
    monkeypatch.setattr("sys.argv", ["kedge", "evaluate", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "--reward needs --critic; policies are scored by --judge" in capsys.readouterr().err


def test_what_cannot_be_checked_is_refused_in_one_line(place, tmp_path):
    small = {"num_updates": 1, "num_epochs": 1, "advantage": "to_go"}
    run_ppo(configure(place / "policy", tmp_path / "free", **small), prompts=PROMPTS, reward=vowels)
    assert "the run has no critic (ppo.advantage=to_go)" in refused(critic=str(tmp_path / "free"))
    critic = str(place / "critic")
    assert "pass model=, or set" in refused(critic=critic)
    assert "pass reward=, or set" in refused(critic=critic, model=str(place / "policy"))
    assert "that run's policy" in refused(critic=str(place / "shared"), model=str(place / "policy"))
    assert "no checkpoint of update 7" in refused(critic=str(place / "shared@7"))
    assert "an episode" in refused(critic=critic, environment="game.py:Guess")
    with pytest.raises(ConfigError, match=r"leave out evaluate\.judge"):
        config_from_settings("evaluate", {"critic": critic, "judge": "judge.py:better"})

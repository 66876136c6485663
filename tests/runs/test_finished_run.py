"""A finished run is returned for its own settings, data and models only."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.config import Config, config_from_settings
from kedge.runs.run import Resume
from kedge.stages.ppo import run_ppo
from kedge.stages.reward import run_reward
from kedge.stages.rlhf import RlhfResult, run_rlhf
from kedge.stages.sft import run_sft
from kedge_base.errors import ConfigError, DataError
from tests.forking import forked_kedge
from tests.runs.test_refused_resume import PAIRS, RL, ROWS, contents, length
from tests.stages.ppo.test_ppo import PROMPTS, configure
from tests.tiny import save_tiny_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, policy: Path) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run_ppo(configure(policy, folder), prompts=PROMPTS, reward=length)
    return folder


def other(completions: list[str], **_: Any) -> list[float]:
    return [100.0 for _ in completions]


@pytest.mark.parametrize(
    ("settings", "objects", "said"),
    [
        ({"learning_rate": 1e-2}, {}, r"ppo\.learning_rate: 0\.001 in the run, 0\.01 now"),
        ({"model": "MODEL"}, {}, r"model: \S+ in the run, \S+ now"),
        ({}, {"reward": other}, r"reward\[0\]\.source: python:length in the run, python:other now"),
        ({}, {"prompts": PROMPTS[::-1]}, r"data\.prompts: the files have changed"),
        ({"seed": 7, "num_updates": 1}, {}, r"runtime\.seed: 0 in the run, 7 now"),
    ],
)
def test_another_run_is_not_answered_with_its_result(
    settings: dict[str, Any], objects: dict[str, Any], said: str, finished: Path, policy: Path, tmp_path: Path
) -> None:
    if "model" in settings:
        settings = {"model": str(shutil.copytree(policy, tmp_path / "other"))}
    config = configure(policy, finished, **settings)
    with pytest.raises(ConfigError, match=rf"has finished, with other settings \({said}"):
        run_ppo(config, **{"prompts": PROMPTS, "reward": length, **objects}, resume=Resume(("ppo", "runtime")))


def test_the_same_run_is_and_one_that_was_shorter_or_is_of_an_earlier_version(finished, policy, tmp_path):
    before = contents(finished)
    for num_updates in (2, 1):
        config = configure(policy, finished, num_updates=num_updates)
        result = run_ppo(config, prompts=PROMPTS, reward=length, resume=Resume())
        assert [row["update"] for row in result.metrics] == [1, 2]
    assert contents(finished) == before
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    ending = json.loads((run / "finished.json").read_text())
    assert ending.pop("inputs").keys() == {"model", "data.prompts", "reward.code"}
    (run / "finished.json").write_text(json.dumps(ending))
    run_ppo(configure(policy, run), prompts=PROMPTS[::-1], reward=length, resume=Resume())
    (run / "finished.json").write_text("{")
    with pytest.raises(DataError, match=r"finished\.json is damaged \(stage is missing\)"):
        run_ppo(configure(policy, run, num_updates=3), prompts=PROMPTS, reward=length, resume=Resume())


def test_a_run_of_another_stage_is_named(policy: Path, tmp_path: Path) -> None:
    settings = {"model": str(policy), "out": str(tmp_path / "run"), "report": False}
    run_sft(config_from_settings("sft", settings), demonstrations=ROWS)
    with pytest.raises(ConfigError, match="run is a run of kedge sft, not of reward"):
        run_reward(config_from_settings("reward", settings), comparisons=PAIRS, resume=Resume())


def test_environments_from_python_are_not_compared_but_other_settings_of_control_are(tmp_path: Path) -> None:
    import gymnasium

    def play(**settings: Any) -> Any:
        given = {"env": lambda: gymnasium.make("CartPole-v1"), "total_steps": 64, "num_steps": 32, "num_envs": 2}
        return kedge.control(out=tmp_path / "run", report=False, resume=True, **{**given, **settings})

    assert play().metrics == play().metrics
    with pytest.raises(ConfigError, match=r"control\.learning_rate"):
        play(learning_rate=1.0)
    with pytest.raises(ConfigError, match=r"control\.env"):
        play(env="Acrobot-v1")


def test_a_run_that_ended_early_names_the_limit_that_extends_it(policy: Path, tmp_path: Path) -> None:
    """More updates would not: the run would end again at once."""
    (tmp_path / "r.py").write_text("def one(completions, **_):\n    return [len(text) / 10 for text in completions]\n")
    settings = [f"{name}={value}" for name, value in RL.items() if "." in name]
    command = ["ppo", "--model", policy, "--reward", "r.py:one", "--prompts", "prompts.jsonl", "--out", "run"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    limits = ["ppo.num_updates=3", "ppo.max_kl=1e-12", "ppo.learning_rate=0.01", "runtime.report=false"]
    ends = forked_kedge(*command, *settings, *limits, cwd=tmp_path)
    assert "above ppo.max_kl=1e-12" in ends.stderr
    again = forked_kedge(*command, *settings, *limits, "--resume", "auto", cwd=tmp_path)
    assert again.stdout == "run has finished: there is nothing to resume. To extend it, raise ppo.max_kl.\n"


def test_the_command_refuses_other_rewards_and_data(policy: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    (tmp_path / "r.py").write_text("def one(completions, **_):\n    return [len(text) / 10 for text in completions]\n")
    settings = [f"{name}={value}" for name, value in RL.items() if "." in name]
    command = ["ppo", "--model", policy, "--reward", "r.py:one", "--prompts", "prompts.jsonl", "--out", "run"]
    command += ["--resume", "auto", "ppo.num_updates=1", "runtime.report=false", *settings]

    def answered(*more: str) -> tuple[int, str]:
        done = forked_kedge(*command, *more, cwd=tmp_path)
        return done.returncode, done.stdout + done.stderr

    assert answered()[0] == 0
    code, said = answered()
    assert (code, "run has finished: there is nothing to resume" in said) == (0, True)
    (tmp_path / "r2.py").write_text((tmp_path / "r.py").read_text())
    for more, name in (
        (["--reward", "r2.py:one"], "reward[1].source: not set in the run, r2.py:one now"),
        (["data.max_prompt_tokens=9"], "data.max_prompt_tokens: "),
        (["ppo.clip_range=0.1", "--allow-changes", "ppo"], "ppo.clip_range: 0.2 in the run, 0.1 now"),
    ):
        code, said = answered(*more)
        assert (code, name in said) == (2, True), said
    prompts.write_text(prompts.read_text().replace("tide", "ebb"))
    code, said = answered()
    assert (code, "run has finished, with other settings (data.prompts: the files have changed" in said) == (2, True)


def chain_config(policy: Path, out: Path, **changes: Any) -> Config:
    settings = {name: value for name, value in RL.items() if name != "num_epochs"}
    given = {"model": str(policy), "out": str(out), "sft.batch_size": 3, "reward_model.batch_size": 3, "report": False}
    return config_from_settings("rlhf", {**given, **settings, **changes})


def test_a_chain_notices_data_that_changed_between_its_stages_and_settings_once_it_has_finished(
    policy: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    paths: dict[str, Any] = {}
    for name, rows in (("demonstrations", ROWS), ("comparisons", PAIRS), ("prompts", ROWS)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths[f"data.{name}"] = [str(path)]

    def fail(update: Any) -> None:
        if update.stage == "ppo":
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        run_rlhf(chain_config(policy, run, **paths), callback=fail)
    for path in (tmp_path / "run/ppo/checkpoints").glob("*"):  # as if it had failed in its first update
        shutil.rmtree(path)
    before = contents(run)
    original = (tmp_path / "demonstrations.jsonl").read_text()
    (tmp_path / "demonstrations.jsonl").write_text(original.replace("Aye", "Nay"))
    with pytest.raises(ConfigError, match=r"sft has finished, with other settings \(data\.demonstrations: the files"):
        run_rlhf(chain_config(policy, run, **paths), resume=Resume())
    assert contents(run) == before
    (tmp_path / "demonstrations.jsonl").write_text(original)
    made = run_rlhf(chain_config(policy, run, **paths), resume=Resume())
    longer = chain_config(policy, run, **{**paths, "num_updates": 3})
    for allowed in ((), ("ppo.num_updates",)):
        with pytest.raises(ConfigError, match=r"has finished, with other settings \(ppo\.num_updates: 2 in the run, 3"):
            run_rlhf(longer, resume=Resume(allowed))
    read = run_rlhf(chain_config(policy, run, **paths), resume=Resume())
    assert isinstance(read, RlhfResult)
    assert vars(read) == vars(made)


def test_python_resumes_its_folder_and_can_let_fields_differ(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def train(**more: Any) -> Any:
        return kedge.ppo(model=str(policy), prompts=PROMPTS, reward=length, **{**RL, **more})

    def stop(update: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(resume=True, on_update=stop)
    with pytest.raises(ConfigError, match=r"If this is intended: resume=\['ppo\.learning_rate'\]$"):
        train(resume=True, learning_rate=1e-3)
    with pytest.raises(ConfigError, match=r"resume=\['ppo\.learning_rat'\]: there is no such field .* did you mean"):
        train(resume=["ppo.learning_rat"], learning_rate=1e-3)
    result = train(resume=["ppo.learning_rate"], learning_rate=1e-3)
    assert (result.folder, len(result.metrics)) == (Path("runs/ppo"), 2)
    first = RL.get("learning_rate", kedge.config.Config().ppo.learning_rate)
    changed = f"# changed: after update 1 ppo.learning_rate from {first!r} to 0.001"
    assert changed in (result.folder / "config.yaml").read_text().splitlines()
    card = (Path(result.model) / "README.md").read_text()
    assert changed.replace("changed:", "changed during the run:") in card.splitlines()
    longer = train(resume=["ppo.learning_rate"], learning_rate=1e-3, num_updates=3)
    assert f"{changed}; after update 2 ppo.num_updates from 2 to 3" in (longer.folder / "config.yaml").read_text()
    assert [path.name for path in Path("runs").iterdir()] == ["ppo"]
    assert train().folder == Path("runs/ppo-2")
    done = forked_kedge("ppo", "--resume", "runs/ppo", "ppo.num_updates=4", cwd=tmp_path)
    assert (done.returncode, "data.prompts was given from Python, or as text" in done.stderr) == (2, True), done.stderr


def test_a_model_that_is_older_than_a_checkpoint_of_its_unfinished_run_is_announced(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if the run had been made longer, and killed after another update."""
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    shutil.copytree(run / "checkpoints/update-000002", run / "checkpoints/update-000003")
    os.utime(run / "checkpoints/update-000003", (2_000_000_000, 2_000_000_000))
    said = f"{run} has not finished, and its model is older than its checkpoint of update 3, which {run}@3 names"

    def generate(out: str, model: str) -> str:
        kedge.generate(model=model, prompts=PROMPTS[:1], out=tmp_path / out, max_new_tokens=2, report=False)
        return capsys.readouterr().err

    assert said not in generate("finished", str(run))
    (run / "finished.json").unlink()
    assert generate("named", str(run)).count(said) == 1
    assert generate("folder", f"{run}/model").count(said) == 1
    assert said not in generate("checkpoint", f"{run}@2")
    os.utime(run / "model", (2_000_000_001, 2_000_000_001))  # as after Ctrl-C, which saves the model last
    assert said not in generate("interrupted", str(run))

"""A resume that is refused, however late, leaves the run's folder as it was, byte for byte."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kedge.config import Config, config_from_settings
from kedge.runs.run import Resume
from kedge.stages.critic import run_critic
from kedge.stages.ppo import run_ppo
from kedge.stages.reward import run_reward
from kedge.stages.rlhf import run_rlhf
from kedge.stages.sft import run_sft
from kedge.training.checkpoint import state
from kedge_base.errors import DataError, KedgeError, ModelError
from kedge_control.stage.run import run_control
from tests.control.test_runs import SMALL, UPDATE
from tests.stages.ppo.test_ppo import PROMPTS
from tests.tiny import save_tiny_policy

ROWS = [{"prompt": f"Deck {number}:", "completion": f" Aye, {number}."} for number in range(6)]
PAIRS = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " rope rope"} for row in ROWS]


def length(completions: list[str], **_: Any) -> list[float]:
    return [len(text) / 10 for text in completions]


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file of a folder, and its folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@dataclass(frozen=True)
class Stage:
    """How a test runs a stage.

    Attributes:
        run: Runs it from a configuration.
        settings: Its settings.
        longer: Settings that make it longer.
    """

    run: Callable[..., object]
    settings: dict[str, Any]
    longer: dict[str, Any]


SUPERVISED = {"batch_size": 3, "num_epochs": 1}
RL = {
    "num_updates": 2, "rollout.num_prompts": 4, "rollout.max_new_tokens": 6, "num_minibatches": 2, "num_epochs": 1,
    "num_fixed_prompts": 0,
}  # fmt: skip
STAGES = {
    "sft": Stage(partial(run_sft, demonstrations=ROWS), SUPERVISED, {"num_epochs": 2}),
    "reward": Stage(partial(run_reward, comparisons=PAIRS), SUPERVISED, {"num_epochs": 2}),
    "critic": Stage(
        partial(run_critic, prompts=PROMPTS, reward=length),
        {"critic.batch_size": 3, "critic.num_epochs": 1, "critic.kind": "separate", "rollout.max_new_tokens": 6},
        {"critic.num_epochs": 2},
    ),
    "ppo": Stage(partial(run_ppo, prompts=PROMPTS, reward=length), RL, {"num_updates": 3}),
    "control": Stage(
        run_control, {**SMALL, "control.env": "CartPole-v1", "total_steps": 2 * UPDATE}, {"total_steps": 3 * UPDATE}
    ),
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, policy: Path) -> Callable[[str], Path]:
    """A finished run of a stage, made once."""
    folder = tmp_path_factory.mktemp("finished")

    def run(name: str) -> Path:
        if not (folder / name).exists():
            STAGES[name].run(configured(name, policy, folder / name))
        return folder / name

    return run


def configured(name: str, policy: Path, out: Path, **changes: Any) -> Config:
    stage = STAGES[name]
    model = {} if name == "control" else {"model": str(policy)}
    return config_from_settings(name, {"report": False, **model, **stage.settings, **changes, "out": str(out)})


LORA = {"adapter.kind": "lora"}


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("sft", LORA, ModelError, "do not match the model"),
        ("reward", LORA, ModelError, "do not match the model"),
        ("critic", LORA, ModelError, "do not match the model"),
        ("ppo", LORA, ModelError, "do not match the model"),
        ("ppo", {"ppo.critic": "separate"}, ModelError, "do not match the model"),
        ("control", {"control.hidden_sizes": [8]}, ModelError, "do not match the model"),
        ("control", {"control.memory_size": 4, "control.critic": "shared"}, ModelError, "do not match the model"),
        ("control", {"control.env": "Acrobot-v1"}, ModelError, "do not match the model"),
        ("control", {"control.num_envs": 4}, DataError, "has the episodes of 2 environments, but control.num_envs=4"),
    ],
)
def test_a_refused_resume_changes_nothing(
    name: str,
    changes: dict[str, Any],
    error: type[KedgeError],
    message: str,
    finished: Callable[[str], Path],
    policy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Path(shutil.copytree(finished(name), tmp_path / "run"))
    before = contents(run)
    assert {"finished.json", "config.yaml", "model"} <= before.keys()
    config = configured(name, policy, run, **{**STAGES[name].longer, **changes})
    capsys.readouterr()
    with pytest.raises(error, match=message):
        STAGES[name].run(config, resume=Resume(tuple(changes)))
    assert contents(run) == before
    assert "Resume:" not in capsys.readouterr().err  # with those settings it would be refused again


def test_other_prompts_and_a_damaged_log_are_refused_before_anything_changes(finished, policy, tmp_path):
    run = Path(shutil.copytree(finished("ppo"), tmp_path / "run"))
    before = contents(run)
    longer = configured("ppo", policy, run, num_updates=3)
    with pytest.raises(DataError, match="6 prompts"):
        run_ppo(longer, prompts=PROMPTS[:4], reward=length, resume=Resume(("data.prompts",)))
    assert contents(run) == before

    (run / "samples.jsonl").write_bytes(b"{}\n" + (run / "samples.jsonl").read_bytes())
    before = contents(run)
    with pytest.raises(DataError, match="line 1: not a row with an update"):
        STAGES["ppo"].run(longer, resume=Resume())
    assert contents(run) == before


@pytest.mark.parametrize("name", [*STAGES])
def test_a_run_that_is_interrupted_or_killed_before_it_is_restored_loses_nothing(
    name: str, finished: Callable[[str], Path], policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(finished(name), tmp_path / "run"))
    before = contents(run)
    longer = configured(name, policy, run, **STAGES[name].longer)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(state, "restore_random_state", interrupt)  # the last that is restored
        with pytest.raises(KeyboardInterrupt):
            STAGES[name].run(longer, resume=Resume())
        assert contents(run) == before

        patch.setattr(state, "restore_random_state", lambda *_: os._exit(9))
        if (process := os.fork()) == 0:
            STAGES[name].run(longer, resume=Resume())
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9
    # The trial of saving the model leaves files with temporary names, which the next start removes.
    left = {path: content for path, content in contents(run).items() if not path.startswith(".")}
    assert left == before
    STAGES[name].run(longer, resume=Resume())
    assert contents(run)["finished.json"] != before["finished.json"]


def test_a_chain_whose_stage_is_refused_stays_as_it_is(policy: Path, tmp_path: Path) -> None:
    settings = {
        "model": str(policy), "out": str(tmp_path / "run"), "sft.batch_size": 3, "reward_model.batch_size": 3, **RL,
        "ppo.num_epochs": 1, "report": False,
    }  # fmt: skip
    settings.pop("num_epochs")

    def chain(resume: Resume | None = None, callback: Any = None, **changes: Any) -> None:
        config = config_from_settings("rlhf", {**settings, **changes})
        run_rlhf(config, demonstrations=ROWS, comparisons=PAIRS, prompts=PROMPTS, resume=resume, callback=callback)

    def stop(update: Any) -> None:
        if update.stage == "ppo":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chain(callback=stop)
    shutil.rmtree(tmp_path / "run" / "model")  # as if it had been killed
    before = contents(tmp_path / "run")
    with pytest.raises(ModelError, match="do not match the model"):
        chain(Resume(("adapter",)), **LORA)
    assert contents(tmp_path / "run") == before
    chain(Resume())
    assert (tmp_path / "run/model").is_dir()

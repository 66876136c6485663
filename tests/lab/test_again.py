"""`kedge verify RUN --update`: updates that are made again are the same to the bit, or what differs is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kedge
from kedge.config import config_from_settings
from kedge.runs import receipt
from kedge.runs.run import Resume
from kedge.runs.training import Update
from kedge.stages.critic import run_critic
from kedge.stages.ppo import run_ppo
from kedge.stages.reward import run_reward
from kedge.stages.sft import run_sft
from kedge_base.command import Group, new_app
from kedge_base.errors import ConfigError, DataError
from kedge_base.run_folder.output import checkpoint_folder, kept_checkpoints
from kedge_inspect.api import verify
from kedge_inspect.commands import add_commands
from kedge_inspect.verify import verify_run
from kedge_lab.again import make_again
from tests.stages.ppo.test_episodes import EPISODES, GAMES
from tests.stages.ppo.test_ppo import PROMPTS, REWARD, configure, vowels
from tests.stages.test_critic import settings as critic_settings
from tests.stages.test_resume import PAIRS, ROWS
from tests.tiny import save_tiny_policy

KEEP = {"checkpoint.keep": 100}
SUPERVISED = {"batch_size": 2, "num_epochs": 2, "checkpoint.every": 2, "data.eval_fraction": 0, "report": False, **KEEP}
ONLINE = {"prompts": PROMPTS, "reward": vowels}
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sft": ("sft", SUPERVISED, {"demonstrations": ROWS}),
    "reward": ("reward", SUPERVISED, {"comparisons": PAIRS}),
    "critic": ("critic", {"checkpoint.every": 2, "num_epochs": 4}, {"prompts": PROMPTS, "reward": vowels}),
    "head": ("ppo", {"checkpoint.every": 3, "ppo.eval_every": 2}, {**ONLINE, "eval_prompts": GAMES}),
    "separate": ("ppo", {"checkpoint.every": 2, "critic": "separate"}, ONLINE),
    "ahead": ("ppo", {"checkpoint.every": 2, "max_staleness": 1}, ONLINE),
    "episodes": ("ppo", {"checkpoint.every": 2, **EPISODES}, {"prompts": GAMES}),
}
"""Stage, settings and Python objects of each kind of run."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


def train(
    kind: str, policy: Path, out: Path, *, num_updates: int = 6, stops_at: int = 0, resume: Resume | None = None
) -> dict[str, Any]:
    """Train a run, and return the Python objects that it was given."""
    stage, settings, objects = RUNS[kind]
    if stage == "ppo":
        config = configure(policy, out, num_updates=num_updates, **KEEP, **settings)
    elif stage == "critic":
        config = config_from_settings(stage, critic_settings(policy, out, **KEEP, **settings))
    else:
        config = config_from_settings(stage, {"model": str(policy), "out": str(out), **settings})

    def stop(update: Update) -> None:
        if update.number == stops_at:
            raise InterruptedError

    run = {"sft": run_sft, "reward": run_reward, "critic": run_critic, "ppo": run_ppo}[stage]
    run(config, **objects, callback=stop, resume=resume)
    return objects


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", RUNS)
def test_every_update_is_made_again_to_the_bit(tmp_path, policy, kind):
    run = tmp_path / "run"
    every = RUNS[kind][1]["checkpoint.every"]
    objects = train(kind, policy, run, num_updates=2 * every)
    before = files_of(tmp_path)
    first = next(filter(None, kept_checkpoints(run)))
    number = len((run / "metrics.jsonl").read_text().splitlines())
    assert (first, number >= 2 * every) == (every, True)
    for update in (1, *range(every + 1, 2 * every + 1)):
        faults, summary = make_again(run, update, **objects)
        assert faults == []
        assert summary.endswith(": metrics and weights are the same to the bit"), summary
        assert ("again from the start" in summary) is (update <= first)
    assert files_of(tmp_path) == before
    with pytest.raises(DataError, match=rf"update {number + 1} can be made again; updates 1 to {number} can"):
        make_again(run, number + 1, **objects)


def test_updates_after_a_resume_and_before_are_made_again(tmp_path, policy):
    run = tmp_path / "run"
    with pytest.raises(InterruptedError):
        train("separate", policy, run, stops_at=3)
    objects = train("separate", policy, run, resume=Resume())
    assert verify_run(run)[0] == []
    made = {2: "updates 1 to 2 made", 3: "update 3 made", 4: "update 4 made", 6: "updates 5 to 6 made"}
    for update, beginning in made.items():
        faults, summary = make_again(run, update, **objects)
        assert not faults
        assert summary.startswith(beginning)
    shutil.rmtree(checkpoint_folder(run, 2))  # as checkpoint.keep does
    shutil.rmtree(checkpoint_folder(run, 3))
    with pytest.raises(DataError, match="update 4 can be made again; updates 1 to 3 and 5 to 6 can"):
        make_again(run, 4, **objects)


def test_an_update_is_made_again_with_the_settings_that_it_was_made_with(tmp_path, policy):
    settings = {"checkpoint.every": 1, "schedule": "linear", **KEEP}
    run_ppo(configure(policy, tmp_path / "run", num_updates=3, **settings), **ONLINE)
    run_ppo(configure(policy, tmp_path / "run", num_updates=5, **settings), resume=Resume(), **ONLINE)
    for update in (2, 3, 4, 5):
        assert make_again(tmp_path / "run", update, **ONLINE)[0] == []


def test_control_is_made_again(tmp_path):
    small = {"num_steps": 64, "num_envs": 2, "num_minibatches": 4, "num_epochs": 2, "report": False}
    kedge.control(env="CartPole-v1", out=tmp_path / "run", total_steps=512, **small, **KEEP, **{"checkpoint.every": 1})
    for update in (2, 4):
        faults, summary = make_again(tmp_path / "run", update)
        assert not faults
        assert summary.endswith("to the bit")


def forge(run: Path, policy: Path, change) -> None:
    """Change the first row after the checkpoint of update 2, and have a receipt that says that this was so."""
    objects = RUNS["separate"][2]
    write = receipt.Receipt.add

    def add(self: receipt.Receipt, update: int, *, saved: bool = False) -> None:
        if update == 3 and not saved:
            change(run, self)
        write(self, update, saved=saved)

    receipt.Receipt.add = add
    try:
        run_ppo(configure(policy, run, num_updates=4, **KEEP, **RUNS["separate"][1]), **objects)
    finally:
        receipt.Receipt.add = write


def other_score(run: Path, receipt: receipt.Receipt) -> None:
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[-1]["reward/score_mean"] += 0.5
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def other_rows(run: Path, receipt: receipt.Receipt) -> None:
    receipt.trained = "0" * 64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_score, "update 3: reward/score_mean differs by "),
        (other_rows, "update 3: responses and rewards differs"),
    ],
)
def test_what_the_receipt_cannot_show_is_found_by_making_the_update_again(tmp_path, policy, change, said):
    run = tmp_path / "run"
    forge(run, policy, change)
    assert verify_run(run)[0] == []
    [fault], summary = make_again(run, 3, **ONLINE)
    assert fault.startswith(said)
    assert "differ by at most" in summary


@pytest.mark.parametrize(("rate", "fine"), [(0.0, True), (1e-6, True), (0.2, False)])
def test_on_another_machine_differences_are_measured(tmp_path, policy, monkeypatch, rate, fine):
    run = tmp_path / "run"
    run_ppo(configure(policy, run, num_updates=4, **{"checkpoint.every": 2}), prompts=PROMPTS, reward=scaled)
    elsewhere = receipt.machine_of
    monkeypatch.setattr(receipt, "machine_of", lambda run: {**elsewhere(run), "processor": "another"})
    monkeypatch.setitem(FACTOR, "now", 1 + rate)
    faults, summary = make_again(run, 3, prompts=PROMPTS, reward=scaled)
    assert bool(faults) is not fine
    if rate:
        assert "processor another, not " in summary
        assert ", weights by " in summary
    else:
        assert summary.endswith("to the bit")


FACTOR = {"now": 1.0}


def scaled(completions: list[str], **_: object) -> list[float]:
    return [FACTOR["now"] * each for each in vowels(completions)]


def test_changed_inputs_and_settings_are_one_line(tmp_path, policy):
    (tmp_path / "reward.py").write_text(REWARD)
    run = tmp_path / "run"
    settings = {"reward": f"{tmp_path}/reward.py:vowels", "checkpoint.every": 1}
    run_ppo(configure(policy, run, num_updates=3, **settings), prompts=PROMPTS)
    assert make_again(run, 3, prompts=PROMPTS)[0] == []
    with pytest.raises(ConfigError, match=r"data\.prompts was given from Python"):
        make_again(run, 3)
    (tmp_path / "reward.py").write_text(REWARD.replace("10", "20"))
    with pytest.raises(ConfigError, match="reward: the files have changed"):
        make_again(run, 3, prompts=PROMPTS)


def test_from_python_with_the_objects_that_the_run_was_given(tmp_path, policy, monkeypatch):
    run = tmp_path / "run"
    result = run_ppo(configure(policy, run, num_updates=3, **{"checkpoint.every": 1}), prompts=PROMPTS, reward=scaled)
    monkeypatch.setattr("kedge_inspect.api.service", {"again": make_again}.__getitem__)
    [(folder, (differences, summary))] = verify(result, update=3, prompts=PROMPTS, reward=scaled).items()
    assert (folder, differences) == (run, [])
    assert "made again" in summary
    (run / "roles.json").write_text("{}")
    [(differences, summary)] = verify(str(run), update=3, prompts=PROMPTS, reward=scaled).values()
    assert differences == ["roles.json was changed"]
    assert "made again" not in summary


def test_the_command(tmp_path, policy, monkeypatch):
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in PROMPTS))
    run = tmp_path / "run"
    named = {"reward": f"{tmp_path}/reward.py:vowels", "prompts": [str(tmp_path / "prompts.jsonl")]}
    run_ppo(configure(policy, run, num_updates=3, **named, **{"checkpoint.every": 1}))
    monkeypatch.setattr("kedge_inspect.api.service", {"again": make_again}.__getitem__)
    app = new_app(Group)
    add_commands(app)

    def verify(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["verify", *map(str, arguments)])
        return result.exit_code, result.output

    code, output = verify(run, "--update", 3)
    assert code == 0
    assert "update 3 made again from the checkpoint of update 2: metrics and weights are the same to the bit" in output
    (run / "roles.json").write_text("{}")
    code, output = verify(run, "--update", 3)
    assert code == 1
    assert "roles.json was changed" in output
    assert "made again" not in output

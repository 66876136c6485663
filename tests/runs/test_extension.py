"""A finished run can be made longer; with a constant schedule it is one that was that long from the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kedge.config import Config, config_from_settings, load_config
from kedge.runs.resuming import describe_extension, finished_run
from kedge.runs.run import Resume
from kedge.stages.ppo import run_ppo
from kedge.stages.sft import run_sft
from kedge_base.errors import ConfigError
from kedge_base.stage import find_stage
from tests.control.test_runs import play, untimed
from tests.stages.ppo.test_ppo import PROMPTS, configure, metrics_without_times
from tests.tiny import save_tiny_policy

ROWS = [{"prompt": f"Deck {number}:", "completion": f" Aye, {number}."} for number in range(6)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


def length(completions: list[str], **_: Any) -> list[float]:
    return [len(text) / 10 for text in completions]


def assert_same(extended: Path, whole: Path) -> None:
    assert metrics_without_times(extended) == metrics_without_times(whole)
    weights = "model/model.safetensors"
    assert (extended / weights).read_bytes() == (whole / weights).read_bytes()
    # A log that the run does not have is not created.
    assert {path.name for path in extended.iterdir()} == {path.name for path in whole.iterdir()}


def test_a_longer_ppo_run_is_the_same_to_the_bit_where_nothing_is_stretched(policy, tmp_path, capsys):
    def configured(name: str, num_updates: int, **more: Any) -> Config:
        return configure(policy, tmp_path / name, num_updates=num_updates, **{"schedule": "constant", **more})

    run_ppo(configured("whole", 3), prompts=PROMPTS, reward=length)
    run_ppo(configured("split", 2), prompts=PROMPTS, reward=length)
    assert finished_run(configured("split", 2)) == tmp_path / "split"
    assert finished_run(configured("split", 1)) == tmp_path / "split"
    run_ppo(configured("split", 3), prompts=PROMPTS, reward=length, resume=Resume())
    assert "The run continues after update 2, with bit-identical results" in capsys.readouterr().err
    assert_same(tmp_path / "split", tmp_path / "whole")
    assert json.loads((tmp_path / "split/finished.json").read_text())["updates"] == 3
    with pytest.raises(ConfigError, match=r"ppo\.learning_rate: 0\.001 in the run"):
        run_ppo(configured("split", 4, learning_rate=2e-3), prompts=PROMPTS, reward=length, resume=Resume())
    assert (tmp_path / "split/finished.json").is_file()


def test_more_epochs_of_sft_are_the_same_to_the_bit(policy, tmp_path):
    def configured(name: str, num_epochs: int) -> Config:
        settings = {"sft.batch_size": 3, "sft.num_epochs": num_epochs, "sft.schedule": "constant", "report": False}
        held_out = {"data.eval_fraction": 0.0}
        return config_from_settings("sft", {"model": str(policy), "out": str(tmp_path / name), **settings, **held_out})

    run_sft(configured("whole", 2), demonstrations=ROWS)
    run_sft(configured("split", 1), demonstrations=ROWS)
    result = run_sft(configured("split", 2), demonstrations=ROWS, resume=Resume())
    assert result.num_steps == 4
    assert_same(tmp_path / "split", tmp_path / "whole")


@pytest.mark.parametrize("settings", [{"schedule": "constant", "compile": False}, {}])
def test_a_longer_control_run(settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play(tmp_path / "split", updates=2, **settings)
    longer = play(tmp_path / "split", updates=4, resume=True, **settings)
    said = capsys.readouterr().err
    assert [row["update"] for row in longer.metrics] == [1, 2, 3, 4]
    if settings:
        assert "The run continues after update 2, with bit-identical results" in said
        assert untimed(longer) == untimed(play(tmp_path / "whole", updates=4, **settings))
    else:
        assert (
            "Stretched to the new length: the linear decay of the learning rate, the decision of control.compile=auto"
            in said
        )


def test_without_its_last_state_a_run_cannot_be_extended(policy, tmp_path):
    config = configure(policy, tmp_path / "run", num_updates=1, **{"checkpoint.keep_last": False})
    run_ppo(config, prompts=PROMPTS, reward=length)
    longer = configure(policy, tmp_path / "run", num_updates=2)
    with pytest.raises(ConfigError, match=r"finished after update 1, but no checkpoint was kept \(checkpoint"):
        run_ppo(longer, prompts=PROMPTS, reward=length, resume=Resume())
    assert (tmp_path / "run/finished.json").is_file()


def test_what_is_stretched_is_said():
    settings = [
        "ppo.num_updates=60",
        "ppo.learning_rate=6e-5",
        "ppo.kl_controller=ziegler",
        "ppo.schedule={linear: 0.1}",
        "rollout.max_staleness=1",
    ]
    said = describe_extension(load_config(None, settings), find_stage("ppo"), 40)
    assert "the linear decay of the learning rate, its warm-up, the KL controller's horizon, sampling ahead." in said
    assert "not that of a run that was this long" in said
    raised = describe_extension(
        load_config(None, settings), find_stage("ppo"), 40, is_longer=False
    )  # only ppo.max_kl, say
    assert raised.startswith("The run continues after update 40, with bit-identical results")
    settings = ["ppo.schedule=constant", "ppo.eval_every=4", "ppo.num_updates=60"]
    changed = describe_extension(load_config(None, settings), find_stage("ppo"), 40, changes=["ppo.kl_coef"])
    assert changed == (
        "The run continues after update 40. Allowed to change: ppo.kl_coef. The result is not that of a run that was "
        "this long from the start."
    )
    for every in ("4", "{updates: 4, num_prompts: 9}"):
        config = load_config(None, [*settings, f"ppo.eval_every={every}"])
        assert "the evaluation after update 42 is an additional one" in describe_extension(
            config, find_stage("ppo"), 42
        )
        assert "additional" not in describe_extension(config, find_stage("ppo"), 40)


@pytest.mark.parametrize("stage", ["sft", "reward", "critic"])
@pytest.mark.parametrize(
    ("fraction", "ends"), [(0.1, "rows; the evaluations so far were at other steps"), (0, "rows.")]
)
def test_evaluations_are_spread_over_the_length_of_a_supervised_run(stage, fraction, ends):
    section = {"reward": "reward_model"}.get(stage, stage)
    config = load_config(None, [f"{section}.schedule=constant", f"data.eval_fraction={fraction}"])
    said = describe_extension(config, find_stage(stage), 6)
    assert said.startswith("The run continues after step 6, with bit-identical results as if")
    assert ends in said

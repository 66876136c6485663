"""A run that was stopped and resumed is bit-identical to an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.config import Config, config_from_settings, load_config
from kedge.logs.json_lines import MetricsLog
from kedge.runs import resuming
from kedge.runs.run import Resume, resumed
from kedge.stages.ppo import guarding, run_ppo
from kedge.stages.reward import run_reward
from kedge.stages.rlhf import run_rlhf
from kedge.stages.sft import run_sft
from kedge.training import controllers
from kedge.training.checkpoint.store import newest_valid
from kedge.training.runtime import Terminated
from kedge_base.errors import ConfigError, DataError, ModelError, OutputError
from kedge_base.machine.durable import is_part
from kedge_base.run_folder.record_format import read_json_lines
from tests.forking import fork_context, forked_kedge, started_kedge
from tests.stages.ppo.test_ppo import PROMPTS, configure, metrics_without_times
from tests.tiny import save_tiny_policy, save_tiny_reward_model

ROWS = [{"prompt": f"Deck {number}:", "completion": f" Aye, {number}."} for number in range(10)]
PAIRS = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " rope rope"} for row in ROWS]
MUON = "muon" if hasattr(torch.optim, "Muon") else "adafactor"
DRAWS = """
import random

def noisy(completions, seed, **_):
    draw = random.Random(seed)
    return [len(text) / 20 + draw.random() + random.random() for text in completions]
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return save_tiny_reward_model(tmp_path_factory.mktemp("models") / "reward", seed=3)


@pytest.fixture
def stop_at(monkeypatch):
    """Send this very process SIGTERM as it writes a stage's metrics of one step: a scheduler that takes the machine."""

    def arrange(folder: Path, step: int) -> None:
        write = MetricsLog.write

        def written(log: MetricsLog, update: int, metrics: Any) -> None:
            write(log, update, metrics)
            if update == step and Path(log._lines._file.name).parent == folder:
                monkeypatch.setattr(MetricsLog, "write", write)
                os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(MetricsLog, "write", written)

    return arrange


def model_bytes(folder: Path) -> dict[str, bytes]:
    """Every weight that a run leaves."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("model/*.safetensors"))}


def assert_same(resumed: Path, whole: Path) -> None:
    assert metrics_without_times(resumed) == metrics_without_times(whole)
    assert model_bytes(resumed) == model_bytes(whole) != {}
    for name in ("samples.jsonl", "details.jsonl"):
        if (whole / name).exists():
            assert (resumed / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize(
    "settings",
    [
        # Each resumes several states at once: a state that is lost changes the run.
        {
            "critic": "shared",
            "num_fixed_prompts": 3,
            "kl_controller": {"ziegler": {"horizon": 20, "target": 0.5, "wait": 0.0}},
        },
        {"critic": "separate", "adam_eps": {"tf1": 1e-5}, "value_loss": "hl_gauss", "num_critic_epochs": 2},
        {
            "policy_loss": "kl_penalty_adaptive",
            "score_at": "after_last",
            "num_responses": 2,
            "entropy_coef": 0.01,
            "entropy_target": 3.0,
            "value_warmup_updates": 3,
            "value_loss": "hl_gauss",
        },
        {"ppo.critic": {"readout": 3}, "num_responses": 2, "advantage": "rloo_critic", "num_minibatches": 1},
        {"critic": "readout", "value_warmup_updates": 2},
        {"critic": "frozen"},  # thawed after the second update
        # The second update explains 0.015: the warm-up ends after it.
        {
            "ppo.value_warmup_updates.until": 0.01,
            "value_warmup_updates": 4,
            "kl_controller": "schulman",
            "num_updates": 5,
        },
        {"kl_coef": 0.0, "precision": "bf16", "num_minibatches": 1},
        {
            "optimizer": MUON,
            "critic": "separate",
            "critic_learning_rate": 1e-3,
            "value_warmup_updates": 2,
            "kl_controller": "schulman",
            "on_spike": "skip",
        },
    ],
    ids=lambda settings: next(iter(settings)) + "=" + str(next(iter(settings.values()))),
)
def test_ppo_goes_on_to_the_bit(tmp_path, policy, stop_at, settings, monkeypatch):
    monkeypatch.setattr(guarding, "SPIKE_HISTORY", 2)
    monkeypatch.setattr(controllers, "BLIND_UPDATES", 2)
    (tmp_path / "reward.py").write_text(DRAWS)
    rewards = [f"{tmp_path / 'reward.py'}:noisy"]
    # Six prompts, four an update: the run stops in the middle of an epoch over them.
    whole, split = (configure(policy, tmp_path / name, **{"num_updates": 4, **settings}) for name in ("whole", "split"))
    run_ppo(whole, prompts=PROMPTS, reward=rewards)
    for stopped_after, resume in ((1, None), (3, Resume())):
        stop_at(tmp_path / "split", stopped_after)
        with pytest.raises(Terminated):
            run_ppo(split, prompts=PROMPTS, reward=rewards, resume=resume)
        assert len(metrics_without_times(tmp_path / "split")) == stopped_after
    run_ppo(split, prompts=PROMPTS, reward=rewards, resume=Resume())
    assert_same(tmp_path / "split", tmp_path / "whole")


def test_a_reward_model_and_pretraining_texts_go_on_as_well(tmp_path, policy, reward_model, stop_at):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"The tide {n}"}) + "\n" for n in range(9)))
    settings = {"num_updates": 4, "ptx_coef": 0.5, "data.pretraining": [str(tmp_path / "texts.jsonl")]}
    whole, split = (
        configure(policy, tmp_path / name, reward=[{"source": str(reward_model), "weight": 9.0}], **settings)
        for name in ("whole", "split")
    )
    [first, *_] = run_ppo(whole, prompts=PROMPTS).metrics
    assert first["reward/missing_eos_score"] < -1  # set by the first update, hence part of the state
    stop_at(tmp_path / "split", 2)
    with pytest.raises(Terminated):
        run_ppo(split, prompts=PROMPTS)
    run_ppo(split, prompts=PROMPTS, resume=Resume())
    assert_same(tmp_path / "split", tmp_path / "whole")


def test_the_supervised_stages_go_on_to_the_bit(tmp_path, policy, stop_at):
    in_8_bits = {"optimization.optimizer": "adamw8bit"}
    stages = {
        "sft": (run_sft, {"demonstrations": ROWS}, {"sft.batch_size": 3, "sft.num_epochs": 2, **in_8_bits}),
        "reward": (
            run_reward,
            {"comparisons": PAIRS, "demonstrations": ROWS},
            {
                "reward_model.batch_size": 3,
                "reward_model.num_epochs": 2,
                "reward_model.normalize_scale": True,
                "optimization.optimizer": "adafactor",
            },
        ),
    }  # fmt: skip
    for stage, (run, data, settings) in stages.items():
        whole, split = (
            config_from_settings(
                stage,
                {
                    "model": str(policy),
                    "out": str(tmp_path / stage / name),
                    "runtime.report": False,
                    **settings,
                },
            )
            for name in ("whole", "split")
        )
        expected = run(whole, **data)
        for stopped_after, resume in ((1, None), (4, Resume())):
            stop_at(tmp_path / stage / "split", stopped_after)
            with pytest.raises(Terminated):
                run(split, **data, resume=resume)
            assert len(metrics_without_times(tmp_path / stage / "split")) == stopped_after
        actual = run(split, **data, resume=Resume())
        assert_same(tmp_path / stage / "split", tmp_path / stage / "whole")
        assert run(split, **data, resume=Resume()) == actual  # it has ended: what it came to is read
        assert vars(actual) | {"folder": None} == vars(expected) | {"folder": None}


def test_the_chain_goes_on_in_the_stage_that_was_stopped(tmp_path, policy, stop_at):
    def judge(completions: list[str], **_: Any) -> list[float]:
        return [float(text.count("e")) for text in completions]

    def configured(name: str) -> Config:
        settings = [
            "sft.batch_size=4", "reward_model.batch_size=3", "data.eval_fraction=0", "rollout.num_prompts=4",
            "rollout.max_new_tokens=6", "ppo.num_updates=2", "ppo.num_epochs=1", "rlhf.num_rounds=2",
            "rlhf.num_prompts=4", "rlhf.num_responses=3", "runtime.report=false",
            "rlhf.labeler=x:y",
        ]  # fmt: skip
        return load_config(None, settings, {"model": str(policy), "out": str(tmp_path / name)})

    data = {"demonstrations": ROWS, "comparisons": PAIRS, "prompts": ROWS, "labeler": judge}
    run_rlhf(configured("whole"), **data)
    resume = None
    for stage, step in (("sft", 2), ("reward", 1), ("ppo", 1), ("reward-2", 2), ("ppo-2", 1)):
        stop_at(tmp_path / "split" / stage, step)
        with pytest.raises(Terminated):
            run_rlhf(configured("split"), **data, resume=resume)
        assert len(metrics_without_times(tmp_path / "split" / stage)) == step
        resume = Resume()
    # A chain may be moved, and its folder written in another way.
    (tmp_path / "split").rename(tmp_path / "moved")
    moved = f"../{tmp_path.name}/moved"
    run_rlhf(configured(moved), **data, resume=resume)
    for part in ("sft", "reward", "ppo", "reward-2", "ppo-2"):
        assert metrics_without_times(tmp_path / moved / part) == metrics_without_times(tmp_path / "whole" / part)
    assert model_bytes(tmp_path / moved) == model_bytes(tmp_path / "whole") != {}


def test_what_differs_is_named_unless_it_is_allowed(tmp_path, policy, stop_at, monkeypatch):
    monkeypatch.setattr(resuming, "is_command_line", lambda: True)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))

    def configured(**settings: Any) -> Config:
        return configure(policy, tmp_path / "run", **{"num_updates": 3, "data.prompts": [str(prompts)], **settings})

    stop_at(tmp_path / "run", 1)
    with pytest.raises(Terminated):
        run_ppo(configured(), reward=len_of)
    with pytest.raises(
        ConfigError, match=r"ppo\.learning_rate: 0\.001 in the run, 0\.002 now.*--allow-changes ppo\.lea"
    ):
        run_ppo(configured(learning_rate=2e-3), reward=len_of, resume=Resume())
    prompts.write_text(prompts.read_text().replace("tide", "ebb"))
    with pytest.raises(ConfigError, match=r"data\.prompts: the files have changed since the run started"):
        run_ppo(configured(), reward=len_of, resume=Resume())
    config = configured(**{"model": str(shutil.copytree(policy, tmp_path / "other"))})
    (tmp_path / "other" / "generation_config.json").write_text("{}")
    with pytest.raises(ConfigError) as raised:
        run_ppo(config, reward=len_of, resume=Resume(("data.prompts",)))
    assert str(raised.value).endswith(
        "now; model: the files have changed since the run started. If this is intended: --allow-changes model"
    )
    result = run_ppo(
        configured(learning_rate=2e-3), reward=len_of, resume=Resume(("data.prompts", "ppo.learning_rate"))
    )
    assert [row["update"] for row in result.metrics] == [1, 2, 3]


def test_what_may_differ_is_named_as_a_setting_is():
    named, _ = resumed(["learning_rate", "ppo.gamma", "critic", "data.columns.answer"], "run", "ppo")
    assert named == Resume(("ppo.learning_rate", "ppo.gamma", "critic", "data.columns.answer")), "critic: the section"
    assert resumed("learning_rate", "run", "sft")[0] == Resume(("sft.learning_rate",))
    with pytest.raises(ConfigError, match=r"resume=\['gama'\]: gama is not a setting of ppo; did you mean ppo.gamma\?"):
        resumed("gama", "run", "ppo")


def len_of(completions: list[str], **_: Any) -> list[float]:
    return [len(text) / 10 for text in completions]


def resumed_with(policy: Path, out: Path, before: dict[str, Any], now: dict[str, Any], **data: Any) -> list[Any]:
    """The metrics of a run of two updates that is resumed for two more with other settings."""
    common = {"learning_rate": 1e-2, "schedule": "constant", **before}
    run_ppo(configure(policy, out, **common), prompts=PROMPTS, reward=len_of)
    allowed = Resume(("ppo", "rollout", "evaluate", "data", "checkpoint"))
    config = configure(policy, out, **{**common, "num_updates": 4, **now})
    return run_ppo(config, prompts=PROMPTS, reward=len_of, resume=allowed, **data).metrics


@pytest.mark.parametrize(
    ("settings", "metric", "figures"),
    [
        ({"max_kl": 1e-4}, "objective/kl", 3),  # the third update is the first one that the bound sees
        ({"rollout.missing_eos_score": -3.0}, "reward/missing_eos_score", [None, None, -3.0, -3.0]),
        ({"value_warmup_updates": 3, "ppo.value_warmup_updates.until": 0.99}, "value/warmup", [None, None, 1.0, 0.0]),
    ],
)
def test_a_resumed_run_may_have_parts_that_its_checkpoint_lacks(tmp_path, policy, settings, metric, figures):
    found = [row.get(metric) for row in resumed_with(policy, tmp_path / "run", {}, settings)]
    assert (len(found) if isinstance(figures, int) else found) == figures


def test_a_resumed_run_may_begin_to_evaluate_and_its_first_evaluation_is_the_start(tmp_path, policy):
    (tmp_path / "judge.py").write_text(
        "def length(completions, **_): return [float(len(text)) for text in completions]"
    )
    settings = {"eval_every": 1, "evaluate.judge": f"{tmp_path}/judge.py:length"}
    rows = resumed_with(policy, tmp_path / "run", {}, settings, eval_prompts=["The crew", "A rope", "Then the sun"])
    start, end = (row["responses"] for row in read_json_lines(tmp_path / "run/evaluations.jsonl"))
    gains = [len(b["completion"]) - len(a["completion"]) for a, b in zip(start, end, strict=True)]
    assert any(gains)
    won = sum(1.0 if gain > 0 else 0.5 if gain == 0 else 0.0 for gain in gains) / len(gains)
    assert [row.get("eval/win_rate") for row in rows] == [None, None, 0.5, won]


def test_a_resumed_run_takes_the_coefficients_that_it_was_given(tmp_path, policy):
    """Those that no controller adapts; β under a controller goes on from where the checkpoint has it."""
    before = {"kl_coef": 0.05, "entropy_coef": 0.0, "rollout.missing_eos_score": -1.0}
    now = {"kl_coef": 0.5, "entropy_coef": 0.01, "rollout.missing_eos_score": -3.0}
    rows = resumed_with(policy, tmp_path / "run", before, now)
    names = ("objective/kl_coef", "objective/entropy_coef", "reward/missing_eos_score")
    assert [[row[name] for name in names] for row in rows] == [[0.05, 0.0, -1.0]] * 2 + [[0.5, 0.01, -3.0]] * 2

    # By hand: Schulman's controller halves β after every update whose KL is below two thirds of the target.
    adapted = {"kl_coef": 0.05, "kl_controller": {"schulman": {"target": 1e3}}}
    rows = resumed_with(policy, tmp_path / "adapted", adapted, {"kl_coef": 7.0})
    assert [row["objective/kl_coef"] for row in rows] == [0.05, 0.025, 0.0125, 0.00625]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, policy, stop_at, capsys):
    settings = {"num_updates": 5, "checkpoint.every": 1, "checkpoint.keep": 3}
    whole, split = (configure(policy, tmp_path / name, **settings) for name in ("whole", "split"))
    run_ppo(whole, prompts=PROMPTS, reward=len_of)
    stop_at(tmp_path / "split", 3)
    with pytest.raises(Terminated):
        run_ppo(split, prompts=PROMPTS, reward=len_of)
    damaged = tmp_path / "split/checkpoints/update-000003/actor_critic.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    capsys.readouterr()
    run_ppo(split, prompts=PROMPTS, reward=len_of, resume=Resume())
    assert "update-000003/actor_critic.safetensors" in capsys.readouterr().err.replace("\n", "")
    assert_same(tmp_path / "split", tmp_path / "whole")
    # A checkpoint is a model: PPO starts from it as from the folder itself.
    folder = tmp_path / "whole/checkpoints/update-000003/model"
    for name, source in (("by-name", f"{tmp_path / 'whole'}@3"), ("by-folder", folder)):
        run_ppo(configure(source, tmp_path / name, num_updates=1), prompts=PROMPTS, reward=len_of)
    assert_same(tmp_path / "by-name", tmp_path / "by-folder")
    with pytest.raises(ModelError, match=r"has no checkpoint of update 1; it has checkpoints of updates 3, 4, 5"):
        run_ppo(configure(f"{tmp_path / 'whole'}@1", tmp_path / "more"), prompts=PROMPTS, reward=len_of)


def test_a_run_without_a_checkpoint_starts_over_in_its_folder(tmp_path, policy):
    settings = {"num_updates": 3, "checkpoint.every.minutes": None}
    whole, killed = (configure(policy, tmp_path / name, **settings) for name in ("whole", "killed"))
    run_ppo(whole, prompts=PROMPTS, reward=len_of)
    process = fork_context().Process(target=_run_slowly, args=(killed,))
    process.start()
    _wait_for_rows(tmp_path / "killed", 1)
    process.kill()
    process.join()
    assert not list((tmp_path / "killed").glob("checkpoints/*"))
    run_ppo(killed, prompts=PROMPTS, reward=len_of, resume=Resume())
    assert_same(tmp_path / "killed", tmp_path / "whole")


def _run_slowly(config: Config) -> None:
    run_ppo(config, prompts=PROMPTS, reward=len_of, on_update=lambda *_: time.sleep(0.3))


def _wait_for_rows(folder: Path, count: int) -> None:
    log = folder / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (log.is_file() and log.read_bytes().count(b"\n") >= count):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def survive_kills(tmp_path: Path, policy: Path, *, kills: int, num_updates: int) -> int:
    """Kill a run that saves after every update, again and again, at random moments; then let it finish.

    Returns:
        How many of the kills left a save half done.
    """
    settings = {"num_updates": num_updates, "checkpoint.every": 1}
    whole, killed = (configure(policy, tmp_path / name, **settings) for name in ("whole", "killed"))
    run_ppo(whole, prompts=PROMPTS, reward=len_of)
    context, chooser = fork_context(), random.Random(0)
    checkpoints = tmp_path / "killed" / "checkpoints"
    newest, halves = 0, 0
    for _ in range(kills):
        told, telling = context.Pipe(duplex=False)
        process = context.Process(target=_run_and_tell, args=(killed, telling))
        process.start()
        for _ in range(chooser.randint(1, 4)):
            assert told.poll(60), "no update came"
            told.recv()
        time.sleep(chooser.uniform(0.0, 0.05))
        assert process.is_alive()
        process.kill()
        process.join()
        rejected: list[str] = []
        found = newest_valid(checkpoints, on_rejected=rejected.append)
        assert not rejected
        assert found is None or found.update >= newest
        newest = found.update if found else newest
        halves += any(map(is_part, checkpoints.glob(".*")))
    run_ppo(killed, prompts=PROMPTS, reward=len_of, resume=Resume())
    assert_same(tmp_path / "killed", tmp_path / "whole")
    return halves


def _run_and_tell(config: Config, telling: Connection) -> None:
    run_ppo(config, prompts=PROMPTS, reward=len_of, resume=Resume(), on_update=lambda update, _: telling.send(update))


def test_kills_at_random_moments_cost_nothing_but_time(tmp_path, policy):
    survive_kills(tmp_path, policy, kills=2, num_updates=20)


@pytest.mark.slow
def test_fifty_kills_at_random_moments_cost_nothing_but_time(tmp_path, policy):
    assert survive_kills(tmp_path, policy, kills=50, num_updates=400) > 5


WAITING = """

def wait():
    # From the third update on, until the run has been told to stop.
    import os, time

    while os.path.exists("hold") and os.path.exists("run/metrics.jsonl"):
        with open("run/metrics.jsonl") as rows:
            if len(rows.readlines()) < 2:
                return
        time.sleep(0.01)
"""


def test_the_command_is_terminated_resumed_and_then_has_nothing_to_do(tmp_path, policy):
    (tmp_path / "reward.py").write_text(DRAWS.replace("    draw =", "    wait()\n    draw =") + WAITING)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    command = [
        "ppo", "--model", policy, "--prompts", "prompts.jsonl", "--reward", "reward.py:noisy", "--out", "run",
        "--resume", "auto", "ppo.num_updates=6", "rollout.num_prompts=4", "rollout.max_new_tokens=6",
        "runtime.report=false",
    ]  # fmt: skip
    (tmp_path / "hold").touch()
    with started_kedge(*command, cwd=tmp_path) as process:
        _wait_for_rows(tmp_path / "run", 2)
        process.terminate()
        (tmp_path / "hold").unlink()
        process.join(60)
        assert process.exitcode == 143
    assert len(metrics_without_times(tmp_path / "run")) in (2, 3)
    done = forked_kedge("ppo", "--resume", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["update"] for row in metrics_without_times(tmp_path / "run")] == list(range(1, 7))
    again = forked_kedge("ppo", "--resume", "run", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (
        0,
        "run has finished: there is nothing to resume. To extend it, raise ppo.num_updates.\n",
    )
    for more, said in (
        (["ppo.gamma=0.9"], "run has finished, with other settings (ppo.gamma: 1.0 in the run, 0.9 now)"),
        (["--allow-changes", "ppo.gama"], "--allow-changes ppo.gama: there is no such field or section; did you mean"),
    ):
        other = forked_kedge("ppo", "--resume", "run", *more, cwd=tmp_path)
        assert (other.returncode, said in other.stderr) == (2, True), other.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--resume", "nowhere"], "--resume: nowhere is not the folder of a run"),
        (["--allow-changes", "ppo.clip_range"], "--allow-changes needs --resume"),
    ],
)
def test_mistakes_are_one_line(tmp_path, policy, arguments, said):
    done = forked_kedge("ppo", "--model", policy, "--prompts", "p.jsonl", "--reward", "r:f", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_damaged_note_of_the_end_is_one_line(tmp_path, policy):
    config = config_from_settings("sft", {"model": str(policy), "out": str(tmp_path / "run"), "runtime.report": False})
    run_sft(config, demonstrations=ROWS)
    for damaged in ("{", "[]", "{}"):
        (tmp_path / "run/finished.json").write_text(damaged)
        with pytest.raises(DataError, match=r"finished\.json is damaged"):
            run_sft(config, demonstrations=ROWS, resume=Resume())


def test_a_home_that_nobody_has_is_one_line(policy):
    config = configure(policy, "~nobody-of-this-name/run", num_updates=1)
    with pytest.raises(OutputError, match="the user in `~user` does not exist"):
        run_ppo(config, prompts=PROMPTS, reward=len_of, resume=Resume())

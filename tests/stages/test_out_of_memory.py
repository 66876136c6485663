"""Memory that runs out: one line, and a checkpoint of a whole update from which the run goes on to the bit."""

from __future__ import annotations

import json
import os
import pkgutil
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kedge.algorithm.experience import Experience, PolicyOutputs
from kedge.cli import main
from kedge.config import Config, config_from_settings, with_values
from kedge.logs.json_lines import MetricsLog
from kedge.rollout import Sampler
from kedge.runs.out_of_memory import memory_in_one_line
from kedge.runs.run import Resume
from kedge.stages.ppo import run_ppo
from kedge.stages.sft import run_sft
from kedge.training.learner import LanguageLearner
from kedge.training.runtime import stream
from kedge.training.supervised.losses import CompletionLoss
from kedge_base.errors import OutOfMemoryError
from kedge_base.machine.memory import in_phase
from kedge_base.stage import find_stage
from kedge_control import experience
from kedge_control.experience import ControlExperience, ControlLearner
from tests.control.test_runs import play, untimed, weights_of
from tests.stages.ppo.test_ppo import PROMPTS, configure, metrics_without_times
from tests.stages.test_resume import ROWS, assert_same, len_of, model_bytes
from tests.tiny import save_tiny_policy, save_tiny_reward_model, tiny_tokenizer

Exhaust = Callable[..., None]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return save_tiny_reward_model(tmp_path_factory.mktemp("models") / "reward", seed=3)


def ask_for_too_much() -> None:
    """Raise what torch raises on a CPU."""
    torch.empty(2**50, dtype=torch.uint8)


@pytest.fixture
def exhaust(monkeypatch: pytest.MonkeyPatch) -> Exhaust:
    """Let memory run out once: in a call of a function, counted from 1, after an update's metrics are written."""

    def arrange(target: str, *, after: int = 0, call: int = 1) -> None:
        owner, _, name = target.rpartition(".")
        original = pkgutil.resolve_name(owner)
        function = getattr(original, name)
        state = {"armed": after == 0, "calls": 0}
        write = MetricsLog.write

        def written(log: MetricsLog, update: int, metrics: Any) -> None:
            write(log, update, metrics)
            state["armed"] = state["armed"] or update == after

        def exhausted(*arguments: Any, **settings: Any) -> Any:
            state["calls"] += state["armed"]
            if state["armed"] and state["calls"] == call:
                ask_for_too_much()
            return function(*arguments, **settings)

        monkeypatch.setattr(MetricsLog, "write", written)
        monkeypatch.setattr(original, name, exhausted)

    return arrange


PHASES = {
    "sampling": ("kedge.rollout.sampler:Sampler._sample", 1, 2),
    "scoring": ("kedge.rewards.model.score_rows", 1, 2),
    "experience": ("kedge.rollout.experience.shared_out", 1, 2),
    "the update": ("kedge.training.learner:LanguageLearner.evaluate", 1, 2),
    "the update, after a step": ("kedge.training.learner:LanguageLearner.evaluate", 2, 1),
}
"""Where memory runs out, in which call of the update after a saved one, and the number of that."""


def scored_run(policy: Path, reward_model: Path, out: Path, **settings: Any) -> Config:
    return configure(policy, out, reward=[{"source": str(reward_model)}], num_updates=4, num_epochs=1, **settings)


@pytest.fixture(scope="module")
def whole(policy, reward_model, tmp_path_factory):
    """An undisturbed run."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    run_ppo(scored_run(policy, reward_model, out), prompts=PROMPTS)
    return out


@pytest.mark.parametrize("phase", PHASES)
def test_ppo_ends_in_one_line_and_goes_on_to_the_bit(
    phase: str, tmp_path: Path, policy: Path, reward_model: Path, whole: Path, exhaust: Exhaust, capsys: Any
) -> None:
    target, call, saved = PHASES[phase]
    split = scored_run(policy, reward_model, tmp_path / "split", **{"checkpoint.every": saved, "checkpoint.keep": 1})
    exhaust(target, after=saved, call=call)
    said = f"^out of memory during {phase.split(',')[0]}: 1024 TiB more were asked for, the process holds "
    with pytest.raises(OutOfMemoryError, match=said):
        run_ppo(split, prompts=PROMPTS)
    assert [each.name for each in (tmp_path / "split" / "checkpoints").iterdir()] == [f"update-{saved:06d}"]
    assert not (tmp_path / "split" / "model").exists(), "it could be one of half an update"
    assert "\nResume: the same call of kedge.ppo with out=" in capsys.readouterr().err
    if phase.startswith("the update"):  # before an update, the state that is saved is the same
        run_ppo(split, prompts=PROMPTS, resume=Resume())
        assert_same(tmp_path / "split", whole)


@pytest.mark.parametrize(("call", "saved"), [(1, ["update-000003"]), (2, [])])
def test_an_update_is_saved_as_long_as_no_step_of_the_next_is_taken(
    call: int, saved: list[str], tmp_path: Path, policy: Path, exhaust: Exhaust
) -> None:
    """Only time triggers saving here, so that a checkpoint is the one of the failure."""
    config = configure(policy, tmp_path / "run", num_updates=4)
    exhaust("kedge.training.learner:LanguageLearner.evaluate", after=3, call=call)
    with pytest.raises(OutOfMemoryError):
        run_ppo(config, prompts=PROMPTS, reward=len_of)
    assert [each.name for each in (tmp_path / "run").glob("checkpoints/*")] == saved
    assert len(metrics_without_times(tmp_path / "run")) == 3


@pytest.mark.parametrize(
    ("target", "phase"),
    [
        ("kedge.training.supervised.loop.accumulate_gradients", "the update"),
        ("kedge.training.supervised.loop.evaluate", "evaluation"),
    ],
)
def test_fine_tuning_ends_in_one_line_and_goes_on_to_the_bit(
    target: str, phase: str, tmp_path: Path, policy: Path, exhaust: Exhaust
) -> None:
    whole, split = (
        config_from_settings(
            "sft",
            {
                "model": str(policy),
                "out": str(tmp_path / name),
                "runtime.report": False,
                "sft.batch_size": 3,
                "data.eval_fraction": 0.2,
                "checkpoint.every": 2,
            },
        )
        for name in ("whole", "split")
    )
    run_sft(whole, demonstrations=ROWS)
    exhaust(target, after=2)
    with pytest.raises(OutOfMemoryError, match=f"during {phase}: .*Try runtime.micro_batch_tokens=auto"):
        run_sft(split, demonstrations=ROWS)
    run_sft(split, demonstrations=ROWS, resume=Resume())
    assert_same(tmp_path / "split", tmp_path / "whole")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (
            "kedge_control.environments:Environments.step",
            "sampling: .*Try control.num_steps=32 or control.num_envs=1",
        ),
        (
            "kedge_control.experience:ControlLearner.evaluate",
            "the update: .*Try runtime.micro_batch_tokens=auto, control.num_s",
        ),
    ],
)
def test_control_ends_in_one_line_and_goes_on_to_the_bit(
    target: str, said: str, tmp_path: Path, exhaust: Exhaust
) -> None:
    whole, split = (partial(play, tmp_path / name, **{"checkpoint.every": 2}) for name in ("whole", "split"))
    expected = whole()
    exhaust(target, after=2)
    with pytest.raises(OutOfMemoryError, match=f"during {said}"):
        split()
    assert not (tmp_path / "split" / "model").exists(), "it could be one of half an update"
    resumed = split(resume=True)
    assert untimed(resumed) == untimed(expected)
    assert all(torch.equal(each, weights_of(expected)[name]) for name, each in weights_of(resumed).items())


@pytest.mark.parametrize(
    ("num_envs", "num_steps", "found"), [(1, 32, []), (8, 4, []), (4, 64, ["num_steps", "num_envs"])]
)
def test_the_advice_of_control_is_a_configuration(num_envs: int, num_steps: int, found: list[str]) -> None:
    """Half of the steps may not be whole minibatches."""
    sizes = {"control.num_envs": num_envs, "control.num_steps": num_steps, "control.num_minibatches": 32}
    config = config_from_settings("control", {"control.env": "CartPole-v1", **sizes})
    advice = find_stage("control").remedies
    assert advice is not None
    changes = advice(config, "sampling")
    assert [name for name, _ in changes] == [f"control.{name}" for name in found]
    for name, value in changes:
        config_from_settings("control", {"control.env": "CartPole-v1", **sizes, name: value})


def test_control_with_auto_repeats_the_step_in_smaller_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the minibatches of 32 steps and the rollout's pass of 128 are split."""
    evaluate, pass_over = ControlLearner.evaluate, experience._with_pass

    def limited(learner: ControlLearner, batch: ControlExperience) -> PolicyOutputs:
        outputs = evaluate(learner, batch)
        if batch.num_rows > 16:
            ask_for_too_much()
        return outputs

    def limited_pass(played: Any, policy: Any, most: int | None) -> Any:
        if most is None or most > 64:
            ask_for_too_much()
        return pass_over(played, policy, most)

    with monkeypatch.context() as patched:
        patched.setattr(ControlLearner, "evaluate", limited)
        patched.setattr(experience, "_with_pass", limited_pass)
        found = play(tmp_path / "auto", micro_batch_tokens="auto")
    assert found.metrics[-1]["memory/micro_batch_tokens"] == 16
    split = play(tmp_path / "split", micro_batch_tokens=16)
    for name in ("policy/grad_norm", "value/loss", "policy/distance_moved"):
        assert [row[name] for row in found.metrics] == pytest.approx([row[name] for row in split.metrics], rel=1e-4)


def test_a_save_that_needs_too_much_leaves_the_one_before(tmp_path: Path, policy: Path, exhaust: Exhaust) -> None:
    config = configure(policy, tmp_path / "run", num_updates=3, **{"checkpoint.every": 1})
    exhaust("kedge.training.checkpoint.state.save_checkpoint", after=2)
    with pytest.raises(OutOfMemoryError, match="during saving"):
        run_ppo(config, prompts=PROMPTS, reward=len_of)
    names = [each.name for each in (tmp_path / "run" / "checkpoints").iterdir()]
    assert "update-000001" in names
    run_ppo(config, prompts=PROMPTS, reward=len_of, resume=Resume())
    assert len(metrics_without_times(tmp_path / "run")) == 3


def test_the_command_prints_one_line(
    tmp_path: Path, policy: Path, exhaust: Exhaust, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While models are loaded, nothing is left behind."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    exhaust("kedge.stages.sft.load_language_model")
    command = ["kedge", "sft", "--model", policy, "--data", tmp_path / "rows.jsonl", "--out", tmp_path / "run"]
    monkeypatch.setattr("sys.argv", [*map(str, command)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    [line] = [each for each in capsys.readouterr().err.splitlines() if each]
    assert line.startswith("error: out of memory during loading: 1024 TiB more were asked for, the process holds ")
    assert line.endswith("Try adapter.kind=lora")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, "runtime.frozen_dtype=bf16, ppo.critic=shared or adapter.kind=lora"),
        ({"runtime.frozen_dtype": "bf16", "adapter.kind": "lora"}, "runtime.frozen_dtype=int8, ppo.critic=shared or "
         "adapter.base_dtype=bf16"),
        ({"runtime.frozen_dtype": "nf4", "adapter.kind": "lora", "adapter.base_dtype": "nf4"}, "ppo.critic=shared"),
        ({"runtime.frozen_dtype": "bf16", "runtime.parallel": "shard"}, "ppo.critic=shared or adapter.kind=lora"),
    ],
)  # fmt: skip
def test_only_settings_that_need_less_memory_are_proposed(settings: dict[str, Any], advice: str) -> None:
    config = config_from_settings("ppo", {"model": "m", "ppo.critic": "separate", **settings})
    with pytest.raises(OutOfMemoryError, match=f"Try {advice}$"), memory_in_one_line(config, "ppo"):
        raise MemoryError


def test_commands_that_are_no_stage_print_one_line_as_well(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("kedge.cli.app", lambda: bytes(2**62))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: out of memory during the command: the process holds ")


def limited(arguments: list[str], most: int | None) -> subprocess.CompletedProcess[str]:
    """Run the command under `ulimit -v`, in bytes; it prints the largest address space that it had."""
    peak = "[line for line in open('/proc/self/status') if line.startswith('VmPeak')][0]"
    code = f"import atexit; atexit.register(lambda: print({peak})); from kedge.cli import main; main()"

    def limit() -> None:
        if most is not None:
            resource.setrlimit(resource.RLIMIT_AS, (most, most))

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, preexec_fn=limit, check=False)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_a_real_limit_ends_the_run_and_without_it_it_goes_on(tmp_path: Path) -> None:
    """The last batch has the one long row, whose activations take 250 MiB more than was needed before."""
    tokenizer, lines = tiny_tokenizer(), []
    wide = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=16384, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(wide).save_pretrained(tmp_path / "wide")
    tokenizer.save_pretrained(tmp_path / "wide")
    *_, last = torch.randperm(8, generator=stream(0, "supervised", 0)).tolist()
    for number in range(8):
        lines.append({"prompt": f"Deck {number}:", "completion": " Aye" * (120 if number == last else 3)})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = ["sft", "--model", f"{tmp_path}/wide", "--data", f"{tmp_path}/rows.jsonl", "--out"]
    settings = ["batch_size=2", "num_epochs=1", "eval_fraction=0", "report=false", "precision=fp32"]

    whole = limited([*own, f"{tmp_path}/whole", *settings], None)
    peak = int(whole.stdout.split("VmPeak:")[1].split()[0]) * 1024
    ended = limited([*own, f"{tmp_path}/split", *settings], peak - 190 * 2**20)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "error: out of memory during the update: " in ended.stderr
    assert "that ulimit -v allows are in use. Try runtime.micro_batch_tokens=auto" in ended.stderr
    assert [each.name for each in (tmp_path / "split" / "checkpoints").iterdir()] == ["update-000003"]
    assert limited(["sft", "--resume", f"{tmp_path}/split"], None).returncode == 0
    assert_same(tmp_path / "split", tmp_path / "whole")


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def runs_out_above(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Let memory run out in every training pass of PPO over more tokens than these."""
    evaluate = LanguageLearner.evaluate

    def limited(learner: LanguageLearner, batch: Experience) -> PolicyOutputs:
        outputs = evaluate(learner, batch)
        if batch.rollout.num_tokens > tokens:
            ask_for_too_much()
        return outputs

    monkeypatch.setattr(LanguageLearner, "evaluate", limited)


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_with_auto_the_step_is_repeated_in_smaller_passes(
    num_minibatches: int, tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """With one minibatch, the first epoch's pass serves the experience as well."""
    settings = {"num_updates": 2, "num_prompts": 6, "num_minibatches": num_minibatches, "kl_coef": 0.05}
    names = ("auto", "resumed", "split")
    auto, resumed, split = (
        configure(policy, tmp_path / name, **{**settings, "micro_batch_tokens": "auto"}) for name in names
    )
    with monkeypatch.context() as patched:
        runs_out_above(patched, 40)
        run_ppo(auto, prompts=PROMPTS, reward=len_of)
        *_, line = [each for each in capsys.readouterr().err.splitlines() if each.startswith("out of memory")]
        run_ppo(with_values(resumed, {"ppo.num_updates": 1}), prompts=PROMPTS, reward=len_of)
        run_ppo(resumed, prompts=PROMPTS, reward=len_of, resume=Resume())
    # The run is repeated to the bit from a checkpoint that holds the number.
    assert_same(tmp_path / "resumed", tmp_path / "auto")
    rows = metrics_of(tmp_path / "auto")
    found = int(rows[-1]["memory/micro_batch_tokens"])
    assert f"with passes of up to {found} (runtime.micro_batch_tokens=auto)" in line
    assert json.loads((tmp_path / "auto" / "finished.json").read_text())["micro_batch_tokens"] == found
    # Up to rounding, it is the run with that number from the start.
    run_ppo(with_values(split, {"runtime.micro_batch_tokens": found}), prompts=PROMPTS, reward=len_of)
    for row, other in zip(metrics_without_times(tmp_path / "auto"), metrics_of(tmp_path / "split"), strict=True):
        for name in ("policy/grad_norm", "value/loss", "policy/approx_kl", "objective/kl"):
            assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)


def test_fine_tuning_with_auto_equals_the_smaller_number_to_the_bit(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step fails, and is repeated with gradients and random numbers anew."""

    def configured(name: str, tokens: object) -> Config:
        own = {"model": str(policy), "out": str(tmp_path / name), "runtime.micro_batch_tokens": tokens}
        return config_from_settings("sft", {**own, "sft.batch_size": 5, "data.eval_fraction": 0.2})

    sums = CompletionLoss.sums

    def limited(loss: CompletionLoss, examples: Any) -> Any:
        terms = sums(loss, examples)
        if sum(loss.length(each) for each in examples) > 40:
            ask_for_too_much()
        return terms

    with monkeypatch.context() as patched:
        patched.setattr(CompletionLoss, "sums", limited)
        run_sft(configured("auto", "auto"), demonstrations=ROWS)
    found = int(metrics_of(tmp_path / "auto")[-1]["memory/micro_batch_tokens"])
    run_sft(configured("split", found), demonstrations=ROWS)
    assert model_bytes(tmp_path / "auto") == model_bytes(tmp_path / "split")


def test_with_auto_fewer_responses_are_sampled_at_once(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's tokens come from its own random numbers, whichever rows are sampled with it."""
    plain, auto = (
        configure(policy, tmp_path / name, num_updates=1, num_prompts=6, **more)
        for name, more in (("plain", {}), ("auto", {"micro_batch_tokens": "auto"}))
    )
    run_ppo(plain, prompts=PROMPTS, reward=len_of)
    sample = Sampler._sample

    def limited(sampler: Sampler, decoder: Any, rows: Any, *rest: Any) -> None:
        sample(sampler, decoder, rows, *rest)
        if len(rows) > 2:
            ask_for_too_much()

    monkeypatch.setattr(Sampler, "_sample", limited)
    run_ppo(auto, prompts=PROMPTS, reward=len_of)
    texts = [
        [row["response"] for row in map(json.loads, (tmp_path / name / "samples.jsonl").read_text().splitlines())]
        for name in ("plain", "auto")
    ]
    assert texts[0] == texts[1] != []


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_a_run_is_not_resumed_with_an_adapter_that_its_checkpoint_lacks(stage: str) -> None:
    settings = {"model": "m", "runtime.micro_batch_tokens": "auto", "activation_checkpointing": True}
    config = config_from_settings(stage, settings)
    with (
        pytest.raises(OutOfMemoryError, match=r"Try adapter\.kind=lora or") as raised,
        memory_in_one_line(config, stage),
        in_phase("the update"),
    ):
        raise MemoryError
    assert raised.value.settings == {}

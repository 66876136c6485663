"""What a stage says of its memory before it starts, and when it refuses to."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import CTRLConfig, LlamaConfig

from kedge.cli import main
from kedge.config import load_config
from kedge_base.errors import ConfigError
from kedge_base.machine.memory import MemoryLimit
from kedge_plan.before import _least, is_small, plan_before, plan_chain_before
from kedge_plan.devices import Device, this_machine
from kedge_plan.plan import _changed, count_on, count_stage, remedies
from kedge_plan.report import MachinePlan, PlannedPhase, peak_line
from kedge_plan.rows import Lengths
from tests.models.registry.builder import tiny_config
from tests.models.test_adapters import adapt
from tests.tiny import save_tiny_policy

GIB = 2**30


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of a model of 134 million parameters, without weights and without a tokenizer."""
    folder = tmp_path_factory.mktemp("wide")
    config = LlamaConfig(
        vocab_size=8192, hidden_size=2048, intermediate_size=8192, num_attention_heads=16, num_hidden_layers=2
    )
    config.save_pretrained(folder)
    return folder


def limited(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    device = Device("this machine's CPU", size * GIB, accelerator=False, is_this=True, bound="the control group")
    monkeypatch.setattr("kedge_plan.before.this_machine", lambda _: device)


@pytest.mark.parametrize(
    ("stage", "data"),
    [
        ("ppo", ["--prompts", "rows.jsonl", "--reward", "kedge.rewards.penalties:too_long"]),
        ("rlhf", ["--demonstrations", "rows.jsonl", "--comparisons", "rows.jsonl", "--prompts", "rows.jsonl"]),
    ],
)
def test_a_run_that_cannot_fit_is_refused_before_it_loads(
    stage: str,
    data: list[str],
    wide: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The folder has no weights, so loading would fail in another way: as it does with --anyway."""
    limited(monkeypatch, 2)
    # For each setting that may help, the stage is counted again; what it advises is shown below.
    monkeypatch.setattr("kedge_plan.before._advice", lambda *_: "take less")
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}\n')
    command = ["kedge", stage, "--model", str(wide), *data]
    command += ["--out", str(tmp_path / "out"), "runtime.device=cpu", "runtime.precision=fp32"]
    errors = []
    for anyway in ([], ["--anyway"]):
        monkeypatch.setattr(sys, "argv", [*command, *anyway])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        errors.append(capsys.readouterr().err)
    assert re.search(r"error: (ppo|sft) needs [\d.]+ GiB of memory in \w+, at least [\d.]+ GiB, and this machine's "
                     r"CPU has 2.0 GiB \(the control group\); take less, or pass --anyway\n$", errors[0])  # fmt: skip
    assert "pass --anyway" not in errors[1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("limits", "needed", "line"),
    [
        # 3 GiB of what is in use are this process's own, and count as free
        ([("the machine", 24, 13)], 12, "fits into the 14 GiB that are free of 24 GiB (the machine)"),
        ([("the machine", 24, 13)], 13.5, "may not fit into the 14 GiB that are free of 24 GiB (the machine)"),
        ([("the machine", 24, 13)], 15, "does not fit into the 14 GiB that are free of 24 GiB (the machine)"),
        ([("the machine", 24, 3)], 25, "does not fit into the 24 GiB that are free of 24 GiB (the machine)"),
        (
            [("the control group", 8, 4), ("the machine", 24, 3)],
            7.5,
            "does not fit into the 7.0 GiB that are free of 8.0 GiB (the control group)",
        ),
        (
            [("the control group", 16, 3), ("the machine", 24, 20)],
            8,
            "does not fit into the 7.0 GiB that are free of 16 GiB (the control group)",
        ),
        ([], 8, "the memory of this device is unknown"),
    ],
)
def test_the_verdict_counts_what_is_free_and_says_both(
    monkeypatch: pytest.MonkeyPatch, limits: list[tuple[str, int, int]], needed: float, line: str
) -> None:
    found = [MemoryLimit(name, limit * GIB, used * GIB) for name, limit, used in limits]
    monkeypatch.setattr("kedge_plan.devices.memory_limits", lambda: found)
    monkeypatch.setattr("kedge_plan.devices.held_memory", lambda: 3 * GIB)
    plan = MachinePlan("sft", "step", (PlannedPhase("step", {("weights", "policy"): needed * GIB}),))
    assert peak_line(plan, this_machine("cpu")).endswith(f"; {line}")


def test_a_chain_is_planned_before_its_first_stage(
    wide: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kedge_plan.before.is_small", lambda _, stage: stage == "reward")
    fields = ("runtime.device=cpu", "runtime.precision=fp32", "rlhf.train_critic=true", "critic.kind=shared")
    config = load_config(None, fields, {"model": str(wide)}, None, stage="rlhf")
    limited(monkeypatch, 1000)
    assert list(plan_chain_before(config)) == ["sft", "critic", "ppo"]
    lines = [line.split(": ")[:2] for line in capsys.readouterr().err.splitlines()]
    assert lines == [[stage, "peak memory"] for stage in ("sft", "critic", "ppo")]


def test_a_run_that_may_fit_is_not_refused_and_told_what_to_set(
    wide: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, gradients and moments, 16 bytes for each of 168 million weights, are certain: 2.5 GiB."""
    fields = ("runtime.device=cpu", "runtime.precision=fp32", "rollout.num_prompts=1")
    config = load_config(None, fields, {"model": str(wide)}, None, stage="ppo")
    limited(monkeypatch, 1000)
    assert plan_before(config, "ppo") is not None
    assert "memory runs out" not in capsys.readouterr().err
    limited(monkeypatch, 3.2)
    assert plan_before(config, "ppo") is not None
    [(settings, size)] = re.findall(r"if memory runs out: set (.+) \(([\d.]+) GiB\)\n$", capsys.readouterr().err)
    changed = load_config(None, (*fields, *settings.split()), {"model": str(wide)}, None, stage="ppo")
    assert count_stage(changed, "ppo").plan(sized(0.1)).needed / GIB == pytest.approx(float(size), abs=0.05)
    limited(monkeypatch, 2.4)
    with pytest.raises(ConfigError, match=r"at least [2-3]\.\d GiB, .*; set .* \([\d.]+ GiB\), or pass --anyway$"):
        plan_before(config, "ppo")
    monkeypatch.setattr("kedge_plan.before._advice", lambda *_: "take less")
    assert plan_before(config, "ppo", anyway=True) is not None


def test_a_small_run_from_an_adapter_is_not_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is that of its base; counting would take seconds."""
    adapt(save_tiny_policy(tmp_path / "policy"), tmp_path / "adapter")
    monkeypatch.setattr("kedge_plan.before.count_stage", lambda *_: pytest.fail("it was counted"))
    config = load_config(None, ("runtime.device=cpu",), {"model": str(tmp_path / "adapter")}, None, stage="ppo")
    assert plan_before(config, "ppo") is None


@pytest.mark.parametrize(("stage", "field"), [("sft", "model"), ("reward", "reward_model.base"), ("ppo", "model")])
def test_a_small_model_is_not_planned(stage: str, field: str, wide: Path, tmp_path: Path) -> None:
    size = {"vocab_size": 500, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    LlamaConfig(**size, num_hidden_layers=2).save_pretrained(tmp_path / "model")
    for model, small in ((tmp_path / "model", True), (wide, False), (tmp_path / "gone", False)):
        flags = {"model": str(tmp_path / "model"), field: str(model)}
        assert is_small(load_config(None, (), flags, None, stage=stage), stage) is small


def test_a_model_whose_code_needs_contents_is_one_line_and_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config("xlm").save_pretrained(tmp_path)
    monkeypatch.setattr("kedge_plan.before.is_small", lambda *_: False)
    said = rf"ppo of {re.escape(str(tmp_path))} cannot be planned: .* the model's code raises KeyError: .*"
    config = load_config(None, ("runtime.device=cpu",), {"model": str(tmp_path)}, None, stage="ppo")
    assert plan_before(config, "ppo") is None
    [line] = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"{said}; its memory is not checked", line)
    monkeypatch.setattr(sys, "argv", ["kedge", "plan", "ppo", "--model", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"error: {said}", line)


def test_what_may_take_less_in_the_end_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """Continuations of a check that need not be sampled at once, and versions of the policy that nothing waits for."""
    size: dict[str, Any] = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    LlamaConfig(**size, num_hidden_layers=2).save_pretrained(tmp_path)

    def least(*fields: str) -> float:
        given = ("runtime.device=cpu", "rollout.num_prompts=2", *fields)
        config = load_config(None, given, {"model": str(tmp_path)}, None, stage="ppo")
        return _least(count_stage(config, "ppo", lengths=Lengths((8,))))

    assert least("ppo.critic_check=1", "ppo.critic_check.size=[64, 4, 8]") == least()
    assert least("rollout.max_staleness=3") == least("rollout.max_staleness=1") > least()


AUTO = ("runtime.device=cpu", "runtime.precision=fp32", "runtime.activation_checkpointing=auto", "sft.batch_size=8")


def sized(size: float) -> Device:
    return Device("a CPU", size * GIB, accelerator=False, bound="--device")


def test_activations_are_recomputed_where_the_run_fits_only_so(
    wide: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(None, AUTO, {"model": str(wide)}, None, stage="sft")
    plans = {}
    for room in (100, 7):
        limited(monkeypatch, room)
        plans[room] = plan_before(config, "sft")
    kept, again = plans[100], plans[7]
    assert kept is not None
    assert again is not None
    assert (kept.recomputes, again.recomputes) == (False, True)
    assert again.needed < 7 * GIB < kept.needed
    first, second = capsys.readouterr().err.splitlines()
    assert "recomputed" not in first
    assert "activations recomputed; " in second


def test_a_model_that_cannot_recompute_keeps_its_activations(tmp_path: Path) -> None:
    CTRLConfig(vocab_size=500, n_embd=16, dff=32, n_layer=2, n_head=2, n_positions=64).save_pretrained(tmp_path)
    config = load_config(None, (*AUTO, "data.max_length=32"), {"model": str(tmp_path)}, None, stage="sft")
    assert not count_on(sized(0.1), config, "sft").plan(sized(0.1)).recomputes


def test_what_makes_a_run_fit_is_listed_by_what_it_costs(wide: Path) -> None:
    """Single settings where they are enough; else their sum, which ends with the setting that makes it fit."""
    config = load_config(None, (*AUTO[:2], "sft.batch_size=8"), {"model": str(wide)}, None, stage="sft")
    counted = count_stage(config, "sft", accelerator=False)
    names = list(dict(remedies(counted, sized(6.9), 6.9 * GIB)))
    assert names[0] == "runtime.micro_batch_tokens=2048"
    assert "runtime.activation_checkpointing=true" in names
    room = 3.4 * GIB
    *parts, last = remedies(counted, sized(3.4), room)
    assert last[1].excess(room) == 0
    assert all(plan.excess(room) > 0 for _, plan in parts)
    assert last[0].startswith(parts[-1][0])
    assert not list(remedies(counted, sized(0.5), 0.5 * GIB))


def test_the_first_setting_that_makes_a_run_fit_is_found_without_the_others(wide: Path, monkeypatch) -> None:
    planned = list[Any]()

    def changed(*given: Any) -> Any:
        planned.append(given)
        return _changed(*given)

    monkeypatch.setattr("kedge_plan.plan._changed", changed)
    config = load_config(None, (*AUTO[:2], "sft.batch_size=8"), {"model": str(wide)}, None, stage="sft")
    found = remedies(count_stage(config, "sft", accelerator=False), sized(6.9), 6.9 * GIB)
    name, _ = next(found)
    assert name == "runtime.micro_batch_tokens=2048"
    needed = len(planned)
    assert [*found]
    assert needed < len(planned)


def test_a_plan_that_does_not_fit_ends_with_commands_that_do(
    wide: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["kedge", "plan", "sft", "--model", str(wide), "--device", "cpu:6GiB", *AUTO[:2], "batch_size=8"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    others, text = capsys.readouterr().out.split("instead:\n")[1].split("to make it fit")
    found = text.splitlines()[1:]
    run = f"kedge sft --model {wide} {' '.join(AUTO[:2])} batch_size=8"
    assert re.fullmatch(rf" +[\d.]+ GiB, fits: {re.escape(run)} runtime.micro_batch_tokens=2048", found[0])
    assert all(", fits: kedge sft" in line for line in found)
    # Both lists count the process, as the verdict does.
    peaks = {settings: peak for peak, settings in (line.strip().split(f", fits: {run} ") for line in found)}
    shown = dict(re.findall(r"^  (\S.*?) +([\d.]+ [GM]iB) \(", others, re.MULTILINE))
    both = peaks.keys() & shown.keys()
    assert both
    assert {each: shown[each] for each in both} == {each: peaks[each] for each in both}

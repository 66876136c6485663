"""The plan of a stage on one machine, beside the live bytes of a real run."""

from __future__ import annotations

import json
import re
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from bench.plan.shallow import save_shallow, text_of
from kedge.algorithm.experience import Experience
from kedge.cli import main
from kedge.config import Config, load_config, with_values
from kedge.models.live_bytes import Hollow, LiveBytes
from kedge.stages.critic import run_critic
from kedge.stages.ppo import run_ppo
from kedge.stages.ppo.roles import Roles
from kedge.stages.ppo.trainer import Trainer
from kedge.stages.reward import run_reward
from kedge.stages.sft import run_sft
from kedge_base.errors import ConfigError, ModelError
from kedge_base.run_folder.record_format import read_metrics
from kedge_plan.devices import find_device
from kedge_plan.plan import (
    _alternatives,
    as_on,
    count_stage,
    plan_machine,
    proposals,
    rlhf_stages,
)
from kedge_plan.report import MachinePlan, PlannedPhase
from kedge_plan.rows import Lengths, lengths_of, quantiles
from tests.models.registry.builder import save_policy_folder, tiny_config
from tests.tiny import save_tiny_policy, save_tiny_reward_model

GIB = 2**30


def scores(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text) % 7) for text in completions]


def ppo_config(tmp_path: Path, **settings: Any) -> Config:
    save_tiny_policy(tmp_path / "policy")
    flags = {"model": str(tmp_path / "policy"), "out": str(tmp_path / "out")}
    fixed = {"runtime.device": "cpu", "runtime.precision": "fp32", "runtime.num_fixed_prompts": 0}
    return load_config(None, (), {**flags, **fixed, **settings}, None, stage="ppo")


def memory_of(run: Path) -> dict[str, Any]:
    """What a run was planned to hold, and held."""
    return json.loads((run / "finished.json").read_text())["memory"]


def test_live_bytes_of_a_product_by_hand() -> None:
    layer, rows = nn.Linear(64, 32, bias=False), torch.zeros(16, 64)
    counter = LiveBytes()
    assert counter.hold(layer.parameters()) == 64 * 32 * 4
    with counter:
        product = layer(rows)
        assert counter.live == 4 * (64 * 32 + 16 * 64 + 16 * 32)
        square = product * product
        assert counter.work["flops"] == 2 * 16 * 64 * 32
        del product, square
    assert counter.live == 4 * (64 * 32 + 16 * 64)
    with counter:
        torch.exp(rows.view(-1))  # the view computes nothing
    assert counter.work == {
        "flops": 2 * 16 * 64 * 32, "bytes": 4 * (64 * 32 + 3 * 16 * 32), "functions": 4 * 2 * 16 * 64, "calls": 3
    }  # fmt: skip
    assert counter.peak == 4 * (64 * 32 + 16 * 64 + 2 * 16 * 32)


def test_lengths_of_an_update_are_like_those_of_the_data() -> None:
    assert quantiles([1, 2, 3, 100], 4) == (1, 2, 3, 100)
    assert quantiles([5], 3) == (5, 5, 5)
    assert quantiles(range(100), 2) == (25, 75)


@pytest.mark.parametrize(
    "settings",
    [
        {"ppo.num_minibatches": 2, "runtime.micro_batch_tokens": 64},
        {"ppo.critic": "separate", "runtime.activation_checkpointing": True},
        {"ppo.critic": "frozen_attention"},
        {"ppo.critic": "frozen"},
        {"ppo.critic": "readout"},
        {"adapter.kind": "lora", "adapter.base_dtype": "int8"},
        {"optimization.optimizer": "muon", "ppo.critic": "none", "ppo.advantage": "rloo", "rollout.num_responses": 2},
        {"ppo.value_loss": "hl_gauss", "runtime.frozen_dtype": "int8"},
        {"rollout.max_staleness": 1},
    ],
    ids=[
        "micro-batches",
        "separate critic",
        "frozen attention",
        "frozen",
        "read-out",
        "base in 8 bits",
        "muon",
        "histogram",
        "ahead",
    ],
)
def test_the_planned_peak_is_that_of_a_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Within 5 %: the published target of the closed form's median."""
    plan, measured = planned_and_measured(tmp_path, settings)
    # Sampling ahead is in another thread, whose tensors this one does not count.
    ahead = [("key–value cache", "policy"), ("logits", "policy")] if "rollout.max_staleness" in settings else []
    elsewhere = sum(plan.phases[0].held[label] for label in ahead)
    assert plan.peak.bytes - elsewhere == pytest.approx(measured, rel=0.05)


START = "Once upon a time there was a sailor who loved the sea and the sun. "


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ppo.num_minibatches": 2, "runtime.micro_batch_tokens": 128},
        {"ppo.critic": "separate", "rollout.num_prompts": 8, "rollout.num_responses": 2},
    ],
    ids=["one pass", "micro-batches", "groups"],
)
def test_the_planned_peak_of_prompts_that_begin_alike_is_that_of_a_run(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Within 5 %, as above; planned as prompts that do not, it is larger where a pass holds many of them."""
    plan, measured = planned_and_measured(tmp_path, settings, start=START)
    assert plan.peak.bytes == pytest.approx(measured, rel=0.05)
    config = ppo_config(tmp_path, **{"data.prompts": [str(tmp_path / "prompts.jsonl")], **SHAPE, **settings})
    lengths = lengths_of(config, "ppo")
    assert lengths.common > 10
    apart = count_stage(config, "ppo", lengths=replace(lengths, common=0)).plan()
    assert (apart.peak.bytes > 1.1 * measured) == ("runtime.micro_batch_tokens" not in settings)


SHAPE = {"rollout.num_prompts": 16, "rollout.max_new_tokens": 24, "ppo.num_updates": 2, "ppo.num_epochs": 2}


def planned_and_measured(tmp_path: Path, settings: dict[str, Any], *, start: str = "") -> tuple[MachinePlan, int]:
    """The plan of a short run of PPO, and the live bytes at its peak."""
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("\n".join(f'{{"prompt": "{start}The boat {number}"}}' for number in range(10, 26)))
    config = ppo_config(tmp_path, **{"data.prompts": [str(rows)], **SHAPE, **settings})
    plan = count_stage(config, "ppo").plan()
    counter = LiveBytes()
    with counter:
        run_ppo(config, reward=scores)
    return plan, counter.peak


GRPO = {"ppo.advantage": "grpo", "ppo.kl_in": {"loss": "k3"}, "ppo.critic": "none", "rollout.num_responses": 4,
        "rollout.num_prompts": 4, "ppo.num_epochs": 1}  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {"ppo.num_epochs": 4},
        GRPO,
        {**GRPO, "ppo.advantage": "remax", "ppo.kl_coef": 0.0},
        {"ppo.critic": "separate", "ppo.num_critic_epochs": 2, "runtime.activation_checkpointing": True},
        {"ppo.num_minibatches": 2, "runtime.micro_batch_tokens": 64},
        {"adapter.kind": "lora"},
        {"ppo.critic": "separate", "ppo.num_minibatches": 4, "ppo.early_stop_kl": 0.5},
        {"ppo.critic": "frozen", "ppo.num_critic_epochs": 2},
        {"ppo.critic": "readout", "ppo.num_minibatches": 2},
        {"ppo.num_epochs": 0.5},
        {
            "ppo.critic": "none",
            "ppo.advantage": "rloo",
            "rollout.num_responses": 4,
            "rollout.num_prompts": 4,
            "ppo.num_epochs": 0.5,
            "ppo.kl_coef": 0.0,
        },
    ],
    ids=[
        "four epochs",
        "grpo",
        "remax",
        "separate critic",
        "micro-batches",
        "lora",
        "early stop",
        "frozen",
        "read-out",
        "half an epoch",
        "half an epoch of half the responses",
    ],
)
def test_the_planned_cost_of_an_update_is_that_of_a_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Up to the responses that end before the longest length, which the plan takes all of them to have."""
    prompts = [f"The boat {number}" for number in range(10, 26)]
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": text}) for text in prompts))
    shape: dict[str, Any] = {"rollout.num_prompts": 16, "rollout.max_new_tokens": 24}
    shape |= {"ppo.num_updates": 2, "ppo.num_epochs": 2}
    shape["rollout.missing_eos_score"] = {"subtract": 1}  # equal scores of cut-off responses would train nothing
    if has_model := settings.get("ppo.critic") == "separate":
        shape["reward"] = [{"source": str(save_tiny_reward_model(tmp_path / "reward"))}]
    config = ppo_config(tmp_path, **{"data.prompts": [str(rows)], **shape, **settings})
    run_ppo(config, reward=None if has_model else scores)
    _, row = read_metrics(tmp_path / "out")  # the first update may also fit a new critic's head
    assert row["response/length"] > 18
    assert count_stage(config, "ppo").plan().sft_steps == pytest.approx(row["cost/sft_steps"], rel=0.02)


DISTANCE = {"ppo.policy_loss": "kl_penalty_adaptive"}
WITHOUT_A_CRITIC = {"ppo.critic": "none", "ppo.advantage": "rloo", "rollout.num_responses": 2, "ppo.kl_coef": 0.0}


@pytest.mark.parametrize(
    ("settings", "epochs"),
    [
        ({}, 0.5),
        ({}, 4),
        ({"ppo.num_minibatches": 2}, 0.5),
        ({"ppo.num_minibatches": 2}, 4),
        ({"ppo.critic": "separate"}, 1),
        ({"ppo.critic": "separate"}, 4),
        (DISTANCE, 0.5),
        (DISTANCE, 4),
        (WITHOUT_A_CRITIC, 0.5),
        (WITHOUT_A_CRITIC, 1),
        ({"preset": "spo", "rollout.num_responses": 1}, 1),
    ],
)
def test_the_passes_of_a_plan_are_those_of_its_cost(tmp_path: Path, settings: dict[str, Any], epochs: float) -> None:
    """Up to the norms, losses and the like, which the cost leaves out. Sampling reads what it samples once."""
    shape = {"rollout.num_prompts": 8, "rollout.max_new_tokens": 16, "ppo.num_epochs": epochs}
    found = count_stage(ppo_config(tmp_path, **shape, **settings), "ppo")
    passes = sum(size for name, size in found.figures.items() if name[0] == "work" and name[2] == "flops")
    assert passes == pytest.approx(found.of_roles("cost")["update"], rel=0.04)


def test_held_out_prompts_and_a_judge_are_planned(tmp_path: Path) -> None:
    """64 of them are four times an update's, so the peak is theirs; the judge is held all the time."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("\n".join(f'{{"prompt": "The boat {number}"}}' for number in range(10, 74)))
    judge = save_tiny_reward_model(tmp_path / "judge")
    settings = {"ppo.eval_every": 1, "data.eval_prompts": [str(held_out)], "evaluate.judge": str(judge)}
    plan, measured = planned_and_measured(tmp_path, settings)
    assert plan.peak.name == "evaluation"
    assert plan.peak.bytes == pytest.approx(measured, rel=0.05)
    assert all(phase.held["weights", "judge"] > 0 for phase in plan.phases)


def test_a_check_of_the_critic_is_planned_as_sampled_at_once(tmp_path: Path) -> None:
    """A prompt and two prefixes with four continuations each, for 3 prompts, are as many as 4 responses to 9 prompts.

    The passes that read them have few tokens, so the peak is that of sampling.
    """
    shape = {"rollout.num_prompts": 9, "rollout.num_responses": 4, "rollout.max_new_tokens": 8}
    check = {"ppo.critic_check": 1, "ppo.critic_check.size": [3, 2, 4], "runtime.micro_batch_tokens": 40}
    plan = count_stage(ppo_config(tmp_path, **shape, **check), "ppo", lengths=Lengths((12,))).plan()
    peaks = {phase.name: phase.bytes for phase in plan.phases}
    assert peaks["evaluation"] == peaks["rollout"]


def test_greedy_responses_are_sampled_and_scored_as_well(tmp_path: Path) -> None:
    """ReMax has one per prompt: with two responses, half as much again."""
    reward = [{"source": str(save_tiny_reward_model(tmp_path / "reward"))}]
    shape = {"rollout.num_prompts": 4, "rollout.num_responses": 2, "ppo.critic": "none", "reward": reward}
    to_go, remax = (
        count_stage(ppo_config(tmp_path, **shape, **{"ppo.advantage": name}), "ppo").figures
        for name in ("to_go", "remax")
    )
    for phase, times in (("rollout", 1.5), ("reward", 1.5), ("train", 1.0)):
        assert remax["work", phase, "flops"] == pytest.approx(times * to_go["work", phase, "flops"])


def test_a_reward_model_reads_what_responses_begin_with_once(tmp_path: Path) -> None:
    """Four responses of 24 tokens to a prompt of 48 are 144 tokens to read, not 288."""
    shape = {"reward": [{"source": str(save_tiny_reward_model(tmp_path / "reward"))}], "rollout.max_new_tokens": 24}
    found = [
        count_stage(
            ppo_config(tmp_path, **shape, **{"rollout.num_prompts": 16 // same, "rollout.num_responses": same}),
            "ppo",
            lengths=Lengths((48,)),
        ).figures["work", "reward", "flops"]
        for same in (1, 4)
    ]
    assert found[1] == pytest.approx(found[0] / 2, rel=0.05)


def test_a_run_that_samples_ahead_is_planned_with_copies_and_passes_at_once(tmp_path: Path) -> None:
    """There is the engine's copy of the policy, and one for each of two updates ahead, with 4 bytes per weight."""
    shape = {"rollout.num_prompts": 16, "rollout.max_new_tokens": 24}
    found = [count_stage(ppo_config(tmp_path, **shape, **{"rollout.max_staleness": most}), "ppo") for most in (0, 2)]
    plain, ahead = ({phase.name: phase.held for phase in each.plan().phases} for each in found)
    copies = 3 * 4 * found[0].of_roles("parameters")["reference"]
    assert ahead["rollout"]["weights", "sampler"] == copies
    passes = sum(size for (kind, _), size in plain["rollout"].items() if kind not in ("weights", "optimizer"))
    for name in ("experience", "train", "step"):
        assert sum(ahead[name].values()) == pytest.approx(sum(plain[name].values()) + copies + passes, rel=0.001)


def test_pretraining_texts_are_planned_as_a_phase(tmp_path: Path) -> None:
    """They are longer than the responses, so the peak is theirs; twice as many take twice the products."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "Once there was a sailor who loved the sea. " * 4}) + "\n")
    settings = {"ppo.ptx_coef": 1.0, "data.pretraining": [str(texts)], "ppo.num_minibatches": 2}
    plan, measured = planned_and_measured(tmp_path, settings)
    assert plan.peak.name == "ptx"
    assert plan.peak.bytes == pytest.approx(measured, rel=0.05)
    flops = [
        count_stage(ppo_config(tmp_path, **settings, **{"ppo.ptx_coef.batch": batch}), "ppo").figures[
            "work", "ptx", "flops"
        ]
        for batch in (1, 2)
    ]
    assert flops[1] == pytest.approx(2 * flops[0])


def test_rows_are_planned_as_a_run_reads_them(tmp_path: Path) -> None:
    """Demonstrations with a prompt that is too long are left out, and texts to mix in have no template."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "Once there was a sailor."}) + "\n")
    mixed = {"ppo.ptx_coef": 1.0, "data.pretraining": [str(texts)], "data.template": "tldr"}
    found = lengths_of(ppo_config(tmp_path, **mixed), "ppo").pretraining
    assert found is not None
    assert not found.assumed
    rows = tmp_path / "rows.jsonl"
    prompts = ["The boat", "The boat sails. " * 20]
    rows.write_text("".join(json.dumps({"prompt": prompt, "completion": " and so on"}) + "\n" for prompt in prompts))
    given = {"data.demonstrations": [str(rows)], "data.max_prompt_tokens": 16, "data.max_length": 400}
    assert len(lengths_of(ppo_config(tmp_path, **given), "sft").prompts) == 1


def test_rows_are_planned_in_tokens_of_the_model_that_the_stage_starts_from(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "The boat", "chosen": " sails", "rejected": " sinks at once"}) + "\n")
    config = ppo_config(tmp_path, **{"data.comparisons": [str(rows)]})
    given = lengths_of(config, "reward")
    assert not given.assumed
    assert lengths_of(with_values(config, {"model": None, "reward_model.base": config.model}), "reward") == given


def test_a_cache_that_has_grown_is_planned_as_one(tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('{"prompt": "The boat"}\n' * 16)
    shape = {"rollout.num_prompts": 16, "rollout.max_new_tokens": 200}
    config = ppo_config(tmp_path, **{"data.prompts": [str(rows)], **shape})
    [rollout] = [each for each in count_stage(config, "ppo").plan().phases if each.name == "rollout"]
    model = json.loads((tmp_path / "policy" / "config.json").read_text())
    width = model["num_key_value_heads"] * model["hidden_size"] // model["num_attention_heads"]
    cache = 16 * 200 * 2 * model["num_hidden_layers"] * width * 4  # without the prompts
    assert cache < rollout.held["key–value cache", "policy"] < 1.5 * cache


def test_adapters_on_layers_of_another_class_are_planned(tmp_path: Path) -> None:
    """Falcon's linear layers are compared with a product, for which a plan has no contents."""
    save_policy_folder("falcon", tmp_path / "falcon")
    config = ppo_config(tmp_path, **{"adapter.kind": "lora", "adapter.rank": 2, "model": str(tmp_path / "falcon")})
    assert count_stage(config, "ppo").plan().peak.bytes > 0


def test_flops_of_a_product_of_experts_by_hand() -> None:
    rows, table = torch.zeros(6, 32), torch.zeros(2, 32, 64)
    counter = LiveBytes()
    with counter:
        nn.functional.grouped_mm(rows.bfloat16(), table.bfloat16(), offs=torch.tensor([2, 6], dtype=torch.int32))
    assert counter.work["flops"] == 2 * 6 * 32 * 64


def test_no_gradient_is_held_between_updates(tmp_path: Path) -> None:
    """Live bytes when an update ends: weights, moments and small tables; gradients would be as many as the weights."""
    shape = {"ppo.num_updates": 2, "rollout.num_prompts": 2, "rollout.max_new_tokens": 4}
    config = ppo_config(tmp_path, **{"ppo.critic": "separate", **shape})
    counter, ends = LiveBytes(), list[tuple[int, int, int]]()

    def see(update: int, roles: Roles) -> None:
        trained = [each for each in roles.actor_critic.parameters() if each.requires_grad]
        assert all(each.grad is None for each in trained)
        weights = [*roles.actor_critic.parameters(), *(roles.reference or nn.Module()).parameters()]
        moments = [each for state in roles.optimizer.state.values() for each in state.values()]
        held = sum(each.nbytes for each in (*weights, *moments))
        ends.append((counter.live, held, sum(each.nbytes for each in trained)))

    with counter:
        run_ppo(config, prompts=["The boat", "A sailor"], reward=scores, on_update=see)
    for live, held, gradients in ends:
        assert held <= live < held + gradients / 4
    assert len(ends) == 2


def test_no_experience_is_held_while_the_next_update_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, estimate = list[weakref.ref[Experience]](), Trainer.estimate
    alive = list[int]()

    def noting(trainer: Trainer, *arguments: Any, **options: Any) -> Experience:
        experience = estimate(trainer, *arguments, **options)
        held.append(weakref.ref(experience))
        return experience

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        alive.append(sum(each() is not None for each in held))
        return scores(prompts, completions)

    monkeypatch.setattr(Trainer, "estimate", noting)
    shape = {"ppo.num_updates": 3, "rollout.num_prompts": 2, "rollout.max_new_tokens": 4}
    run_ppo(ppo_config(tmp_path, **shape), prompts=["The boat", "A sailor"], reward=reward)
    assert alive == [0, 0, 0]


def test_a_plan_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alternatives = [{"ppo.critic": "shared"}, {"optimization.optimizer": "adamw8bit"}]
    monkeypatch.setattr("kedge_plan.plan._alternatives", lambda *_: alternatives)
    config = ppo_config(tmp_path, **{"ppo.critic": "separate"})
    (tmp_path / "policy" / "model.safetensors").unlink()
    text = plan_machine(config, "ppo", device_name="h100", price_per_hour=2.0)
    assert "peak memory: " in text
    assert "fits into 78 GiB (the memory of H100)" in text
    assert "  ppo.critic=shared " in text
    assert " at 2 per hour" in text
    assert re.search(r"\ncost per update: \d\.\d steps of supervised fine-tuning on the same tokens\n", text)
    for row in ("weights, reference", "gradients, critic", "optimizer, policy", "activations, policy"):
        assert f"\n{row} " in text


def test_devices_have_names_and_sizes() -> None:
    assert find_device("A100-40").memory == pytest.approx(40 * 2**30, rel=0.03)
    assert find_device("cpu:24GiB").memory == 24 * 2**30
    assert find_device("cpu:1.5 GB").memory == 1.5e9
    assert (find_device("gpu:80GiB").memory, find_device("gpu:80GiB").accelerator) == (80 * 2**30, True)
    for name in ("b300", "cpu:", "cpu:0GiB", "cpu:24", "h100:80GB"):
        with pytest.raises(ConfigError, match="is unknown; name one of h100, h200"):
            find_device(name)


def test_a_plan_knows_its_peak_and_its_run() -> None:
    phases = (PlannedPhase("rollout", {("weights", "policy"): 10.0}, 1.0), PlannedPhase("train", {}, 3.0))
    plan = MachinePlan("ppo", "update", phases, updates=5, process=7.0, overhead=0.1)
    assert (plan.peak.name, plan.needed, plan.seconds, plan.whole) == ("rollout", 18.0, 4.0, 20.0)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("stage", "start"), [("sft", 0), ("reward", 0), ("reward", 40)])
def test_the_planned_peak_of_a_supervised_stage_is_that_of_a_run(
    stage: str, start: int, again: bool, tmp_path: Path
) -> None:
    """Within 5 %, as above; rows of one length, of which four, or more if they begin alike, are read in a pass."""
    size = {"vocab_size": 2000, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    save_shallow(LlamaConfig(**size, num_hidden_layers=3), tmp_path / "model")
    texts = [{"prompt": "z" * start + prompt} for prompt in text_of([60 - start] * 16)]
    answers = {"completion": "abcde"} if stage == "sft" else {"chosen": "abcde", "rejected": "fghij"}
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({**row, **answers}) for row in texts))
    section, data = ("sft", "demonstrations") if stage == "sft" else ("reward_model", "comparisons")
    flags = {"model": str(tmp_path / "model"), "out": str(tmp_path / "out"), f"data.{data}": [str(rows)]}
    budget = {f"{section}.batch_size": 8, "runtime.micro_batch_tokens": 264 if stage == "sft" else 288}
    fixed = {"runtime.device": "cpu", "data.eval_fraction": 0.0, "runtime.activation_checkpointing": again}
    config = load_config(None, (), {**flags, **budget, **fixed}, None, stage=stage)
    planned = count_stage(config, stage).plan()
    counter = LiveBytes()
    with counter:
        (run_sft if stage == "sft" else run_reward)(config, planned=planned)
    assert lengths_of(config, stage).common == start
    assert memory_of(tmp_path / "out")["planned_bytes"] == round(planned.needed)
    assert planned.peak.bytes == pytest.approx(counter.peak, rel=0.05)
    assert planned.updates == 2 * (config.sft if stage == "sft" else config.reward_model).num_epochs
    kept = count_stage(with_values(config, {"runtime.activation_checkpointing": False}), stage).plan()
    assert (planned.peak.bytes < kept.peak.bytes) == again


def test_a_run_ends_with_what_was_planned_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ppo_config(tmp_path, **{"ppo.num_updates": 1, "rollout.num_prompts": 2, "rollout.max_new_tokens": 4})
    plan = MachinePlan("ppo", "update", (PlannedPhase("train", {("weights", "policy"): 3.0 * GIB}),))
    result = run_ppo(config, prompts=["The boat", "A sailor"], reward=scores, planned=plan)
    memory = memory_of(result.folder)
    assert memory["planned_bytes"] == 3 * GIB
    assert 2**27 < memory["measured_bytes"] < 2**36
    assert "peak memory: 3.0 GiB planned, " in capsys.readouterr().err


def test_data_that_cannot_be_read_is_said_and_not_replaced_by_assumptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = save_tiny_policy(tmp_path / "policy"), tmp_path / "gone.jsonl"
    capsys.readouterr()  # what saving the model prints
    monkeypatch.setattr(sys, "argv", ["kedge", "plan", "ppo", "--model", str(model), "--prompts", str(data)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "gone.jsonl" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate"], "kedge plan has no command 'generate'; its commands are sft, reward, critic, ppo, rlhf"),
        (["pppo"], "kedge plan has no command 'pppo'; did you mean ppo?"),
        (["sft", "--num_epochs", "2"], "--num_epochs is not an option; fields are set without dashes: num_epochs="),
        (["ppo"], "kedge plan ppo needs model: pass --model"),
        (["ppo", "--model", "./no-such"], "model './no-such': no such folder"),
    ],
)
def test_an_impossible_plan_is_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kedge", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")


def test_a_card_is_named_by_device_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """--card was an option of the calculator for clusters, and without --cluster gave the figures of the CPU."""
    monkeypatch.setattr(sys, "argv", ["kedge", "plan", "ppo", "--model", "m", "--card", "H100"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "card is not a setting of ppo" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "moves"), [("h100", True), ("m3-64", False), ("cpu:24GiB", False)])
def test_the_optimizers_state_can_be_moved_from_a_gpu_alone(tmp_path: Path, name: str, moves: bool) -> None:
    """From a GPU it is on the device only in steps, in parts."""
    device, config = find_device(name), ppo_config(tmp_path, **{"runtime.offload": ["optimizer"]})
    assert as_on(device, config).runtime.offload == (["optimizer"] if moves else [])
    plan = count_stage(as_on(device, config), "ppo", accelerator=device.accelerator).plan()
    held = {
        phase.name for phase in plan.phases for (kind, _), size in phase.held.items() if kind == "optimizer" and size
    }
    assert held == ({"step"} if moves else {"rollout", "experience", "train", "step"})
    plain = with_values(config, {"runtime.offload": []})
    offered = [*_alternatives(count_stage(plain, "ppo"), device)]
    assert ({"runtime.offload": ["optimizer"]} in offered) is moves


def test_a_model_without_contents_has_the_shapes_of_a_real_one() -> None:
    torch.manual_seed(0)
    layer, rows = nn.Linear(4, 6), torch.randn(3, 4)
    hollow, real = Hollow.like(rows), layer(rows)
    counter = LiveBytes()
    with counter, torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        product = nn.functional.linear(hollow, layer.weight, layer.bias)
    assert (product.shape, product.dtype, product.device) == (real.shape, torch.bfloat16, rows.device)
    mask = torch.tensor([True, False, True])
    assert product[mask].shape == (2, 6)  # a mask with contents selects what it does
    assert product[Hollow.like(mask)].shape == (3, 6)  # one without all
    assert (float(product.sum()), bool((product > 0).all()), product[0].tolist()) == (1.0, True, [1.0] * 6)
    assert counter.work["flops"] == 2 * 3 * 4 * 6


def test_a_tensors_label_is_that_of_its_peak() -> None:
    weight, counter = Hollow.like(torch.zeros(256)), LiveBytes()
    counter.hold([weight], ("weights", "policy"))
    counter.label = ("activations", "policy")
    with counter:
        first = weight * 2.0
        counter.rename(counter.label, ("logits", "policy"))
        second = first * 2.0
        del first, second
    assert counter.at_peak == {("weights", "policy"): 1024, ("logits", "policy"): 1024, ("activations", "policy"): 1024}
    assert counter.live == 1024
    counter.hold([weight], ("weights", "reference"), share=0.5)
    assert counter.live == 512


def critic_config(tmp_path: Path, **settings: Any) -> Config:
    """A model of 3 layers, 16 prompts and 2 responses to each."""
    size = {"vocab_size": 2000, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    save_shallow(LlamaConfig(**size, num_hidden_layers=3), tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in text_of([28] * 16)))
    flags = {"model": str(tmp_path / "model"), "out": str(tmp_path / "out"), "data.prompts": [str(rows)]}
    shape = {"rollout.num_prompts": 8, "rollout.max_new_tokens": 16, "critic.num_responses": 2, "critic.batch_size": 8}
    fixed = {"runtime.device": "cpu", "runtime.precision": "fp32", "data.eval_fraction": 0.25}
    return load_config(None, (), {**flags, **shape, **fixed, **settings}, None, stage="critic")


@pytest.mark.parametrize(
    "settings",
    [
        {"critic.kind": "separate", "runtime.micro_batch_tokens": 128},
        {"critic.kind": "shared", "ppo.score_at": "after_last"},
    ],
    ids=["separate", "shared"],
)
def test_the_planned_peak_of_a_critics_training_is_that_of_a_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Within 5 %, as above. 12 prompts are trained on, 4 held out: two parts and one, of 8 prompts at most."""
    config = critic_config(tmp_path, **settings)
    planned = count_stage(config, "critic").plan()
    counter = LiveBytes()
    with counter:
        run_critic(config, reward=scores, planned=planned)
    assert memory_of(tmp_path / "out")["planned_bytes"] == round(planned.needed)
    assert planned.peak.bytes == pytest.approx(counter.peak, rel=0.05)
    assert planned.updates == 3


def test_the_peak_of_a_deep_model_is_extrapolated_from_shallow_ones(tmp_path: Path) -> None:
    """Within 3 %; the model has five layers, those that are counted two and three."""
    size = {"vocab_size": 2000, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    save_shallow(LlamaConfig(**size, num_hidden_layers=5), tmp_path / "policy")
    shape = {"rollout.num_prompts": 8, "rollout.max_new_tokens": 16, "ppo.num_updates": 2, "ppo.num_epochs": 2}
    fixed = {"runtime.device": "cpu", "runtime.num_fixed_prompts": 0, "ppo.num_minibatches": 2}
    flags = {"model": str(tmp_path / "policy"), "out": str(tmp_path / "out"), **shape, **fixed}
    config = load_config(None, (), flags, None, stage="ppo")
    planned = count_stage(config, "ppo", lengths=Lengths((12,))).plan().peak.bytes
    counter = LiveBytes()
    with counter:
        run_ppo(config, prompts=text_of([12] * 8), reward=scores)
    assert planned == pytest.approx(counter.peak, rel=0.03)


def test_a_chain_is_planned_stage_by_stage_with_its_critic() -> None:
    settings = {"model": "m", "critic.kind": "shared", "rlhf.train_critic": True}
    stages = list(rlhf_stages(load_config(None, (), settings, None, stage="rlhf")))
    assert [name for name, _ in stages] == ["sft", "reward", "critic", "ppo"]
    for _, config in stages[2:]:
        assert [term.source for term in config.reward] == ["m"]
    assert stages[3][1].ppo.resolved_critic == "shared"


@pytest.mark.parametrize("source", ["r.py:score", "m"], ids=["function", "the trained model's start"])
def test_a_chain_is_planned_with_its_reward_model_and_further_rewards(source: str) -> None:
    config = load_config(None, (), {"model": "m", "reward": [source]}, None, stage="rlhf")
    [*_, (name, ppo)] = rlhf_stages(config)
    assert name == "ppo"
    assert [(term.source, term.name) for term in ppo.reward] == [("m", "trained"), (source, None)]


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "bloom", "falcon", "mistral", "gemma3_text", "mixtral", "jamba"])
def test_models_whose_attention_is_not_packed_are_planned(name: str, tmp_path: Path) -> None:
    """Rows are longer than the windows of those that have one."""
    tiny_config(name).save_pretrained(tmp_path)
    settings = {"rollout.num_prompts": 4, "rollout.max_new_tokens": 16, "runtime.precision": "fp32"}
    config = load_config(None, (), {"model": str(tmp_path), "runtime.device": "cpu", **settings}, None, stage="ppo")
    plan = count_stage(config, "ppo", lengths=Lengths((16,))).plan()
    assert [phase.name for phase in plan.phases] == ["rollout", "experience", "train", "step"]


def test_a_trained_critic_is_planned_although_its_kind_is_not_named(tmp_path: Path) -> None:
    """It is a separate model if no value head is saved with it, as of a policy."""
    config = ppo_config(tmp_path, **{"ppo.critic_init": str(tmp_path / "policy")})
    found = count_stage(config, "ppo")
    named = count_stage(with_values(config, {"ppo.critic": "separate"}), "ppo")
    assert list(found.of_roles("parameters")) == ["policy", "critic", "reference"]
    assert found.plan().peak.bytes == named.plan().peak.bytes
    assert {"ppo.critic": "shared"} in [*_alternatives(found, find_device("h100"))]
    others = [changes for changes, _ in proposals(found, find_device("h100"))]
    assert "ppo.critic=shared" not in others  # a run would refuse it


@pytest.mark.parametrize("field", ["model", "ppo.reference"])
def test_a_reward_model_is_no_policy(tmp_path: Path, field: str) -> None:
    """A run refuses it, since its weights have no language model's head, but those of a tied one have."""
    scorer = save_tiny_reward_model(tmp_path / "reward")
    config = ppo_config(tmp_path, **{field: str(scorer)})
    with pytest.raises(ModelError, match=r"reward' is a LlamaForSequenceClassification, which lacks the head"):
        count_stage(config, "ppo")
    settings = json.loads((scorer / "config.json").read_text())
    (scorer / "config.json").write_text(json.dumps({**settings, "tie_word_embeddings": True}))
    assert count_stage(config, "ppo").plan().peak.bytes > 0


def test_a_schedule_of_the_epochs_is_planned_with_their_mean(tmp_path: Path) -> None:
    """4, 3 and 2 epochs in three updates take as long as 3 in each."""
    config, speed = ppo_config(tmp_path, **{"ppo.num_updates": 3, "ppo.num_epochs": 3}), find_device("h100").speed
    scheduled = with_values(config, {"ppo.num_epochs": 1, "schedules": {"ppo.num_epochs": {1: 4, 3: 2}}})
    seconds = [
        {phase.name: phase.seconds for phase in count_stage(each, "ppo", accelerator=True).plan(speed=speed).phases}
        for each in (config, scheduled)
    ]
    assert seconds[1] == pytest.approx(seconds[0])


def test_frozen_weights_in_the_hosts_memory_are_on_a_gpu_for_their_passes_alone(tmp_path: Path) -> None:
    h100 = find_device("h100")
    plain = ppo_config(tmp_path, reward=[{"source": str(save_tiny_reward_model(tmp_path / "reward")), "name": "liked"}])
    found = count_stage(plain, "ppo", accelerator=True)
    moved = count_stage(with_values(plain, {"runtime.offload": ["frozen"]}), "ppo", accelerator=True)
    before, after = ({phase.name: phase for phase in each.plan(h100, h100.speed).phases} for each in (found, moved))
    sizes = {role: size for (kind, role), size in before["train"].held.items() if kind == "weights"}
    assert sizes.keys() == {"policy", "reference", "reward: liked"}
    assert all(phase.held["weights", role] == size for phase in before.values() for role, size in sizes.items())
    for name, also in (("rollout", None), ("reward", "reward: liked"), ("experience", "reference"), ("train", None)):
        held = {role: size for (kind, role), size in after[name].held.items() if kind == "weights" and size}
        assert held == {role: sizes[role] for role in ("policy", also) if role is not None}
    for name, role in (("reward", "reward: liked"), ("experience", "reference")):
        took = [phase.seconds for phase in (before[name], after[name])]
        assert took[0] is not None
        assert took[1] == pytest.approx(took[0] + sizes[role] / 20e9)
    others = dict(proposals(found, h100, h100.speed))
    assert others["runtime.offload=frozen"].peak.bytes == moved.plan().peak.bytes < found.plan().peak.bytes
    assert {"runtime.offload": ["frozen"]} not in [*_alternatives(found, find_device("m3-64"))]

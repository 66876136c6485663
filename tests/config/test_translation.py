"""`kedge config from-verl` and `from-trl`: files of our own making in their forms, expected values by hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kedge.cli import main
from kedge.config import check_stage, load_config
from kedge.config.explain.describe import find_field
from kedge.config.translation import as_yaml, read_settings, translate
from kedge_base.errors import ConfigError
from kedge_base.libraries import DEFAULTS, LIBRARIES, RULES
from kedge_tasks.verify import number

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
GRPO = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.model.path": "org/small",
    "data.train_files": ["rows/train.parquet"],
    "data.train_batch_size": 96,
    f"{ACTOR}ppo_mini_batch_size": 24,
    f"{ROLLOUT}n": 6,
    "custom_reward_function.path": "pay.py",
}
PPO = {**GRPO, "algorithm.adv_estimator": "gae", f"{ROLLOUT}n": 1}

SCRIPT = """\
set -x
# Sizes; main_ppo is started below.
batch=64
mini=$((batch / 4))
LENGTH=${LENGTH_OF_ANSWERS:-$((1024 * 2))}
files="['rows/a.parquet', 'rows/b.parquet']"
MORE=(
    trainer.total_training_steps=50
    trainer.save_freq=10
)
SAMPLING="
    actor_rollout_ref.rollout.temperature=0.8 \\
    actor_rollout_ref.rollout.n=4"

HYDRA_FULL_ERROR=1 python3 -m verl.trainer.main_ppo --config-name=ppo_trainer \\
    algorithm.adv_estimator=rloo \\
    data.train_files="$files" \\
    data.train_batch_size=${batch} data.max_response_length=$LENGTH \\
    actor_rollout_ref.actor.ppo_mini_batch_size=$mini \\
    actor_rollout_ref.model.path=org/small \\
    +reward_model.enable=True 'reward_model.model.path=org/judge' \\
    trainer.logger='["console","wandb"]' trainer.project_name=tides \\
    "${MORE[@]}" $SAMPLING $@
"""


def verl(given: dict[str, Any], num_prompts: int | None = None) -> dict[str, Any]:
    return translate("verl", given, num_prompts)[0]


def test_batches_are_counted_in_prompts() -> None:
    settings, lines = translate("verl", {**GRPO, "trainer.total_epochs": 5}, num_prompts=1000)
    assert (settings["rollout.num_prompts"], settings["rollout.num_responses"]) == (96, 6)
    assert settings["ppo.num_minibatches"] == 4  # 96 prompts, 24 of them in each minibatch
    assert settings["ppo.num_updates"] == 50  # 10 whole batches of 96 in 1000 prompts, 5 times
    assert "ppo.num_minibatches: 96 prompts / 24 of a minibatch, which has 144 responses" in lines
    assert "ppo.num_updates" not in verl({**GRPO, "trainer.total_epochs": 5})
    assert verl({**GRPO, "trainer.total_training_steps": 7}, 1000)["ppo.num_updates"] == 7


@pytest.mark.parametrize(
    ("given", "coef", "kl_in"),
    [
        ({}, 0.0, None),
        ({f"{ACTOR}use_kl_loss": True}, 0.001, {"loss": "k3"}),
        ({f"{ACTOR}use_kl_loss": True, f"{ACTOR}kl_loss_type": "mse"}, 0.001, {"loss": "k2"}),
        ({f"{ACTOR}use_kl_loss": True, f"{ACTOR}kl_loss_type": "kl"}, 0.001, {"loss": "k2"}),
        ({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.02}, 0.02, {"loss": "k3"}),
        (
            {"algorithm.use_kl_in_reward": True, "algorithm.adv_estimator": "rloo", "algorithm.kl_penalty": "k3"},
            0.001,
            {"reward": "k3"},
        ),
    ],
)
def test_the_kl_is_where_verl_has_it_unless_kedge_refuses(
    given: dict[str, Any], coef: float, kl_in: dict[str, str] | None
) -> None:
    settings = verl({**GRPO, **given})
    assert (settings["ppo.kl_coef"], settings.get("ppo.kl_in")) == (coef, kl_in)


def test_an_adaptive_controller_has_another_unit() -> None:
    given = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.horizon": 500}
    settings, lines = translate("verl", {**PPO, **given})
    assert settings["ppo.kl_controller"] == {"ziegler": {"horizon": 500}}
    assert any("in nats per token: set ppo.kl_controller.target" in line for line in lines)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"ppo.clip_range": 0.2, "ppo.clip_range_high": 0.2, "ppo.policy_loss": {"dual_clip": 3.0}}),
        ({f"{ACTOR}clip_ratio_high": 0.28}, {"ppo.clip_range": 0.2, "ppo.clip_range_high": 0.28}),
        # clip_ratio_low and clip_ratio_high, which have defaults, come first in verl.
        ({f"{ACTOR}clip_ratio": 0.1}, {"ppo.clip_range": 0.2}),
        ({f"{ACTOR}clip_ratio": 0.1, f"{ACTOR}clip_ratio_low": None}, {"ppo.clip_range": 0.1}),
        ({f"{ACTOR}policy_loss.loss_mode": "gspo"}, {"ppo.ratio": "sequence", "ppo.policy_loss": "clipped"}),
        (
            {f"{ACTOR}policy_loss.loss_mode": "cispo", f"{ACTOR}clip_ratio_low": 10, f"{ACTOR}clip_ratio_high": 0.3},
            {"ppo.policy_loss": "cispo", "ppo.clip_range_high": 0.3, "ppo.clip_range": 0.2},
        ),
        ({f"{ACTOR}loss_agg_mode": "seq-mean-token-mean"}, {"ppo.aggregation": "sequence"}),
        ({"algorithm.norm_adv_by_std_in_grpo": False}, {"ppo.advantage": "dr_grpo"}),
        ({f"{ACTOR}optim.lr_warmup_steps_ratio": 0.1}, {"ppo.schedule": {"constant": 0.1}}),
        (
            {f"{ACTOR}optim.lr_warmup_steps": 5, "trainer.total_training_steps": 50},
            {"ppo.schedule": {"constant": 0.1}},
        ),
        ({f"{ACTOR}optim.warmup_style": "cosine"}, {"ppo.schedule": "cosine"}),
        (
            {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 10},
            {"ppo.constant_groups": {"resample": 9}},
        ),
        (
            {"actor_rollout_ref.model.lora_rank": 64, "actor_rollout_ref.model.lora_alpha": 32},
            {"adapter.kind": "lora", "adapter.rank": 64, "adapter.alpha": 32},
        ),
        ({"data.truncation": "left"}, {"data.truncate": "keep_end"}),
        ({"trainer.test_freq": -1, "data.val_files": "v.parquet"}, {"data.eval_prompts": None}),
        ({"trainer.test_freq": 5, "data.val_files": "v"}, {"data.eval_prompts": "v", "ppo.eval_every": 5}),
        ({}, {"reward": "pay.py:compute_score", "ppo.critic": None, "ppo.critic_learning_rate": None}),
        ({"custom_reward_function.name": "pay"}, {"reward": "pay.py:pay"}),
    ],
)  # fmt: skip
def test_settings_of_grpo(given: dict[str, Any], expected: dict[str, Any]) -> None:
    settings = verl({**GRPO, **given})
    assert {name: settings.get(name) for name in expected} == expected


def test_a_critic_is_a_model_of_its_own() -> None:
    settings, lines = translate("verl", {**PPO, "critic.model.path": "org/critic", "critic.ppo_mini_batch_size": 48})
    assert settings["ppo.critic"] == "separate"
    assert settings["ppo.critic_init"] == "org/critic"
    assert settings["ppo.critic_learning_rate"] == 1e-5
    assert (settings["ppo.value_unit"], settings["ppo.value_clip_range"]) == ("score", 0.5)
    assert "critic.ppo_mini_batch_size=48: the critic has the policy's minibatches" in lines
    assert verl({**PPO, "critic.model.path": "org/small"})["ppo.critic_init"] == "policy"
    assert verl({**PPO, "critic.ppo_epochs": 2})["ppo.num_critic_epochs"] == 2


def test_what_has_no_counterpart_is_listed_once_with_its_reason() -> None:
    given = {f"{ROLLOUT}top_p": 0.9, "trainer.nnodes": 2, "reward.reward_kwargs.x": 1, f"{ACTOR}fsdp_config.a.b": 1}
    lines = translate("verl", {**GRPO, **given, "data.shuffle": True})[1]
    assert any(
        line.startswith(f"{ROLLOUT}top_p=0.9: no counterpart: with a filter the KL would be wrong") for line in lines
    )
    assert any(line.startswith("trainer.nnodes=2: no counterpart: torchrun") for line in lines)
    assert any(line.startswith(f"{ACTOR}fsdp_config: see runtime.parallel") for line in lines)
    assert not any("data.shuffle" in line for line in lines)  # always so in kedge
    assert "`" not in "".join(lines)


def test_what_is_switched_off_in_a_template_is_listed() -> None:
    given = {"data.apply_chat_template_kwargs.enable_thinking": False, f"{ACTOR}other.switch": False}
    lines = translate("verl", {**GRPO, **given})[1]
    assert "data.apply_chat_template_kwargs: no counterpart: data.chat_template can be a template with" in "".join(
        lines
    )
    assert "other" not in " ".join(lines).replace("other defaults", "")


def test_a_second_value_of_a_field_is_listed_if_it_differs() -> None:
    settings, lines = translate("verl", {**PPO, f"{ACTOR}grad_clip": 0.5, "critic.grad_clip": 0.7})
    assert settings["optimization.max_grad_norm"] == 0.5
    assert "critic.grad_clip=0.7: see optimization.max_grad_norm" in lines
    lines = translate("verl", {**PPO, f"{ACTOR}grad_clip": 0.5, "critic.grad_clip": 0.5})[1]
    assert "grad_clip" not in "".join(lines)


def test_earlier_aggregation_of_gspo_is_said() -> None:
    mode = {f"{ACTOR}policy_loss.loss_mode": "gspo"}
    said = "loss_mode=gspo: verl 0.7 and earlier average by response, whatever loss_agg_mode says"
    assert any(line.startswith(said) for line in translate("verl", {**GRPO, **mode})[1])
    mode[f"{ACTOR}loss_agg_mode"] = "seq-mean-token-mean"
    assert not any(line.startswith(said) for line in translate("verl", {**GRPO, **mode})[1])


def test_a_value_with_line_breaks_stays_in_its_comment() -> None:
    given = {f"{ROLLOUT}top_p": "0.9\nmodel: other", f"{ACTOR}optim.lr_warmup_steps": 5, "reward_model.x\ny": "\x1b[2J"}
    settings, lines = translate("verl", {**GRPO, **given})
    assert not any("\n" in line or "\x1b" in line for line in lines)
    assert yaml.safe_load(as_yaml(settings, lines))["model"] == "org/small"


def test_an_estimator_without_a_counterpart_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.adv_estimator=gpg has no counterpart in kedge; name another one"):
        verl({**GRPO, "algorithm.adv_estimator": "gpg"})
    with pytest.raises(ConfigError, match=r"do not fit together in kedge: ppo.advantage=grpo compares"):
        verl({**GRPO, f"{ROLLOUT}n": 1})


def test_a_script_that_starts_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LENGTH_OF_ANSWERS", raising=False)
    (tmp_path / "run.sh").write_text(SCRIPT)
    settings, lines = translate("verl", read_settings(tmp_path / "run.sh", [f"{ROLLOUT}n=8"]).settings)
    expected = {
        "ppo.advantage": "rloo",
        "data.prompts": ["rows/a.parquet", "rows/b.parquet"],
        "rollout.num_prompts": 64,
        "ppo.num_minibatches": 4,
        "rollout.max_new_tokens": 2048,
        "rollout.num_responses": 8,
        "rollout.temperature": 0.8,
        "reward": "org/judge",
        "ppo.num_updates": 50,
        "checkpoint.every": 10,
        "runtime.loggers": {"wandb": "tides"},
    }
    assert {name: settings.get(name) for name in expected} == expected
    assert not any(line.startswith("set ") for line in lines)
    (tmp_path / "other.sh").write_text("echo nothing\n")
    with pytest.raises(
        ConfigError, match=r"other.sh: is neither YAML with settings, nor a script that starts verl's main_ppo or"
    ):
        read_settings(tmp_path / "other.sh", [])


def test_hydras_files(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "data: {max_prompt_length: 64}\nactor_rollout_ref:\n  rollout:\n"
        "    prompt_length: '${oc.select:data.max_prompt_length,512}'\n    n: '${.group}'\n    group: 3\n"
        "    response_length: '${oc.select:data.nothing,128}'\n"
    )
    found = read_settings(config, ["+data.seed=4"]).settings
    assert found[f"{ROLLOUT}prompt_length"] == 64
    assert found[f"{ROLLOUT}n"] == 3
    assert found[f"{ROLLOUT}response_length"] == 128
    assert found["data.seed"] == 4
    overrides = tmp_path / "overrides.yaml"
    overrides.write_text("- data.train_batch_size=32\n- actor_rollout_ref.actor.optim.lr=1e-6\n")
    assert read_settings(overrides, []).settings == {"data.train_batch_size": 32, f"{ACTOR}optim.lr": 1e-6}
    with pytest.raises(ConfigError, match=r"--set lr: must be NAME=VALUE"):
        read_settings(config, ["lr"])


def test_trls_ppo() -> None:
    given = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "num_mini_batches": 4}
    given |= {"total_episodes": 1000, "sft_model_path": "a", "reward_model_path": "b", "dataset_name": "org/d"}
    settings, lines = translate("TRL", {**given, "dataset_train_split": "train", "missing_eos_penalty": 1.0})
    expected = {
        "rollout.num_prompts": 32,
        "ppo.num_minibatches": 4,
        "ppo.num_updates": 32,  # 1000 / 32, rounded up
        "ppo.num_epochs": 4,
        "rollout.temperature": 0.7,
        "ppo.gae_lambda": 0.95,
        "ppo.kl_coef": 0.05,
        "ppo.critic": "separate",
        "ppo.value_clip_range": 0.2,
        "optimization.max_grad_norm": None,
        "rollout.missing_eos_score": {"subtract": 1.0},
        "data.prompts": "org/d:train",
        "model": "a",
        "reward": "b",
    }
    assert {name: settings[name] for name in expected} == expected
    assert any(line.startswith("rollout.num_prompts: 16 rows × 2 steps of accumulation, on one dev") for line in lines)


def test_trls_ppo_before_0_12() -> None:
    given = {"model_name": "a", "batch_size": 64, "mini_batch_size": 8, "gradient_accumulation_steps": 2, "steps": 1000}
    settings, lines = translate("TRL", {**given, "init_kl_coef": 0.1, "kl_penalty": "mse"})
    assert (settings["rollout.num_prompts"], settings["ppo.num_minibatches"], settings["ppo.num_updates"]) == (
        64,
        4,
        16,
    )
    assert settings["ppo.kl_controller"] == {"ziegler": {"target": 6.0, "horizon": 10000, "wait": 0.0}}
    assert (settings["ppo.kl_coef"], settings["ppo.kl_in"]) == (0.1, {"reward": "k2"})
    assert lines[:2] == ["set data.prompts", "set reward"]
    assert settings["optimization.max_grad_norm"] is None
    assert translate("TRL", {**given, "max_grad_norm": 0.5})[0]["optimization.max_grad_norm"] == 0.5


TRAINING = """
import torch
import trl

NAME = "org/small"
BASE = NAME
rows = load_dataset("org/questions", split="train").filter(len)

def short(completions, **columns):
    return [-len(text) for text in completions]

args = trl.GRPOConfig(
    output_dir=f"runs/{NAME}",
    learning_rate=2e-5,
    num_generations=4,
    per_device_train_batch_size=16,
    max_completion_length=float(input()),
    beta=-(-0.5),
    bf16=True,
)
model = AutoModelForCausalLM.from_pretrained(BASE, torch_dtype=torch.float32)
lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
trl.GRPOTrainer(model=model, reward_funcs=[short], args=args, train_dataset=rows, peft_config=lora).train()
"""


def test_a_python_script_of_trls_is_read_and_not_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    read = read_settings(script, ["num_train_epochs=2"])
    settings, lines = translate("TRL", read.settings, 40, read.trainer)
    expected = {
        "model": "org/small",
        "data.prompts": "org/questions:train",
        "ppo.learning_rate": 2e-5,
        "rollout.num_responses": 4,
        "rollout.num_prompts": 4,
        "ppo.num_updates": 20,  # 2 passes over 40 prompts, 4 in each update
        "rollout.max_new_tokens": 512,  # TRL's default, as the line says
        "adapter.rank": 4,
        "adapter.alpha": 8,
        "adapter.target_modules": ["q_proj", "v_proj"],
        "runtime.precision": "bf16",
    }
    assert {name: settings.get(name) for name in expected} == expected
    assert "reward" not in settings
    computed = [line.partition(":")[0] for line in lines if "computed by the script" in line]
    assert computed == ["max_completion_length=float(input())", "beta=--0.5", "reward_funcs=[short]"]
    again = read_settings(script, ["max_completion_length=64"])
    assert translate("TRL", again.settings, 40, again.trainer)[0]["rollout.max_new_tokens"] == 64
    script.write_text("GRPOConfig(seed=1)\nload_dataset('org/a', split=['train', 'test'])")
    read = read_settings(script, [])
    settings, lines = translate("TRL", read.settings, None, read.trainer)
    assert settings["data.prompts"] == "org/a"
    assert (
        "dataset_train_split=['train', 'test']: computed by the script; --set dataset_train_split=… gives a value"
        in lines
    )
    script.write_text("GRPOConfig()\nload_dataset('json', data_files='rows.jsonl', split='train')")
    read = read_settings(script, ["num_generations=2"])
    assert translate("TRL", read.settings, None, read.trainer)[0]["data.prompts"] == "rows.jsonl"
    script.write_text("args = PPOConfig(learning_rate=1e-6, num_train_epochs=1)")
    read = read_settings(script, [])
    assert translate("TRL", read.settings, None, read.trainer)[0]["ppo.advantage"] == "gae"
    for text, said in (
        ("print(", r"train.py: is not Python: .* in line 1"),
        ("rows = 1\nGRPOConfig(", "in line 2"),
        ("print()", "train.py: is neither YAML .* nor Python"),
        ("x = '\0'", "train.py: is not Python: source code .* null bytes"),
        (f"x = {'(' * 9999}", "train.py: is not Python: "),
    ):
        script.write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_settings(script, [])


@pytest.mark.parametrize("funcs", ["accuracy_reward", "right", "[think_format_reward, right]"])
def test_trls_own_reward_of_answers_is_a_verifier(funcs: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from trl.rewards import accuracy_reward, think_format_reward\n"
        "from trl.rewards import accuracy_reward as right\n"
        f"GRPOTrainer(model='org/small', reward_funcs={funcs}, train_dataset=rows)\n"
    )
    read = read_settings(script, [])
    settings, lines = translate("TRL", read.settings, None, read.trainer)
    assert (settings["reward"], settings["data.columns.answer"]) == ("kedge_tasks.verify:math", "solution")
    [line] = [line for line in lines if line.startswith("reward: ")]
    assert ("think_format_reward" in line) == ("think_format_reward" in funcs)


def test_a_command_that_starts_a_script_of_trls(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "MODEL=org/policy\nSTEPS=3\naccelerate launch --num_processes 2 examples/scripts/ppo/ppo.py \\\n"
        "  --sft_model_path $MODEL --learning_rate=3e-6 --total_episodes 1000 --gradient_accumulation_steps $STEPS \\\n"
        "  --use-peft --lora_target_modules q_proj v_proj --reward_model_path org/reward\n"
    )
    read = read_settings(script, [])
    settings = translate("TRL", read.settings, None, read.trainer)[0]
    expected = {"model": "org/policy", "reward": "org/reward", "ppo.learning_rate": 3e-6, "rollout.num_prompts": 24}
    expected |= {"ppo.num_updates": 42, "adapter.kind": "lora", "adapter.target_modules": ["q_proj", "v_proj"]}
    assert {name: settings.get(name) for name in expected} == expected
    script.write_text(
        "trl vllm-serve --model org/policy &\n"
        "trl grpo --model_name_or_path org/policy --num_generations 2 2>&1 | tee log\n"
    )
    read = read_settings(script, [])
    assert read.settings == {"model_name_or_path": "org/policy", "num_generations": 2}
    assert translate("TRL", read.settings, None, read.trainer)[0]["ppo.advantage"] == "grpo"


def test_a_clip_range_above_1_bounds_ratios_from_above() -> None:
    settings, lines = translate("TRL", {"num_generations": 8, "epsilon": 10.0})
    assert (settings["ppo.clip_range"], settings["ppo.clip_range_high"]) == (0.99, 10.0)
    assert any(line.startswith("ppo.clip_range: an ε of 10.0 bounds ratios only from above") for line in lines)
    settings, _ = translate("TRL", {"num_generations": 8, "epsilon": 0.2, "epsilon_high": 0.28})
    assert (settings["ppo.clip_range"], settings["ppo.clip_range_high"]) == (0.2, 0.28)


def test_a_batch_of_less_than_a_prompt_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"num_prompts must .* is 0 \(rollout.num_prompts: 2 rows × 1 steps of acc"):
        translate("TRL", {"num_generations": 8, "per_device_train_batch_size": 2})


@pytest.mark.parametrize("given", [{"num_generations": 8}, {"response_length": 8}, {"response_length": 8, "seed": 3}])
def test_passes_are_not_taken_for_updates(given: dict[str, Any]) -> None:
    settings, lines = translate("TRL", given)
    assert "ppo.num_updates" not in settings
    assert "ppo.num_updates: not set; 3 passes over the prompts: --num-prompts N computes it" in lines


@pytest.mark.parametrize(
    ("given", "schedule"),
    [
        ({"lr_scheduler_type": "constant_with_warmup"}, "constant"),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10}, "constant"),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.1}, {"constant": 0.1}),
        ({"lr_scheduler_type": "cosine", "warmup_ratio": 0.1}, {"cosine": 0.1}),
        ({}, "linear"),
    ],
)
def test_schedules_of_trl(given: dict[str, Any], schedule: Any) -> None:
    settings, lines = translate("TRL", {"num_generations": 8, **given})
    assert settings["ppo.schedule"] == schedule
    assert any("warmup_steps=10" in line for line in lines) == ("warmup_steps" in given)


@pytest.mark.parametrize(
    ("given", "prompts", "minibatches", "updates"),
    [
        ({}, 1, 1, 300),  # 8 responses are one prompt's: an update for each of 100 prompts, 3 times
        ({"gradient_accumulation_steps": 4}, 4, 1, 75),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 8}, 8, 4, 37),
        ({"generation_batch_size": 32, "gradient_accumulation_steps": 2}, 4, 2, 75),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 8, "max_steps": 40}, 8, 4, 10),
        ({"gradient_accumulation_steps": 16, "steps_per_generation": 4}, 16, 1, 18),  # several before an optimizer step
        ({"gradient_accumulation_steps": 16, "steps_per_generation": 4, "max_steps": 40}, 16, 1, 40),
    ],
)
def test_trls_grpo(given: dict[str, Any], prompts: int, minibatches: int, updates: int) -> None:
    base = {"model_name_or_path": "a", "num_generations": 8, "reward_funcs": ["r.py:f"], "beta": 0.04}
    settings = translate("TRL", {**base, **given}, num_prompts=100)[0]
    assert settings["rollout.num_prompts"] == prompts
    assert settings["ppo.num_minibatches"] == minibatches
    assert settings["ppo.num_updates"] == updates
    assert (settings["ppo.kl_coef"], settings["ppo.kl_in"]) == (0.04, {"loss": "k3"})
    assert (settings["ppo.advantage"], settings["ppo.aggregation"]) == ("grpo", "token")


def test_what_is_written_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "verl.yaml", tmp_path / "run.yaml"
    source.write_text(yaml.safe_dump(GRPO))
    monkeypatch.setattr(
        "sys.argv", ["kedge", "config", "from-verl", str(source), "-o", str(out), "--set", "data.seed=3"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert f"kedge ppo --config {out}" in capsys.readouterr().out
    config = load_config(out, stage="ppo")
    check_stage(config, "ppo")
    assert (config.runtime.seed, config.ppo.estimator) == (3, "grpo")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "run.yaml exists; name a new file" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["kedge", "config", "from-trl", str(source), "--set", "scale_rewards=odd"])
    with pytest.raises(SystemExit):
        main()
    assert "scale_rewards=odd has no counterpart" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "name", "text", "said"),
    [
        ("from-verl", "train.py", "GRPOConfig(num_generations=2)", "is a script for TRL: kedge config from-trl"),
        ("from-verl", "run.sh", "trl ppo --seed 1\n", "is a script for TRL: kedge config from-trl"),
        ("from-trl", "run.sh", SCRIPT, "is a script for verl: kedge config from-verl"),
    ],
)
def test_a_script_of_the_other_library_is_told_so(
    command: str,
    name: str,
    text: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / name).write_text(text)
    monkeypatch.setattr("sys.argv", ["kedge", "config", command, str(tmp_path / name)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {tmp_path / name} {said}\n"


@pytest.mark.parametrize(
    ("library", "given"),
    [("TRL", {"data.train_batch_size": 8, "trainer.total_epochs": 1}), ("verl", {"num_generations": 8, "beta": 0.1})],
)
def test_settings_of_another_library_are_not_taken_for_defaults(library: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^no setting is one of {library}'s: {', '.join(given)}$"):
        translate(library, given)


def test_a_list_without_overrides_is_not_taken_for_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match=r"run\.yaml: is a list without overrides"):
        read_settings(tmp_path / "run.yaml", [])


def test_a_translation_for_which_there_is_no_room_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "verl.yaml").write_text(yaml.safe_dump(GRPO))
    out = tmp_path / "run.yaml"
    monkeypatch.setattr("sys.argv", ["kedge", "config", "from-verl", str(tmp_path / "verl.yaml"), "-o", str(out)])

    resource = pytest.importorskip("resource")  # Windows has none
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {out} cannot be written: File too large\n"
    assert [*tmp_path.iterdir()] == [tmp_path / "verl.yaml"]


def test_columns_of_verls_rows_are_nested(tmp_path: Path) -> None:
    settings, lines = translate(
        "verl", {**GRPO, "custom_reward_function.path": None, "data.train_files": "gsm8k.parquet"}
    )
    (tmp_path / "run.yaml").write_text(as_yaml(settings, lines))
    config = load_config(tmp_path / "run.yaml")
    assert [term.source for term in config.reward] == ["kedge_tasks.verify:number"]
    assert number(completions=["6 * 12 = 72\n#### 72"], answer=["72"]) == [1.0]
    assert config.data.columns == {"answer": "reward_model.ground_truth"}


def test_rules_and_defaults_name_what_exists() -> None:
    arguments = {
        (library, name) for library, tables in LIBRARIES.items() for rows in tables.values() for names, _ in rows
        for name in names.split()
    }  # fmt: skip
    in_rules = {
        (rule[0], name) for rule in RULES for name in re.findall(r"[a-z][\w.]*", " ".join((*rule[2], *rule[3])))
    }
    for (library, _), defaults in DEFAULTS.items():
        assert {name for name in defaults if (library, name) not in arguments | in_rules} == set()
    for rule in RULES:
        for setting in rule[3]:
            name = setting.partition("=")[0]
            assert name in ("model", "reward") or name.startswith("data.columns.") or find_field(name) is not None, name

"""The presets against the published recipes, typed in by hand; a dash means kedge's default."""

from pathlib import Path

import pytest

from kedge.config import PRESETS, Choice, load_config
from kedge.config.explain.describe import all_fields, find_field
from kedge.config.loading.load import resolve
from kedge.config.presets import FAMILY, Preset
from kedge_base.errors import ConfigError
from kedge_control.stage.presets import CONTROL

# learning rate, schedule | responses per update, epochs | β | γ, λ | ε, τ | c_v, c_e
FIELDS = (
    "ppo.learning_rate",
    "ppo.schedule",
    "rollout.num_prompts",
    "ppo.num_epochs",
    "ppo.kl_coef",
    "ppo.gamma",
    "ppo.gae_lambda",
    "ppo.clip_range",
    "rollout.temperature",
    "ppo.value_coef",
    "ppo.entropy_coef",
)
DASH = object()
TABLE = {
    "ziegler": (1e-5, "linear", 512, 4, 0.15, 1, 0.95, 0.2, 0.7, 0.1, 0),
    "stiennon": (1.5e-5, DASH, 512, 4, 0.05, 1, 0.95, DASH, DASH, 0.1, 0),
    "instructgpt": (DASH, "constant", 512, 1, 0.02, 1, 0.95, 0.2, 1.0, DASH, DASH),
    "tldr-n+": (3e-6, "linear", 512, 4, 0.05, 1, 0.95, 0.2, 0.7, 0.1, 0),
    "s2-defaults": (1e-5, DASH, DASH, 4, DASH, DASH, DASH, 0.2, DASH, 0.5, 0.01),
}

# github.com/vwxyzjn/summarize_from_feedback_details at ee77a9abc31f5338365ee087945c5bcafac7f1ca. The published runs
# (hello_world.sh, sbatches/) pass lr=3e-6, and batch sizes with the products below, on 8 GPUs.
N_PLUS = {
    "data.max_prompt_tokens": 512,  # tldr_dataset.py:70 length=512
    "data.max_length": 638,  # tldr_dataset.py:79 max_rm_query_response_length=638
    "sft.learning_rate": 3e-6,  # sft.py:63 lr
    "sft.schedule": "cosine",  # sft.py:67 scheduler, 69 warm_up_steps = 0
    "sft.num_epochs": 1,  # sft.py:75 num_train_epochs
    "sft.batch_size": 1 * 16 * 8,  # sft.py:79, 81 gradient_accumulation_steps, local_micro_batch_size
    "optimization.adam_eps": 1e-5,  # sft.py:61 eps, 350 optim.AdamW
    "optimization.weight_decay": 0.01,  # sft.py:350 optim.AdamW without weight_decay: PyTorch's default
    "optimization.max_grad_norm": None,  # sft.py:400-401 backward, then step
    "reward_model.learning_rate": 3e-6,  # reward.py:62
    "reward_model.schedule": "cosine",  # reward.py:66, 68
    "reward_model.num_epochs": 1,  # reward.py:74
    "reward_model.batch_size": 1 * 8 * 8,  # reward.py:78, 80
    "reward_model.normalize": "demonstrations",  # reward.py:456, 520 bias = mean score of the reference responses
    "reward_model.normalize_scale": False,  # reward.py:208 score - bias, no gain
    "rollout.num_prompts": 1 * 64 * 8,  # ppo.py:93, 95
    "rollout.num_responses": 1,  # ppo.py:597
    "rollout.max_new_tokens": 53,  # ppo.py:121 response_length
    "rollout.temperature": 0.7,  # ppo.py:127
    "rollout.stop_token": None,  # ppo.py:123 truncate_token = "eos"
    "rollout.missing_eos_score": -1,  # ppo.py:129, 131 penalty_reward_value, non_eos_penalty
    "ppo.num_updates": 1_000_000 // 512,  # ppo.py:97, 177 total_episodes
    "ppo.learning_rate": 3e-6,  # ppo.py:77
    "ppo.schedule": "linear",  # ppo.py:575-577 frac * lr; the scheduler of line 81 is not used
    "ppo.num_epochs": 4,  # ppo.py:44 noptepochs
    "ppo.num_minibatches": 1,  # ppo.py:43, 105 nminibatches
    "ppo.early_stop_kl": None,  # ppo.py:713-758
    "ppo.policy_loss": "clipped",  # ppo.py:751-754
    "ppo.clip_range": 0.2,  # ppo.py:46
    "ppo.aggregation": "token",  # ppo.py:754 masked_mean
    "ppo.entropy_coef": 0,  # ppo.py:756 pg_loss + vf_coef * vf_loss
    "ppo.kl_coef": 0.05,  # ppo.py:51
    "ppo.kl_in": {"reward": "k1"},  # ppo.py:680-682 logprobs - ref_logprobs
    "ppo.kl_controller": "fixed",  # ppo.py:681
    "ppo.critic": "separate",  # ppo.py:482, 496
    "ppo.critic_init": "reward",  # ppo.py:482-485
    "ppo.value_coef": 0.1,  # ppo.py:45 vf_coef
    "ppo.value_loss": "half_mse",  # ppo.py:747 0.5 * masked_mean
    "ppo.value_unit": "score",  # ppo.py:739-747
    "ppo.value_clip_range": 0.2,  # ppo.py:47 cliprange_value
    "ppo.value_warmup_updates": 0,  # ppo.py:756
    "ppo.advantage": "gae",  # ppo.py:693-702
    "ppo.gamma": 1,  # ppo.py:48
    "ppo.gae_lambda": 0.95,  # ppo.py:49
    "ppo.whiten_advantages": True,  # ppo.py:703
    "ppo.whiten_rewards": False,  # ppo.py:50
    "ppo.score_at": "after_last",  # ppo.py:671, 684-685 sequence_lengths_p1
}

# github.com/openai/lm-human-preferences at cbfd210bb8b08f6bc5c26878c10984b90f516c66: the experiments `sentiment` and
# `descriptiveness` of launch.py.
ZIEGLER = {
    "data.max_prompt_tokens": 64,  # launch.py:9 query_length
    "data.max_length": 64 + 24,  # launch.py:9, 11
    "reward_model.learning_rate": 5e-5,  # launch.py:62
    "reward_model.schedule": "linear",  # train_reward.py:249 (1 - start_index / num_train) * lr
    "reward_model.num_epochs": 1,  # train_reward.py:245
    "reward_model.batch_size": 32,  # launch.py:61
    "optimization.adam_eps": {"tf1": 1e-5},  # utils/core.py:627 tf.train.AdamOptimizer
    "optimization.weight_decay": 0,  # the same
    "optimization.max_grad_norm": None,  # utils/core.py:624-628 gradients, mean over ranks, apply
    "reward_model.normalize_scale": True,  # launch.py:52, train_reward.py:252-254 mean 0, std 1
    "rollout.num_prompts": 512,  # launch.py:124 ppo.batch_size
    "rollout.num_responses": 1,  # train_policy.py:284-285
    "rollout.max_new_tokens": 24,  # launch.py:11 response_length
    "rollout.temperature": 0.7,  # launch.py:17
    "rollout.stop_token": ".",  # launch.py:14 truncate_token = 13, encoding of '.'
    "rollout.missing_eos_score": -1,  # lm_tasks.py:32 penalty_reward_value
    "ppo.num_updates": 1954,  # launch.py:123, train_policy.py:79: ⌈1,000,000 / 512⌉
    "ppo.learning_rate": 1e-5,  # launch.py:122
    "ppo.schedule": "linear",  # train_policy.py:172-173
    "ppo.num_epochs": 4,  # train_policy.py:51
    "ppo.num_minibatches": 1,  # train_policy.py:50
    "ppo.early_stop_kl": None,  # train_policy.py:184-193
    "ppo.policy_loss": "clipped",  # train_policy.py:352-354
    "ppo.clip_range": 0.2,  # train_policy.py:54
    "ppo.aggregation": "token",  # train_policy.py:354 reduce_mean
    "ppo.entropy_coef": 0,  # train_policy.py:357
    "ppo.kl_coef": 0.15,  # launch.py:129, 142
    "ppo.kl_in": {"reward": "k1"},  # train_policy.py:150-153
    # launch.py:130, 131, train_policy.py:28; train_policy.py:305: after every step
    "ppo.kl_controller": {"ziegler": {"horizon": 10_000, "target": 6, "wait": 0}},
    "ppo.critic": "shared",  # policy.py:28 scalar_heads=['value']
    "ppo.value_head_rate": 1,  # train_policy.py:176-177 one optimizer
    "ppo.value_coef": 0.1,  # train_policy.py:53
    "ppo.value_loss": "half_mse",  # train_policy.py:347
    "ppo.value_unit": "score",  # train_policy.py:344-347
    "ppo.value_clip_range": 0.2,  # train_policy.py:55
    "ppo.value_warmup_updates": 0,  # train_policy.py:357
    "ppo.advantage": "gae",  # train_policy.py:327-336
    "ppo.gamma": 1,  # train_policy.py:56
    "ppo.gae_lambda": 0.95,  # train_policy.py:57
    "ppo.whiten_advantages": True,  # train_policy.py:338
    "ppo.whiten_rewards": True,  # train_policy.py:58, 325 shift_mean=False
    "ppo.score_at": "last",  # train_policy.py:153 rewards[:, -1] += scores
}


@pytest.mark.parametrize(("preset", "published"), [("tldr-n+", N_PLUS), ("ziegler", ZIEGLER)], ids=["n+", "ziegler"])
def test_every_field_that_published_code_determines(preset: str, published: dict[str, object]) -> None:
    config = load_config(preset=preset).model_dump()
    seen = {name: config[name.partition(".")[0]][name.partition(".")[2]] for name in published}
    assert seen == published
    assert set(PRESETS[preset].values) == set(published)


@pytest.mark.parametrize(
    ("preset", "stage", "rate", "batch", "epochs"),
    [
        ("stiennon", "sft", 6.35e-5, 128, 1),
        ("stiennon", "reward_model", 1.5e-5, 64, 1),
        ("instructgpt", "sft", 9.65e-6, 32, 16),
        ("instructgpt", "reward_model", 9e-6, 64, 1),
    ],
)
def test_the_supervised_stages_of_the_papers(preset: str, stage: str, rate: float, batch: int, epochs: int) -> None:
    section = load_config(preset=preset).model_dump()[stage]
    names = ("learning_rate", "batch_size", "num_epochs", "schedule")
    assert tuple(section[name] for name in names) == (rate, batch, epochs, "cosine")


@pytest.mark.parametrize(
    ("preset", "field", "value"),
    [(preset, *pair) for preset, row in TABLE.items() for pair in zip(FIELDS, row, strict=True)],
)
def test_recipes(preset: str, field: str, value: object) -> None:
    section, _, name = field.partition(".")
    if value is DASH:
        value = find_field(field).default if field != "ppo.schedule" else "linear"  # pyright: ignore
    found = getattr(getattr(load_config(preset=preset), section), name)
    assert (found.name if isinstance(found, Choice) else found) == value


def test_values_that_the_papers_give_outside_the_table() -> None:
    ziegler, instruct = load_config(preset="ziegler").ppo, load_config(preset="instructgpt")
    assert (ziegler.kl_control.horizon, ziegler.kl_control.target) == (10_000, 6)
    assert (instruct.ppo.num_minibatches, instruct.responses_per_update // instruct.ppo.num_minibatches) == (
        8,
        64,
    )
    assert instruct.ppo.warmup_fraction > 0
    s2 = load_config(preset="s2-defaults").ppo
    assert s2.value_clip_range is None
    assert s2.value_weight == 1.0  # 0.5 × the squared error, which is not halved


def test_recipes_in_units_of_the_score_do_not_take_the_default_value_clip_in_standard_deviations() -> None:
    clips = {name: load_config(preset=name).ppo for name in PRESETS}
    assert {name: each.value_clip_range for name, each in clips.items() if each.value_unit == "score"} == {
        "tldr-n+": 0.2,
        "instructgpt": 0.2,
        "stiennon": 0.2,
        "ziegler": 0.2,
        "s2-defaults": None,
    }
    assert (clips["small-cpu"].value_unit, clips["small-cpu"].value_clip_range) == ("returns_std", 1.0)


def test_the_critics_of_the_papers() -> None:
    critics = {name: load_config(preset=name).ppo.resolved_critic for name in TABLE}
    assert critics == {
        "ziegler": "shared",
        "stiennon": "separate",
        "instructgpt": "separate",
        "tldr-n+": "separate",
        "s2-defaults": "shared",
    }


def test_the_list_of_presets() -> None:
    recipes = ["tldr-n+", "instructgpt", "stiennon", "ziegler", "s2-defaults", "small-cpu", "small-instruct"]
    assert list(PRESETS) == [*recipes, *(preset.name for preset in (*FAMILY, *CONTROL))]


@pytest.mark.parametrize("preset", [*FAMILY, *CONTROL], ids=lambda preset: preset.name)
def test_an_algorithm_names_only_fields_that_it_changes(preset: Preset) -> None:
    defaults = {name: field.default for name, field in all_fields()}
    assert {name: cited.source for name, cited in preset.values.items() if cited.value == defaults[name]} == {}


def test_how_often_an_algorithm_of_the_family_uses_its_samples() -> None:
    """Responses per prompt, passes, and steps per pass; by hand."""
    loops = {preset.name: load_config(preset=preset.name) for preset in FAMILY}
    assert {
        name: (each.rollout.num_responses, each.ppo.num_epochs, each.ppo.num_minibatches)
        for name, each in loops.items()
    } == {
        "rloo": (4, 1, 2),  # appendix C: 512 responses, 256 per step, 2 steps; table 1: k = 4
        "grpo": (64, 1, 1),  # §4.2: 64 outputs, a single update
        "dr-grpo": (8, 1, 1),  # table 6: 8 responses, 1 inner epoch
        "reinforce++": (1, 4, 1),  # k = 1; the rest is PPO's
        "spo": (1, 1, 8),  # the authors' recipe: 768 responses, 96 per step
        "critic": (1, 4, 1),  # as reinforce++
        "dapo": (16, 1, 16),  # §4.1: 512 × 16 responses, 512 per step
        "gspo": (16, 1, 4),  # §5.1: four minibatches
        "gigpo": (8, 1, 1),  # verl-agent: 8 episodes per group; its minibatches count turns
        "cispo": (16, 1, 16),  # MiniMax-M1 §3.1: 16 rounds per batch; 16 responses in ScaleRL
        "vapo": (16, 1, 16),  # §5.1: 512 × 16 responses, 512 per step
        "sao": (1, 1, 1),  # §4.1: 128 responses per step, group size 1
        "distill": (1, 1, 1),  # tinker-cookbook, train_on_policy.py: num_substeps=1; the recipe's group size is 4
    }


@pytest.mark.parametrize("name", PRESETS)
def test_every_value_is_cited_and_valid(name: str) -> None:
    preset = PRESETS[name]
    assert all(cited.source for cited in preset.values.values())
    resolved = resolve([preset.settings])
    assert load_config(preset=name) == resolved.model_copy(update={"preset": [name]})


def test_small_cpu_is_sized_for_small_models() -> None:
    small = load_config(preset="small-cpu")
    assert small.ppo.learning_rate >= 30 * load_config(preset="tldr-n+").ppo.learning_rate
    assert small.responses_per_update == 64


@pytest.mark.parametrize("name", ["brief", "sums", "programs"])
def test_the_examples_with_an_instruction_model_train_by_its_preset(name: str) -> None:
    """What they have in common stands in the preset alone; the figures of the pages are measured with it."""
    ppo = load_config(Path("examples") / name / "run.yaml", stage="ppo").ppo
    shared = (ppo.learning_rate, ppo.num_epochs, ppo.value_coef, ppo.value_head_rate)
    assert shared == (2e-5, 2, 0.5, 30.0)


def test_an_unknown_preset_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'best' does not exist; choose one of tldr-n\+"):
        load_config(preset="best")

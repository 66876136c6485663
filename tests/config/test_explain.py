"""The output of `explain` and `schedule`."""

import re

import pytest

from kedge.config import Config, describe_presets, explain, load_config, schedule_in_words, with_values
from kedge.config.explain.describe import CHANGED_FIRST, accepts, all_fields, find_field, section_type
from kedge.config.explain.explain import SOURCES, cited_works
from kedge.config.libraries import foreign_answer, foreign_names
from kedge.config.presets import PRESETS
from kedge.config.schema.field import field_doc
from kedge.config.schema.ppo import PpoConfig
from kedge_base.errors import ConfigError


@pytest.mark.parametrize(("name", "field"), list(all_fields()))
def test_every_field_is_explained(name: str, field) -> None:
    text, doc = explain(name), field_doc(field)
    parts = (name, doc.meaning, doc.source, doc.too_high or "", doc.too_low or "")
    for part in (*parts, "accepts", "default", "source"):
        assert part in text


def test_no_field_accepts_just_any_text() -> None:
    """What a text stands for is said, except where the text itself is meant."""
    assert accepts(dict(all_fields())["ppo.critic_init"]) == "auto, reward, policy, or a folder, a hub id or a run"
    plain = [name for name, field in all_fields() if re.search(r"(^|, )(or )?text\b", accepts(field))]
    assert plain == ["rollout.stop_token"]


def test_every_cited_paper_is_listed() -> None:
    fields = [f"{field_doc(field).meaning} {field_doc(field).source}" for _, field in all_fields()]
    presets = [f"{preset.about} {cited.source}" for preset in PRESETS.values() for cited in preset.values.values()]
    cited = set(re.findall(r"\d{4}\.\d{5}", " ".join([*fields, *presets])))
    assert cited - set(re.findall(r"arXiv (\S+\d)", " ".join(SOURCES.values()))) == set()
    for name in ("RLOO", "GRPO", "Dr. GRPO", "REINFORCE++", "OPO", "ReMax"):
        assert f"  work      {name}: {SOURCES[name]}" in explain("ppo.advantage").splitlines()


# S2's table of hyperparameters, in its order: both directions are explained.
@pytest.mark.parametrize(
    ("name", "default", "too_high", "too_low"),
    [
        ("ppo.clip_range", 0.2, "instability", "slow"),
        ("ppo.value_coef", 0.1, "prediction", "advantages are poor"),
        ("ppo.entropy_coef", 0.0, "stays random", "deterministic too fast"),
        ("ppo.num_epochs", 4, "overfitted", "more of them are needed"),
        ("ppo.learning_rate", 1e-5, "unstable", "slow convergence"),
    ],
)
def test_the_table_of_the_introduction(name: str, default: float, too_high: str, too_low: str) -> None:
    field = dict(all_fields())[name]
    assert field.default == default
    assert too_high in (field_doc(field).too_high or "")
    assert too_low in (field_doc(field).too_low or "")


def test_presets_that_change_a_field_are_listed_with_their_source() -> None:
    text = explain("rollout.temperature")
    assert "tldr-n+: 0.7" in text
    assert "ziegler: 0.7" in text
    assert "instructgpt" not in text.replace("InstructGPT", "")  # it takes the default
    assert "arXiv 2403.17031" in text


def test_a_bare_name_is_enough_where_it_is_the_only_one() -> None:
    assert explain("clip_range") == explain("ppo.clip_range")
    with pytest.raises(ConfigError, match=r"several sections: sft.learning_rate, .*ppo.learning_rate"):
        explain("learning_rate")
    with pytest.raises(ConfigError, match=r"did you mean ppo.clip_range\?"):
        explain("ppo.clip_rnge")


def test_the_update_is_listed_by_group_below_what_is_changed_first() -> None:
    first, *groups = explain("ppo").split("\n\n")[1:]
    titles, *listed = zip(*((each.splitlines()[0], each.splitlines()[1:]) for each in (first, *groups)), strict=True)
    assert titles[:3] == (
        "Changed first, here and in other sections:",
        "Updates, epochs, minibatches and the learning rate:",
        "The policy's part of the loss:",
    )
    names = [[line.split()[0] for line in lines] for lines in listed[0]]
    assert sorted(names[0]) == sorted(CHANGED_FIRST)
    assert len(CHANGED_FIRST) == 20
    assert [name for group in names[1:] for name in group] == list(PpoConfig.model_fields)


def test_another_librarys_argument_is_explained_by_ours() -> None:
    text = explain("eps_clip")
    assert text.startswith("eps_clip is OpenRLHF's name; here it is ppo.clip_range.\n")
    assert text.endswith(explain("ppo.clip_range"))
    assert explain("total_episodes").splitlines()[1] == "ppo.num_updates"
    assert foreign_answer("turn_level_clip") == (
        "turn_level_clip is AgileRL's name; here it is ppo.ratio: turn for true, with credit by turn; token for false"
    )
    assert str(foreign_answer("gigpo.step_advantage_w")).endswith(
        "verl-agent's name; here it is ppo.advantage={gigpo: 1.0}, ω"
    )
    none = "trainer.nnodes is verl's name; here there is none: torchrun sets the number of processes."
    assert explain("trainer.nnodes") == none


def test_a_word_lists_what_is_near() -> None:
    listed = [line.split()[0] for line in explain("kl").splitlines()[1:]]
    assert {"ppo.kl_coef", "ppo.early_stop_kl", "ppo.measure_kl"} <= set(listed)  # by name, and by meaning
    assert "ppo.clip_range" not in listed
    with pytest.raises(ConfigError, match="zzz is not a field"):
        explain("zzz")
    with pytest.raises(ConfigError, match=r"did you mean reward_model\.num_epochs"):
        explain("reward.num_epochs")


ASKED_FOR = {
    "eps_clip": "ppo.clip_range",
    "n_samples_per_prompt": "rollout.num_responses",
    "rollout_batch_size": "rollout.num_prompts",
    "max_response_length": "rollout.max_new_tokens",
    "advantage_estimator": "ppo.advantage",
    "adv_estimator": "ppo.advantage",
    "grad_clip": "optimization.max_grad_norm",
    "total_epochs": "ppo.num_updates",
    "per_device_train_batch_size": "rollout.num_prompts",
    "total_episodes": "ppo.num_updates",
    "report_to": "runtime.loggers",
    "vf_coef": "ppo.value_coef",
    "cliprange_value": "ppo.value_clip_range",
    "--init-kl-coef": "ppo.kl_coef",
    "reward_funcs": "reward",
    "train_dataset": "data.prompts",
    "peft_config": "adapter.kind",
    "use_vllm": "rollout.engine=vllm",
    "vllm_mode": "rollout.engine=vllm",
    "vllm_server_host": "rollout.engine.servers",
    "max_steps": "ppo.num_updates",
    "ppo_epochs": "ppo.num_epochs",
    "steps": "ppo.num_updates",
    "early_stopping": "ppo.early_stop_kl",
    "LengthSampler": "rollout.max_new_tokens",
    "AutoModelForCausalLMWithValueHead": "model",
    "max_prompt_length": "data.max_prompt_tokens",
    "chat_template_path": "data.chat_template",
    "assistant_only_loss": "data.train_on",
    "load_in_4bit": "adapter.base_dtype",
    "data.train_files": "data.prompts",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "runtime.offload=frozen",
    "+actor_rollout_ref.actor.fsdp_config.reshard_after_forward": "runtime.parallel",
    "vllm.num_engines": "rollout.engine.servers",
    "--ds.lora.rank": "adapter.rank",
    "tools": "environment.source",
    "environment_factory": "environment.source",
    "max_tool_calling_iterations": "environment.max_turns",
    "actor_rollout_ref.rollout.multi_turn.enable": "environment.source",
}

ABSENT = [
    "rollout_func",
    "reward_processing_classes",
    "sync_ref_model",
    "top_entropy_quantile",
    "formatting_func",
    "compute_metrics",
    "label_smoothing",
    "deepspeed",
    "train.agent_func_path",
    "actor_rollout_ref.rollout.agent.num_workers",
    "trainer.v1.sampler.custom_sampler",
    "critic.model.mtp.enable",
]


@pytest.mark.parametrize(("theirs", "ours"), ASKED_FOR.items())
def test_the_names_that_users_of_other_libraries_know(theirs: str, ours: str) -> None:
    answer = foreign_answer(theirs)
    assert answer is not None
    assert f"here it is {ours}" in answer


@pytest.mark.parametrize("theirs", ABSENT)
def test_a_name_without_a_counterpart_is_answered_in_one_line(theirs: str) -> None:
    answer = foreign_answer(theirs)
    assert answer is not None
    assert "'s name; here there is none: " in answer


def test_what_trl_takes_for_granted_is_answered() -> None:
    assert foreign_answer("args") is not None
    for name in ("processing_class", "packing", "completion_only_loss", "disable_dropout"):
        assert "here: " in str(foreign_answer(name))


def test_an_answer_shows_no_markdown_and_is_that_of_the_stage() -> None:
    for name, _, _ in foreign_names():
        assert not re.search(r"`|\]\(", str(foreign_answer(name))), name
    assert str(foreign_answer("train_dataset", "reward")).endswith("here it is data.comparisons")
    assert str(foreign_answer("num_train_epochs", "sft")).endswith("here it is sft.num_epochs")


@pytest.mark.parametrize("theirs", ["step", "generate", "log_stats", "batched_generate", "create_reference_model"])
def test_the_calls_of_trls_old_trainer_are_explained(theirs: str) -> None:
    assert f"{theirs} is TRL's name; here: " in explain(theirs)


def test_a_preset_is_explained_by_its_values() -> None:
    assert explain("grpo") == describe_presets("grpo")


def test_every_counterpart_is_a_field_or_an_option() -> None:
    bad = []
    for name, library, here in foreign_names():
        fields = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", here)
        lead = re.match(r"`([^`=:]+)", here)
        bad += [
            (library, name, each)
            for each in fields
            if find_field(each) is None and not each.endswith((".jsonl", ".py"))
        ]
        bad += [(library, name, lead[1]) for _ in [0] if lead and find_field(lead[1]) is None and lead[1] != "--resume"]
    assert bad == []
    assert len({name for name, *_ in foreign_names()}) > 400


@pytest.mark.parametrize("section", ["", *filter(section_type, Config.model_fields)])
def test_a_section_lists_its_fields(section: str) -> None:
    model = section_type(section) or Config
    assert all(name in explain(section) for name in model.model_fields)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("S0, S3; N+ takes 0.1", ["S0", "S3", "N+"]),
        ("Dr. GRPO for constant", ["Dr. GRPO"]),
        ("VC-PPO warms up", ["VC-PPO"]),
        ("Those of Open-Reasoner-Zero and C51", ["Open-Reasoner-Zero", "C51"]),
        ("PPO eq. 7", ["PPO"]),
        ("kedge", []),
    ],
)
def test_cited_works_are_found(text: str, names: list[str]) -> None:
    assert cited_works(text) == {name: SOURCES[name] for name in names}


def test_the_schedule_in_words_by_hand() -> None:
    config = load_config(
        overrides=[
            "rollout.num_prompts=6",
            "rollout.num_responses=2",
            "rollout.max_new_tokens=10",
            "ppo.num_minibatches=3",
            "ppo.num_epochs=5",
            "ppo.num_updates=7",
        ]
    )
    text = schedule_in_words(config, num_prompts_available=21)
    for part in (
        "2 responses for each of 6 prompts: 12 responses\n",
        "of at most 10 tokens each (rollout.max_new_tokens), 120 tokens in all",
        "makes 5 passes over them, each in 3 minibatches of 4 responses",
        "takes one optimizer step per minibatch",
        "15 optimizer steps per update.",
        "7 updates: 84 responses, at most 840 new tokens, 105 optimizer steps",
        "42 prompts from the 21 available: 2 passes over them",
    ):
        assert part in text
    for updates, available, passes in ((7, 42, "1 pass"), (7, 18, "2.33 passes"), (7_000, 42, "1,000 passes")):
        text = schedule_in_words(with_values(config, {"ppo.num_updates": updates}), num_prompts_available=available)
        assert text.endswith(f"{6 * updates:,} prompts from the {available} available: {passes} over them.")


def test_what_the_schedule_mentions_only_when_it_matters() -> None:
    plain = schedule_in_words(load_config(overrides=["rollout.max_new_tokens=16"]))
    assert "available" not in plain
    assert "critic" not in plain
    overrides = ["ppo.value_warmup_updates=1", "ppo.early_stop_kl=0.01", "ppo.num_epochs=2", "ppo.num_minibatches=4"]
    special = schedule_in_words(load_config(overrides=overrides))
    assert "Only the critic is trained in the first 1 update (8 optimizer steps)." in special
    assert "schedule and the controllers cover the 199 updates after them." in special
    assert "fewer if ppo.early_stop_kl is exceeded" in special
    without = schedule_in_words(load_config(preset="rloo"))
    assert "No critic is loaded or trained: ppo.advantage=rloo needs none." in without


def test_the_schedule_counts_the_steps_of_the_critic_alone() -> None:
    """10 of 200 updates of one step and one more of the critic; with 3 passes in 2 epochs: 2 · 2 per update."""
    text = schedule_in_words(load_config(preset="sao"))
    assert "200 optimizer steps.\nThe further passes of the critic take another 200 optimizer steps.\n" in text
    assert "After each pass the critic makes 1 more alone: another 1 optimizer step per update." in text
    assert "Only the critic is trained in the first 10 updates (20 optimizer steps)." in text
    until = ["ppo.num_critic_epochs=3", "ppo.num_epochs=2", "ppo.value_warmup_updates.until=0.5"]
    text = schedule_in_words(load_config(preset="sao", overrides=until))
    assert "take another 800 optimizer steps." in text
    assert "for at most 10 updates (60 optimizer steps)." in text


def test_the_schedule_says_what_a_separate_critic_costs() -> None:
    """SAO without a reference: ⅓ + 1 for the policy, ⅓ + 2 for the critic. PPO: ⅔ + 4 and ⅓ + 4."""
    text = schedule_in_words(load_config(preset="sao"))
    assert "The separate critic takes 2.3 of the 3.7 steps of supervised fine-tuning" in text
    assert "ppo.critic_check measures what it sees" in text
    separate = ["ppo.critic=separate", "ppo.num_epochs=4", "ppo.critic_check=5"]
    text = schedule_in_words(load_config(overrides=separate))
    assert "The separate critic takes 4.3 of the 9.0 steps" in text
    assert "measures what it sees" not in text
    assert "that: one that kedge critic has trained before PPO sees more; docs" in text
    text = schedule_in_words(load_config(overrides=[*separate, "ppo.critic_init=runs/critic/model"]))
    assert "It does not always earn that; docs/family.md says when." in text


def test_the_schedule_says_how_little_of_a_score_lambda_passes_on() -> None:
    """0.95^52 = 6.9 %, 0.95^31 = 20.4 %, and 0.95^32 = 19.4 %."""
    text = schedule_in_words(load_config(overrides=["ppo.gae_lambda=0.95", "rollout.max_new_tokens=53"]))
    assert (
        "With ppo.gae_lambda=0.95, 6.9% of a score at the end of 53 tokens reaches the first of them directly" in text
    )
    shorter = ["ppo.gae_lambda=0.95", "rollout.max_new_tokens=33"]
    assert "19.4% of a score" in schedule_in_words(load_config(overrides=shorter))
    for silent in (
        ["ppo.gae_lambda=0.95", "rollout.max_new_tokens=32"],
        ["rollout.max_new_tokens=1000"],
        ["ppo.gae_lambda=length_adaptive"],
        ["ppo.advantage=reinforce++"],
    ):
        assert "of a score at the end" not in schedule_in_words(load_config(overrides=silent)), silent


def test_the_schedule_does_not_count_resampled_responses_and_says_what_checks_cost() -> None:
    text = schedule_in_words(load_config(preset="dapo", overrides=["ppo.num_updates=2", "rollout.num_prompts=8"]))
    assert (
        "128 responses\n  of at most 64 tokens each (rollout.max_new_tokens), 8,192 tokens in all" in text
    )  # 8 × 16 responses of 64 tokens: those of one round
    assert "The run makes 2 updates: 256 responses to train on," in text
    assert "32 optimizer steps; more responses are sampled in the additional rounds." in text
    small = ["ppo.num_updates=4", "rollout.num_prompts=16", "ppo.critic_check=2"]
    sizes = ["ppo.critic_check.size=[8, 2, 4]"]
    # 3 checks of 16 responses, 64 continuations and 32 further responses, for 4 updates of 16
    assert "336 responses (5.25 times those trained on)" in schedule_in_words(load_config(overrides=[*small, *sizes]))

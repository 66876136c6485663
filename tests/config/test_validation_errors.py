"""Every mistake is one line: where, which field, what is expected, what it is; there is never a traceback."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.config import Config, load_config, resolved_yaml
from kedge.config.explain.describe import all_fields, section_type
from kedge_base.errors import ConfigError


def error_line(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=list(overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("ppo.clip_range=-1", "ppo.clip_range must be a number > 0 and < 1; it is -1"),
        ("ppo.num_epochs=true", "ppo.num_epochs must be a whole number ≥ 1, or a number > 0 and < 1; it is true"),
        ("ppo.num_epochs=4.5", "ppo.num_epochs must be a whole number ≥ 1, or a number > 0 and < 1; it is 4.5"),
        (
            "ppo.gae_lambda=1.5",
            "ppo.gae_lambda must be a number ≥ 0 and ≤ 1, length_adaptive, or {length_adaptive: a number > 0}; "
            "it is 1.5",
        ),
        ("ppo.gamma=.nan", "ppo.gamma must be a number ≥ 0 and ≤ 1; it is nan"),
        ("ppo.early_stop_kl=low", "ppo.early_stop_kl must be a number > 0, or null; it is low"),
        (
            "ppo.kl_controller=zigler",
            "ppo.kl_controller must be fixed, ziegler, schulman, or {ziegler or schulman: a whole number > 0 or "
            "null or {horizon: a whole number > 0 or null, target: a number > 0, wait: a number ≥ 0 and < 1}}; "
            "it is zigler",
        ),
        (
            "rollout.missing_eos_score=off",
            "rollout.missing_eos_score must be a number, auto, mask, {subtract: a number or auto}, or null; it is "
            "false",
        ),
        (
            "rollout.stop_token=[7, [7]]",
            "rollout.stop_token must be text, a whole number, a list of these, or null; it is [7, [7]]",
        ),
        ("rollout.stop_token=[]", "rollout.stop_token=[]: the list names no token; null stands for the model's own"),
        (
            "rollout.stop_token=[9223372036854775808]",
            "rollout.stop_token=[9223372036854775808]: whole numbers must be below 2⁶³",
        ),
        ("rollout.temperature=1e-30", "rollout.temperature must be a number ≥ 0.001; it is 1e-30"),
        ("ppo=3", "ppo must be a section of fields; it is 3"),
        ("data.prompts=3", "data.prompts must be a source or a list of sources; it is 3"),
        (
            "runtime.loggers=[wandb, ledger]",
            "runtime.loggers must be any of tensorboard, wandb, trackio, or {tensorboard or wandb or trackio: text}; "
            "it is ledger",
        ),
        ("reward={f.py:g: heavy}", "reward: the weight must be a number; it is heavy"),
        ("reward=[{source: f.py:g, wieght: 2}]", "reward: wieght is not one of source, weight, settings, name"),
        (
            "reward=[{source: f.py:g, settings: [1]}]",
            "reward: the settings must be a mapping of names to any value; it is [1]",
        ),
        (
            "reward=[{source: f.py:g, settings: {on: 1}}]",
            "reward: the settings must be a mapping of names to any value; it is true",
        ),
        ("judge.max_cost={cost: 3, price_in: 1}", "judge.max_cost.price_out must be a number ≥ 0; it is missing"),
        (
            "data.draw={evenly: true}",
            'data.draw must be evenly, by_spread, or {evenly or by_spread: a whole number ≥ 1}; it is {"evenly": true}',
        ),
        (
            "schedules.ppo.kl_coef={yes: 0.1}",
            'schedules must be a mapping of fields to {update: value}; it is {"ppo.kl_coef": {"true": 0.1}}',
        ),
    ],
)
def test_wrong_values(override: str, said: str) -> None:
    assert error_line(override) == said


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ppo.clip_rang", "ppo.clip_range"),
        ("ppo.clip", "ppo.clip_range"),
        ("pop.clip_range", "ppo.clip_range"),
        ("rollout.clip_range", "ppo.clip_range"),
        ("clip_rang", "ppo.clip_range"),
        ("rolout", "rollout"),
    ],
)
def test_unknown_names_suggest_the_one_meant(name: str, meant: str) -> None:
    assert error_line(f"{name}=1") == f"{name} is not a field; did you mean {meant}?"


@pytest.mark.parametrize("name", [*(name for name in Config.model_fields if name != "schedules"), "nothing"])
@pytest.mark.parametrize("field", ["clip", "0", "weight", "", "clip_range.x", "Loop", ".seed", "model_config"])
def test_nothing_unknown_is_accepted_in_any_section(name: str, field: str) -> None:
    # reward.clip=3 once became a reward named clip with weight 3.
    assert error_line(f"{name}.{field}=3").startswith(f"{name}.{field} is not a field")


def test_a_reward_has_no_fields() -> None:
    assert "reward is a source, or sources with their weights" in error_line("reward.clip=3")
    assert error_line("reward.num_epochs=3").endswith("; did you mean reward_model.num_epochs?")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("eps_clip", "eps_clip is OpenRLHF's name; here it is ppo.clip_range"),
        (
            "ppo.lam",
            "ppo.lam is not a field; lam is TRL's and verl's name; here it is ppo.gae_lambda. Default 1; TRL: 0.95",
        ),
        ("actor_rollout_ref.actor.clip_ratio", "here it is ppo.clip_range"),
        (
            "ppo.beta",
            "ppo.beta is not a field; beta is TRL's name; here it is ppo.kl_coef, with ppo.kl_in={loss: k3} for GRPO's",
        ),
        (
            "advantage_estimator",
            "here it is ppo.advantage: gae, rloo and dr_grpo alike, grpo for group_norm, "
            "reinforce++ for reinforce, reinforce++_baseline for reinforce_baseline",
        ),
        ("data.max_response_length", "is verl's name; here it is rollout.max_new_tokens"),
        ("fsdp", "fsdp is TRL's and verl's name; here it is runtime.parallel: shard"),
        ("deepspeed", "there is none: torchrun sets the number of processes"),
    ],
)
def test_a_name_of_another_library_gets_ours(name: str, said: str) -> None:
    assert error_line(f"{name}=1").endswith(said)


def test_a_name_like_no_other_gets_no_suggestion() -> None:
    assert error_line("foo.bar=1") == "foo.bar is not a field"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["ppo.num_minibatches=7"], ["ppo.num_minibatches=7", "64 responses", "4 and 8"]),
        (["rollout.num_prompts=1000000000"], ["1,000,000,000 responses", "at most 1,000,000"]),
        (["critic.num_prompts=1000000"], ["critic.num_prompts", "4,000,000 responses"]),
        (["rollout.num_prompts=3", "rollout.num_responses=5", "ppo.num_minibatches=4"], ["15 responses", "3 and 5"]),
        (["rollout.top_p=0.9"], ["rollout.top_p is OpenRLHF's", "the KL would be wrong", "rollout.temperature"]),
        (["rollout.top_k=50"], ["rollout.top_k is verl's name", "the KL would be wrong"]),
        (["ppo.kl_controller=ziegler", "ppo.kl_coef=0"], ["ppo.kl_controller=ziegler", "ppo.kl_coef"]),
        (["ppo.kl_in={loss: k1}"], ["{loss: k1} has no gradient", "k2 or k3"]),
        (["ppo.critic_init=reward"], ["ppo.critic=separate"]),
        (["ppo.critic=none"], ["ppo.advantage=gae", "ppo.critic=none", "ppo.advantage=to_go"]),
        (["ppo.advantage=to_go", "ppo.value_warmup_updates=3"], ["ppo.value_warmup_updates=3", "use 0"]),
        (["ppo.critic=separate", "ppo.critic_init=reward", "reward=f.py:g"], ["exactly one reward model", "has 0"]),
        (["ppo.policy_loss=unclipped", "ppo.dual_clip=3"], ["ppo.dual_clip=3 is now ppo.policy_loss={dual_clip: 3}"]),
        (["ppo.policy_loss={dual_clip: 1}"], ["ppo.policy_loss={dual_clip: 1} must be a ratio above 1"]),
        (["ppo.old_logprobs={sampler: 2}"], ["ppo.old_logprobs must be", 'it is {"sampler": 2}']),
        (
            ["ppo.importance_mask={token: [1.5, 2]}"],
            ["[1.5, 2]} must name the ends of a band around 1, such as [0.5, 2]"],
        ),
        (["ppo.importance_mask={sequence: [2, 0.5]}"], ["must name the ends of a band around 1"]),
        (["ppo.gae_lambda=length_adaptive", "ppo.advantage=td"], ["length_adaptive needs ppo.advantage=gae; it is td"]),
        (["ppo.advantage=grpo", "ppo.kl_in=reward"], ["ppo.advantage=grpo divides", "ppo.kl_in=loss", "ppo.kl_coef=0"]),
        (["ppo.value_warmup_updates.until=0.3"], ["ppo.value_warmup_updates must be", 'it is {"until": 0.3}']),
        (
            ["ppo.num_critic_epochs=2", "ppo.advantage=to_go"],
            ["ppo.num_critic_epochs=2", "to_go has none"],
        ),
        (["ppo.value_gradient=head", "ppo.critic=separate"], ["ppo.value_gradient=head is now ppo.critic=detached"]),
        (["ppo.freeze_critic=attention"], ["ppo.freeze_critic=attention is now ppo.critic=frozen_att"]),
        (["ppo.critic_learning_rate=1e-5"], ["ppo.critic_learning_rate needs ppo.critic=separate", "value_head_rate"]),
        (["ppo.advantage=remax", "ppo.whiten_rewards=true"], ["ppo.whiten_rewards=true scales the rewards", "remax"]),
        (["ppo.advantage=remax", "ppo.gamma=0.9"], ["ppo.gamma=0.9 scales the rewards", "ppo.gamma=1"]),
        (["ppo.eval_every.num_prompts=8"], ["ppo.eval_every must be", 'it is {"num_prompts": 8}']),
        (["data.pretraining=a.jsonl"], ["data.pretraining has no effect without ppo.ptx_coef"]),
        (["ppo.value_gae_lambda=1", "ppo.advantage=to_go"], ["ppo.value_gae_lambda has no effect", "remove it"]),
        (["ppo.gae_lambda=length_adaptive", "schedules.ppo.gae_lambda={1: 1}"], ["ppo.gae_lambda is also set by"]),
        (["ppo.value_loss=hl_gauss", "ppo.value_clip_range=1"], ["has no value clip", "ppo.value_clip_range=null"]),
        (["ppo.value_loss=hl_gauss", "schedules={ppo.value_clip_range: {1: 0.2}}"], ["has no value clip; remove"]),
        (["ppo.value_loss={}"], ["ppo.value_loss must be half_mse, mse, hl_gauss, or", "it is {}"]),
        (["ppo.value_loss={hl_gauss: [3,3,101]}"], ["ppo.value_loss={hl_gauss: [3.0, 3.0, 101]} must name the lower"]),
        (["ppo.value_warmup_updates=200"], ["ppo.value_warmup_updates=200", "ppo.num_updates=200"]),
    ],
)
def test_impossible_combinations(overrides: list[str], said: list[str]) -> None:
    line = error_line(*overrides)
    assert all(part in line for part in said), line


def test_several_mistakes_are_all_named() -> None:
    assert error_line("ppo.gamma=2", "rollout.num_prompts=0").endswith("(also wrong: ppo.gamma)")


def test_a_files_mistake_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\nppo:\n  gamma: 1\n  clip_range: wide\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == f"{path}:4: ppo.clip_range must be a number > 0 and < 1; it is wide"


def test_an_error_in_an_override_does_not_point_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("ppo:\n  clip_range: 0.2\n")
    with pytest.raises(ConfigError, match=r"^ppo\.clip_range must be"):
        load_config(path, ["ppo.clip_range=wide"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"ppo:\n  gamma: 1\n  gamma: 0.9\n", ":3: ppo.gamma is given twice"),
        (b"ppo: [1\n", "cannot be read as YAML"),
        (b"- a\n- b\n", "must consist of `field: value` lines"),
        (b"model: \xff\n", "is not UTF-8"),
        (b"model: a\x00b\n", "cannot be read as YAML"),
        (b"model: !!python/object/apply:os.getcwd []\n", "cannot be read as YAML"),
        (b"a: " + b"[" * 5000, "it is nested too deeply"),
        (b"reward: &r [*r]\n", "aliases such as *r are not supported"),
        (b"preset: best\n", "choose one of tldr-n+, instructgpt"),
        (b"? [a, b]\n: 1\n", "cannot be read as YAML"),
    ],
)
def test_files_that_cannot_be_used(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_config(path)


@pytest.mark.parametrize("text", ["x", "=3", "ppo.clip_range 0.1"])
def test_an_override_without_a_field_or_a_value(text: str) -> None:
    assert "write field=value" in error_line(text)


def error_or_nothing(**source: Any) -> str:
    """The error line, or nothing if the configuration is valid; any other exception is a bug."""
    try:
        load_config(**source)
    except ConfigError as error:
        return str(error)
    return ""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*(name for name, _ in all_fields()), *filter(section_type, Config.model_fields)]) | st.text()


@pytest.mark.filterwarnings("ignore:.* is now .*the old name works until the next release:FutureWarning")
@settings(max_examples=60, deadline=None)
@given(document=st.dictionaries(NAMES, JSON, max_size=4))
def test_any_document_is_a_configuration_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, object]
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "run.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    line = error_or_nothing(path=path)
    assert len(line.splitlines()) <= 1
    assert len(line) < 2000


@pytest.mark.filterwarnings("ignore:.* is now .*the old name works until the next release:FutureWarning")
@settings(max_examples=60, deadline=None)
@given(name=NAMES, value=st.text(max_size=30))
def test_any_override_is_a_configuration_or_one_line(name: str, value: str) -> None:
    assert len(error_or_nothing(overrides=[f"{name}={value}"]).splitlines()) <= 1


def test_a_setting_may_be_idle_where_what_it_belongs_to_is_switched_off(tmp_path):
    """So that a file's settings stay when the command line switches it off, and a recorded configuration loads."""
    config = load_config(
        overrides=[
            *("ppo.surrogate_kl_coef=2", "ppo.policy_loss=clipped"),
            *("ppo.eval_every={updates: null, num_prompts: 8}", "data.pretraining=a.jsonl", "ppo.ptx_coef=0"),
        ]
    )
    (tmp_path / "config.yaml").write_text(resolved_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config

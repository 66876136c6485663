"""Settings of former versions: presets resolve to the same numbers, and an old name is answered with the new one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kedge.config import LANGUAGE_PRESETS, Config, config_from_settings, load_config, parameter, word
from kedge.config.explain.describe import FORMER, all_fields, find_field
from kedge.config.loading.load import flat_settings
from kedge.errors import ConfigError

NUMBERS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("former_numbers.json").read_text())
"""All settings before they were halved: the defaults, and by preset those that differ from them."""

LATER = ("distill", "small-instruct")
"""Presets that have come since."""

SHARED = ("optimizer", "max_grad_norm", "weight_decay", "adam_eps", "adam_eps_mode")
CONSTANTS = {
    "rollout.vllm.transfer": "auto",
    "ppo.kl_scope": "token", "ppo.max_resamples": 9, "rollout.missing_eos_mode": "replace",
    "runtime.offload_frozen": False, "runtime.offload_optimizer": False,
    "ppo.critic_check_prompts": 32, "ppo.critic_check_prefixes": 4, "ppo.critic_check_continuations": 8,
    "adapter.dropout": 0.0, "adapter.rslora": False, "rollout.top_k": None, "rollout.top_p": None,
    "rollout.vllm.port": None, "rollout.vllm.start_timeout": 900.0, "rollout.vllm.max_restarts": 3,
    "rollout.vllm.max_requests": 256, "reward_functions.startup_timeout": 600.0, "reward_functions.error_score": 0.0,
    "reward_functions.memory_growth": 2.0, "evaluate.confidence": 0.95, "ppo.value_huber_delta": 1.0,
    "ppo.value_head_init": "zero", "ppo.surrogate_kl_target": 0.01, "ppo.positive_nll_min_score": 1.0,
    "ppo.spike_history": 40, "ppo.on_spike": "skip", "runtime.project": "kedge",
    "rollout.vllm.python": None, "rollout.vllm.urls": [],
    "ppo.value_min": -10.0, "ppo.value_max": 10.0, "ppo.value_num_bins": 101,
    # Taken from ppo.critic_check_*, whose defaults are smaller.
    "evaluate.critic_prompts": 64, "evaluate.critic_prefixes": 4, "evaluate.critic_continuations": 16,
}  # fmt: skip
"""The values of what is no setting any more, which no preset may have needed otherwise."""


PARAMETERS = {
    "ppo.kl_horizon": ("ppo.kl_controller", None), "ppo.length_adaptive_alpha": ("ppo.gae_lambda", 0.05),
}  # fmt: skip
"""Settings that are parameters of another's value, with what they are without it."""
OWNERS = {"ppo.kl_in", *(owner for owner, _ in PARAMETERS.values())}
DERIVED = ("advantage_steps", "spike_sigma", "warmup_fraction")
"""Parameters that a section has under their former names."""


def stages_of(preset: str) -> set[str]:
    """The stages that a recipe describes; the optimizer of the others may be its optimizer now."""
    return {name.partition(".")[0] for name in NUMBERS[preset]} if preset else {"sft", "reward_model", "critic", "ppo"}


@pytest.mark.parametrize("preset", ["", *(name for name in LANGUAGE_PRESETS if name not in LATER)])
def test_a_preset_resolves_to_the_numbers_that_it_had(preset: str) -> None:
    config = load_config(preset=preset or None)
    now = flat_settings(config.model_dump(mode="json"))
    for name, value in {**NUMBERS[""], **NUMBERS[preset]}.items():
        section, _, field = name.partition(".")
        if name in PARAMETERS:
            owner, default = PARAMETERS[name]
            assert parameter(now[owner], default) == value, name
        elif field in DERIVED:
            assert getattr(getattr(config, section), field) == value, name
        elif field == "schedule":
            assert getattr(config, section).decay == value, name
        elif name == "ppo.kl_estimator":
            by_place = "k2" if word(config.ppo.kl_in) == "loss" else "k1"
            assert config.ppo.kl_estimator == (by_place if value == "auto" else value)
        elif name == "ppo.ptx_batch_size":
            assert value is None
            assert now["ppo.ptx_batch"] == (8 if preset == "instructgpt" else 1)
        elif name in CONSTANTS:
            assert value == CONSTANTS[name], name
        elif field in SHARED:
            if section in stages_of(preset):
                assert config.optimization.of(section).arguments[field] == value, name
        elif name not in ("preset", "schedules"):
            assert (word(now[name]) if name in OWNERS else now[name]) == value, name


def test_every_setting_that_went_is_answered_and_every_answer_is_of_one_that_went() -> None:
    fields = dict(all_fields())
    dotted = {name for name in FORMER if "." in name}
    assert {name for name in NUMBERS[""] if name not in fields} - {"schedules"} <= dotted
    assert not dotted & fields.keys()
    bare = [name for name in FORMER if "." not in name]
    assert all(any(name.endswith(f".{one}") for name in FORMER) for one in bare)


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name_gets_one_line_with_the_new_one(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[f"{name}=1"], stage=None)
    assert str(caught.value) == f"{name} {FORMER[name]}"
    new = FORMER[name].removeprefix("is now ")
    if new != FORMER[name] and "part of" not in new and "value of" not in new:
        assert find_field(new.partition(",")[0]), new


def test_one_stage_may_have_another_optimizer() -> None:
    settings = {"adam_eps": 1e-6, "optimization.stages": {"sft": {"adam_eps": 1e-8, "optimizer": "muon"}}}
    config = config_from_settings("ppo", settings)
    assert (config.optimization.of("sft").adam_eps, config.optimization.of("ppo").adam_eps) == (1e-8, 1e-6)
    assert config.training_of("sft")["optimizer"] == "muon"


@pytest.mark.parametrize(
    ("stages", "line"),
    [
        ({"rlhf": {}}, "optimization.stages has rlhf, which is none of sft, reward_model, critic, ppo"),
        ({"sft": {"adam": 1}}, "optimization.stages: adam is none of adam_eps, max_grad_norm"),
        ({"sft": {"adam_eps": -1}}, "optimization.stages: sft.adam_eps: Input should be greater than 0"),
    ],
)
def test_a_mistake_in_the_optimizer_of_one_stage_is_one_line(stages: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        config_from_settings("sft", {"optimization.stages": stages})


def test_the_parameter_of_a_word_is_given_with_it() -> None:
    given = {"kl_controller": {"ziegler": 77}, "missing_eos_score": {"subtract": "auto"}, "offload": "frozen"}
    config = config_from_settings("ppo", given, {"num_responses": 2, "constant_groups": {"resample": 4}})
    assert (word(config.ppo.kl_controller), parameter(config.ppo.kl_controller, 1)) == ("ziegler", 77)
    assert (config.ppo.max_resamples, Config().ppo.max_resamples) == (4, 9)
    assert config.rollout.subtracts_missing_eos
    assert config.rollout.eos_score(reward_model=True) == "auto"
    assert config.rollout.eos_score(reward_model=False) is None
    assert config.runtime.offload == ["frozen"]
    given = {
        "schedule": {"constant": 0.2},
        "advantage": {"n_step": 3},
        "on_spike": {"stop": 6},
        "kl_in": {"loss": "k3"},
    }
    ppo = config_from_settings("ppo", given, {"adam_eps": {"tf1": 1e-3}}).ppo
    assert (ppo.decay, ppo.warmup_fraction, ppo.advantage_steps, ppo.spike_sigma) == ("constant", 0.2, 3, 6)
    assert (ppo.kl_estimator, ppo.needs_values) == ("k3", True)


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("advantage={n_step: 0}", "{n_step: a whole number ≥ 1}, or a function; it is"),
        ("on_spike={skip: 0}", "{stop or skip or rollback: a number > 0}, or null; it is"),
        ("schedule={linear: 1}", "or {linear or cosine or constant: a number > 0 and < 1}; it is"),
        ("adam_eps={tf1: 0}", "a number > 0, or {tf1: a number > 0}; it is"),
        ("constant_groups={resample: 0}", "or {resample: a whole number ≥ 1}; it is"),
        ("constant_groups={resample: 1, drop: 2}", "or {resample: a whole number ≥ 1}; it is"),
        ("kl_controller={}", "or {ziegler: a whole number > 0}; it is {}"),
        ("gae_lambda={length_adaptive: 0}", "or {length_adaptive: a number > 0}; it is"),
        ("missing_eos_score={subtract: x}", "{subtract: a number or auto}, or null; it is"),
        ("critic_check_size=[1, 2]", "such as [32, 4, 8]; at least 2 of the first and last"),
        ("critic_check_size=[1, 2, 3]", "such as [32, 4, 8]; at least 2 of the first and last"),
        ("offload=disk", "runtime.offload must be any of frozen, optimizer; it is disk"),
    ],
)
def test_a_mistake_in_a_parameter_is_one_line(setting: str, line: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(line)):
        load_config(overrides=[setting], stage="ppo")


def test_the_histogram_is_a_range_and_a_number() -> None:
    assert Config().ppo.value_bins is None
    assert config_from_settings("ppo", {"value_loss": "hl_gauss"}).ppo.value_bins == (-10.0, 10.0, 101)
    for bins in ([1, -1, 101], [0, 1, 1]):
        with pytest.raises(ConfigError, match="the lower end, the upper end and the number"):
            config_from_settings("ppo", {"value_loss": {"hl_gauss": bins}})
    for bins in ([0, 1], [0, 1, 2.5]):
        with pytest.raises(ConfigError, match=r"\{hl_gauss: \[a number, a number, a whole number\]\}; it is"):
            config_from_settings("ppo", {"value_loss": {"hl_gauss": bins}})

"""Values with a parameter, such as `{ziegler: 77}`, and the optimizer of one stage."""

import re
from typing import Any

import pytest

from kedge.config import Choice, Config, config_from_settings, load_config
from kedge_base.errors import ConfigError


def test_one_stage_may_have_another_optimizer() -> None:
    settings = {"adam_eps": 1e-6, "optimization.stages": {"sft": {"adam_eps": 1e-8, "optimizer": "muon"}}}
    config = config_from_settings("ppo", settings)
    assert (config.optimization.of("sft").adam_eps, config.optimization.of("ppo").adam_eps) == (1e-8, 1e-6)
    assert config.training_of("sft")["optimizer"] == "muon"


@pytest.mark.parametrize(
    ("stages", "line"),
    [
        ({"rlhf": {}}, "optimization.stages has rlhf, which is not one of sft, reward_model, critic, ppo"),
        ({"sft": {"adam": 1}}, "optimization.stages: adam is not one of adam_eps, max_grad_norm"),
        ({"sft": {"adam_eps": -1}}, "optimization.stages: sft.adam_eps: Input should be greater than 0"),
        (
            {"sft": {"adam_eps": {"tf1": 1e-5}, "optimizer": "muon"}},
            r"optimization.stages: sft: optimization.adam_eps=\{tf1: 1e-05\} is TensorFlow's Adam",
        ),
    ],
)
def test_a_mistake_in_the_optimizer_of_one_stage_is_one_line(stages: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        config_from_settings("sft", {"optimization.stages": stages})


def test_the_parameter_of_a_word_is_given_with_it() -> None:
    given = {"kl_controller": {"ziegler": 77}, "missing_eos_score": {"subtract": "auto"}, "offload": "frozen"}
    config = config_from_settings("ppo", given, {"num_responses": 2, "constant_groups": {"resample": 4}})
    assert (config.ppo.kl_controller.name, config.ppo.kl_control.horizon) == ("ziegler", 77)
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
    assert (ppo.decay, ppo.warmup_fraction, ppo.advantage, ppo.spike_sigma) == ("constant", 0.2, Choice("n_step", 3), 6)
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
        ("kl_controller={}", "wait: a number ≥ 0 and < 1}}; it is {}"),
        ("gae_lambda={length_adaptive: 0}", "or {length_adaptive: a number > 0}; it is"),
        ("missing_eos_score={subtract: x}", "{subtract: a number or auto}, or null; it is"),
        ("ppo.critic_check.size=[1, 2]", "such as [32, 4, 8]; at least 2 of the first and last"),
        ("ppo.critic_check.size=[1, 2, 3]", "such as [32, 4, 8]; at least 2 of the first and last"),
        ("offload=disk", "runtime.offload must be any of frozen, optimizer; it is disk"),
    ],
)
def test_a_mistake_in_a_parameter_is_one_line(setting: str, line: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(line)):
        load_config(overrides=[setting], stage="ppo")


def test_a_parameter_has_a_name_of_its_own_also_without_the_section() -> None:
    given = ["eval_every=5", "eval_every.num_prompts=8", "ppo.kl_controller.target=3", "engine.servers=a"]
    config = load_config(overrides=given, stage="ppo")
    assert (config.ppo.eval_every.updates, config.ppo.eval_every.num_prompts) == (5, 8)
    assert (config.ppo.kl_controller.name, config.ppo.kl_control.target) == ("ziegler", 3)
    assert (config.rollout.engine.name, config.rollout.vllm.servers) == ("vllm", ["a"])
    assert load_config(overrides=["ppo.kl_controller.target=3"], preset="ziegler").ppo.kl_control.wait == 0


def test_the_histogram_is_a_range_and_a_number() -> None:
    assert Config().ppo.value_bins is None
    assert config_from_settings("ppo", {"value_loss": "hl_gauss"}).ppo.value_bins == (-10.0, 10.0, 101)
    for bins in ([1, -1, 101], [0, 1, 1]):
        with pytest.raises(ConfigError, match="the lower end, the upper end and the number"):
            config_from_settings("ppo", {"value_loss": {"hl_gauss": bins}})
    for bins in ([0, 1], [0, 1, 2.5]):
        with pytest.raises(ConfigError, match=r"\{hl_gauss: \[a number, a number, a whole number\]\}; it is"):
            config_from_settings("ppo", {"value_loss": {"hl_gauss": bins}})


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        ({"ppo.eval_every": 4}, (4, 100)),
        ({"ppo.eval_every": None}, (None, 100)),
        ({"ppo.eval_every.num_prompts": 8}, (20, 8)),
        ({"ppo.eval_every": {"updates": 4}}, (4, 64)),
    ],
)
@pytest.mark.parametrize(
    "earlier",
    [
        {"ppo.eval_every": {"updates": 20, "num_prompts": 100}},
        {"ppo.eval_every": 20, "ppo.eval_every.num_prompts": 100},
    ],
)
def test_a_plain_value_keeps_the_other_parameters_of_an_earlier_layer(
    earlier: dict[str, Any], later: dict[str, Any], expected: tuple[int | None, int]
) -> None:
    found = config_from_settings("ppo", earlier, later).ppo.eval_every
    assert (found.updates, found.num_prompts) == expected


def test_the_weight_of_ptx_keeps_the_batch_of_its_preset() -> None:
    found = config_from_settings("ppo", {"preset": "instructgpt", "ppo.ptx_coef": 27.8, "data.pretraining": ["t.txt"]})
    assert (found.ppo.ptx_coef.coef, found.ppo.ptx_coef.batch) == (27.8, 8)

"""What the schema promises: every field explains itself, names that scripts rely on exist, nonsense is refused."""

import re

import pytest
from pydantic import ValidationError

from kedge.config import Config, Ppo, RewardTerm, Rollout
from kedge.config.explain.describe import all_fields, section_type
from kedge.config.schema.field import Section, knob_of

PROMISED = {
    "ppo": "num_updates learning_rate num_epochs num_minibatches clip_range value_clip_range value_coef entropy_coef "
    "kl_coef kl_controller kl_target early_stop_kl gamma gae_lambda max_grad_norm critic",
    "rollout": "num_prompts num_responses max_new_tokens temperature",
    "runtime": "precision seed",
}


@pytest.mark.parametrize(("section", "names"), PROMISED.items())
def test_names_that_scripts_rely_on(section: str, names: str) -> None:
    model = section_type(section)
    assert model is not None
    assert set(names.split()) <= set(model.model_fields)


def test_promised_choices_and_defaults() -> None:
    ppo = Config().ppo
    assert ppo.critic == "shared"
    assert (ppo.clip_range, ppo.gamma, ppo.gae_lambda, ppo.kl_coef, ppo.max_grad_norm) == (0.2, 1.0, 0.95, 0.05, 1.0)
    for controller in ("fixed", "ziegler", "schulman"):
        assert Ppo(kl_controller=controller).kl_controller == controller
    for precision in ("auto", "fp32", "bf16"):
        assert Config.model_validate({"runtime": {"precision": precision}}).runtime.precision == precision


@pytest.mark.parametrize(("name", "field"), [*all_fields(), *RewardTerm.model_fields.items()])
def test_every_field_has_meaning_and_source(name: str, field) -> None:
    knob = knob_of(field)
    assert re.fullmatch(r"[^\n]{10,}\.", knob.meaning), f"{name}: one line that ends in a full stop"
    assert knob.source, name


def test_every_number_that_is_tuned_says_what_too_much_and_too_little_do() -> None:
    # A seed is not tuned; reward weights and settings have no scale of their own.
    silent = [
        name
        for name, field in all_fields()
        if field.annotation in (int, float, int | None, float | None)
        and not (knob_of(field).too_high and knob_of(field).too_low)
    ]
    assert set(silent) <= {"runtime.seed", "generate.num_responses"}


def test_sections_are_frozen() -> None:
    config = Config()
    with pytest.raises(ValidationError):
        config.ppo.clip_range = 0.3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("rm", [("rm", 1.0)]),
        (["rm", "f.py:g"], [("rm", 1.0), ("f.py:g", 1.0)]),
        ({"rm": 2, "f.py:g": -0.5}, [("rm", 2.0), ("f.py:g", -0.5)]),
        ({"source": "rm", "weight": 3}, [("rm", 3.0)]),
        ([{"source": "rm"}, "f.py:g"], [("rm", 1.0), ("f.py:g", 1.0)]),
    ],
)
def test_reward_short_forms(short: object, long: list[tuple[str, float]]) -> None:
    reward = Config.model_validate({"reward": short}).reward
    assert [(term.source, term.weight) for term in reward] == long


@pytest.mark.parametrize(
    ("source", "is_function"),
    [
        ("path/to/file.py:function", True),
        ("package.module:function", True),
        ("models/reward", False),
        ("org/model", False),
        (r"C:\models\reward", False),
    ],
)
def test_a_function_is_told_from_a_reward_model(source: str, is_function: bool) -> None:
    assert RewardTerm(source=source).is_function is is_function


def test_a_single_source_is_a_list_of_one() -> None:
    assert Config.model_validate({"data": {"prompts": "a.jsonl"}}).data.prompts == ["a.jsonl"]


@pytest.mark.parametrize(
    ("score", "with_model", "with_function"), [("auto", -1.0, None), (None, None, None), (-2.5, -2.5, -2.5)]
)
def test_missing_eos_score(score, with_model: float | None, with_function: float | None) -> None:
    rollout = Rollout(missing_eos_score=score)
    assert rollout.eos_score(reward_model=True) == with_model
    assert rollout.eos_score(reward_model=False) == with_function


def test_an_unhalved_value_loss_weighs_twice() -> None:
    assert Ppo(value_coef=0.5).value_weight == 0.5
    assert Ppo(value_coef=0.5, value_loss="mse").value_weight == 1.0


def test_the_kl_estimator_follows_the_place_of_the_kl() -> None:
    assert (Ppo().resolved_kl_estimator, Ppo(kl_in="loss").resolved_kl_estimator) == ("k1", "k2")
    assert Ppo(kl_in="loss", kl_estimator="k3").resolved_kl_estimator == "k3"
    assert Ppo(kl_estimator="k2").resolved_kl_estimator == "k2"


@pytest.mark.parametrize("token", [None, "<eos>", "\n", "7", 7, 0])
def test_a_stop_token_is_a_text_or_an_id(token: str | int | None) -> None:
    stop_token = Rollout(stop_token=token).stop_token
    assert (stop_token, type(stop_token)) == (token, type(token))


def test_sections_are_all_sections() -> None:
    named = {name for name in Config.model_fields if section_type(name)}
    stages = {"sft", "reward_model", "ppo", "rlhf", "generate", "evaluate"}
    assert named == {*stages, "data", "reward_functions", "rollout", "checkpoint", "runtime"}
    assert all(issubclass(section_type(name) or object, Section) for name in named)

"""The schema: every field is documented, names that scripts rely on exist, invalid values are refused."""

import importlib
import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from kedge.config import Config, PpoConfig, RolloutConfig
from kedge.config.explain.describe import all_fields, fields_of, section_type
from kedge.config.schema.field import field_doc
from kedge.config.schema.rewards import RewardTermConfig
from kedge.config.schema.section import Section
from kedge_base.texts import names_function


def ppo_section(**values: object) -> PpoConfig:
    """The section, from flat fields as users write them."""
    return PpoConfig.model_validate(values)


PROMISED = {
    "ppo": "num_updates learning_rate num_epochs num_minibatches clip_range value_clip_range value_coef entropy_coef "
    "kl_coef kl_controller early_stop_kl gamma gae_lambda critic",
    "optimization": "max_grad_norm",
    "rollout": "num_prompts num_responses max_new_tokens temperature",
    "runtime": "precision seed",
}


@pytest.mark.parametrize(("section", "names"), PROMISED.items())
def test_names_that_scripts_rely_on(section: str, names: str) -> None:
    model = section_type(section)
    assert model is not None
    assert set(names.split()) <= {name for name, _ in fields_of(model)}


def test_promised_choices_and_defaults() -> None:
    config = Config()
    ppo = config.ppo
    assert ppo.resolved_critic == "shared"
    assert (
        ppo.clip_range,
        ppo.gamma,
        ppo.gae_lambda,
        ppo.kl_coef,
        config.optimization.max_grad_norm,
    ) == (0.2, 1.0, 1.0, 0.05, 1.0)
    for controller in ("fixed", "ziegler", "schulman"):
        assert ppo_section(kl_controller=controller).kl_controller.name == controller
    for precision in ("auto", "fp32", "bf16"):
        assert Config.model_validate({"runtime": {"precision": precision}}).runtime.precision == precision


@pytest.mark.parametrize(("name", "field"), [*all_fields(), *RewardTermConfig.model_fields.items()])
def test_every_field_has_meaning_and_source(name: str, field) -> None:
    doc = field_doc(field)
    assert re.fullmatch(r"[^\n]{10,}\.", doc.meaning), f"{name}: one line that ends in a full stop"
    assert doc.source, name


def test_every_tunable_number_documents_too_high_and_too_low() -> None:
    # A seed is not tuned; reward weights and settings have no natural scale.
    silent = [
        name
        for name, field in all_fields()
        if field.annotation in (int, float, int | None, float | None)
        and not (field_doc(field).too_high and field_doc(field).too_low)
    ]
    assert set(silent) <= {"runtime.seed", "generate.num_responses"}


SECTION = """
from kedge.config.schema.section import Section


class Tide(Section):
    height: float = 1.0
    \"""Height of the tide, in meters.

    Source: kedge
    \"""
"""


@pytest.mark.parametrize("later", ["def half(", SECTION.replace("tide", "ebb"), None])
def test_documentation_is_that_of_the_imported_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str | None
) -> None:
    """A `git pull` during a run may leave another file, a broken one or none."""
    name = f"tide_{abs(hash(later))}"
    path = tmp_path / f"{name}.py"
    path.write_text(SECTION)
    monkeypatch.syspath_prepend(tmp_path)
    section = importlib.import_module(name).Tide
    path.unlink() if later is None else path.write_text(later)
    assert field_doc(section.model_fields["height"]).meaning == "Height of the tide, in meters."


def test_editors_get_a_json_schema() -> None:
    schema = json.loads(json.dumps(Config.model_json_schema()))
    assert schema["$defs"]["RewardModelConfig"]["properties"]["learning_rate"]["type"] == "number"


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
        ("a:b/file.py:function", True),
        (r"C:\rewards\file.py:function", True),
        ("package.module:function", True),
        ("package.module:Class.method", True),
        ("python:in_memory", True),
        ("openai:llama3:8b@http://127.0.0.1:8000/v1", True),  # a judge behind an API is one of kedge's functions
        ("openai:gpt-4.1-mini", True),
        ("rewards.py", True),  # a function whose name is missing, which the loader reports; never a model
        ("models/reward", False),
        ("org/model", False),
        (r"C:\models\reward", False),
        ("C:/models/reward", False),
        ("model:7b", False),
        ("model:", False),
        ("", False),
    ],
)
def test_a_function_is_told_from_a_reward_model(source: str, is_function: bool) -> None:
    assert names_function(source) is is_function
    assert RewardTermConfig(source=source).is_function is is_function


def test_a_single_source_is_a_list_of_one() -> None:
    assert Config.model_validate({"data": {"prompts": "a.jsonl"}}).data.prompts == ["a.jsonl"]


@pytest.mark.parametrize(
    ("score", "with_model", "with_function"), [("auto", "auto", None), (None, None, None), (-2.5, -2.5, -2.5)]
)
def test_missing_eos_score(score, with_model: float | str | None, with_function: float | None) -> None:
    rollout = RolloutConfig(missing_eos_score=score)
    assert rollout.eos_score(reward_model=True) == with_model
    assert rollout.eos_score(reward_model=False) == with_function


def test_an_unhalved_value_loss_weighs_twice() -> None:
    assert ppo_section(value_coef=0.5).value_weight == 0.5
    assert ppo_section(value_coef=0.5, value_loss="mse").value_weight == 1.0


def test_a_histogram_has_no_value_clip_unless_one_is_asked_for() -> None:
    value = ppo_section(value_loss="hl_gauss")
    assert value.value_clip_range is None
    assert ppo_section(**ppo_section(value_loss="hl_gauss").model_dump()) == value
    assert ppo_section(value_loss="mse").value_clip_range == 1.0


def test_the_kl_estimator_follows_the_place_of_the_kl() -> None:
    assert (ppo_section().kl_estimator, ppo_section(kl_in="loss").kl_estimator) == ("k1", "k2")
    assert ppo_section(kl_in={"loss": "k3"}).kl_estimator == "k3"
    assert ppo_section(kl_in={"reward": "k2"}).kl_estimator == "k2"


@pytest.mark.parametrize("token", [None, "<eos>", "\n", "7", 7, 0, ["<eos>", 7, "7"]])
def test_a_stop_token_is_a_text_or_an_id_or_a_list_of_them(token: str | int | list[str | int] | None) -> None:
    stop_token = RolloutConfig(stop_token=token).stop_token
    assert (stop_token, type(stop_token)) == (token, type(token))
    if isinstance(token, list) and isinstance(stop_token, list):
        assert [type(entry) for entry in stop_token] == [type(entry) for entry in token]


def test_sections_are_all_sections() -> None:
    named = {name for name in Config.model_fields if section_type(name)}
    stages = {"sft", "reward_model", "critic", "ppo", "control", "rlhf", "generate", "evaluate"}
    assert named == {
        *stages,
        "adapter",
        "environment",
        "optimization",
        "data",
        "judge",
        "reward_functions",
        "rollout",
        "checkpoint",
        "push",
        "runtime",
    }
    assert all(issubclass(section_type(name) or object, Section) for name in named)

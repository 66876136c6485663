"""Scheduled fields: values between the points, and one line for every mistake."""

import pytest
import yaml

from kedge.config import Config, config_at, load_config, resolved_yaml, schedule_in_words, scheduled_values
from kedge.config.schedules import SCHEDULABLE
from kedge_base.errors import ConfigError


@pytest.mark.parametrize(
    ("update", "value"),
    # By hand: 0.2 at update 11, 0.1 at 21: a line that falls by 0.01 per update, then one that falls by 0.002.
    [(1, 0.2), (11, 0.2), (12, 0.19), (16, 0.15), (21, 0.1), (46, 0.05), (71, 0.0), (1000, 0.0)],
)
def test_values_are_linear_between_points_and_constant_outside(update: int, value: float) -> None:
    config = load_config(overrides=["schedules.ppo.entropy_coef={21: 0.1, 71: 0.0, 11: 0.2}"])
    assert scheduled_values(config, update) == {"ppo.entropy_coef": pytest.approx(value, abs=1e-12)}
    assert config_at(config, update).ppo.entropy_coef == pytest.approx(value, abs=1e-12)


def test_whole_numbers_are_rounded_and_other_fields_stay() -> None:
    config = load_config(overrides=["schedules.rollout.max_new_tokens={1: 8, 4: 64}", "ppo.clip_range=0.3"])
    assert [config_at(config, update).rollout.max_new_tokens for update in (1, 2, 3, 4)] == [8, 27, 45, 64]
    assert config_at(config, 2).ppo == config.ppo


def test_a_file_may_nest_them_and_what_is_written_can_be_read(tmp_path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("schedules:\n  ppo:\n    kl_coef: {1: 0.1, 50: 0.02}\n    clip_range: {1: 0.2}\n", encoding="utf-8")
    config = load_config(path)
    assert config.schedules == {"ppo.kl_coef": {1: 0.1, 50: 0.02}, "ppo.clip_range": {1: 0.2}}
    path.write_text(resolved_yaml(config), encoding="utf-8")
    assert load_config(path) == config
    assert load_config(path, ["schedules.ppo.clip_range={1: 0.1}"]).schedules["ppo.kl_coef"] == {1: 0.1, 50: 0.02}
    assert "ppo.kl_coef is scheduled: 0.1 at update 1, 0.02 at update 50, linear in between." in schedule_in_words(
        config
    )


@pytest.mark.parametrize("field", SCHEDULABLE)
def test_every_one_of_them_can_be_set(field: str) -> None:
    section, name, *part = field.split(".")
    value = 3 if field in ("ppo.num_epochs", "rollout.max_new_tokens") else 0.5
    then = config_at(load_config(overrides=[f"schedules.{field}={{1: {value}}}"]), 1)
    assert yaml.safe_load(resolved_yaml(then))[section][name] == ({"trainer": value} if part else value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("schedules=3", "schedules must be a mapping of fields to {update: value}; it is 3"),
        ("schedules.ppo.kl_coef=3", "schedules must be a mapping of fields"),
        ("schedules.ppo.kl_coef={1: true}", "schedules must be a mapping of fields"),
        ("schedules.ppo.kl_coef={}", "ppo.kl_coef needs one or more points"),
        ("schedules.ppo.kl_coef={0: 0.1}", "with updates from 1"),
        ("schedules.ppo.kl_coef={5: -1}", "schedules: at update 5, ppo.kl_coef must be a number ≥ 0; it is -1"),
        (
            "schedules.ppo.num_epochs={1: 1.5}",
            "at update 1, ppo.num_epochs must be a whole number ≥ 1, or a number > 0 and < 1; it is 1.5",
        ),
        (
            "schedules.ppo.kl_coef={1: 1} ppo.advantage=grpo ppo.kl_coef=0 ppo.measure_kl=true rollout.num_responses=2",
            "at update 1, ppo.advantage=grpo divides by the standard deviation of a group's rewards",
        ),
        ("schedules.ppo.gamma={3: 0.9} ppo.advantage=remax", "at update 3, ppo.gamma=0.9 scales the rewards"),
        ("schedules.ppo.kl_ceof={1: 1}", "ppo.kl_ceof cannot be scheduled; did you mean ppo.kl_coef?"),
        ("schedules.ppo.num_minibatches={1: 1}", "ppo.num_minibatches cannot be scheduled"),
        ("schedules.ppo.kl_coef={1: 1} ppo.kl_controller=ziegler", "also set by ppo.kl_controller=ziegler"),
        ("schedules.ppo.entropy_coef={1: 1} ppo.entropy_target=2", "also set by ppo.entropy_target=2"),
        (
            'schedules.optimization.max_grad_norm={1: 1} optimization.stages={"ppo":{"max_grad_norm":2}}',
            "also set by optimization.stages.ppo.max_grad_norm",
        ),
        ("schedules.ppo.kl_coef={1: 1} ppo.kl_coef=0", "no reference model is loaded"),
        ("schedules.rollout.max_new_tokens={1: 65}", "set that field to the largest value"),
    ],
)
def test_a_mistake_is_one_line(overrides: str, message: str) -> None:
    name, _, rest = overrides.partition("}")
    given = [f"{name}}}", *rest.split()] if rest or "{" in name else [overrides]
    with pytest.raises(ConfigError) as raised:
        load_config(overrides=given)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_weight_of_a_teacher_may_fall_to_0() -> None:
    fields = ["ppo.reference=teacher", "ppo.kl_coef=1", "schedules={ppo.kl_coef: {1: 1, 100: 0}}"]
    assert config_at(load_config(overrides=fields), 100).ppo.kl_coef == 0


def test_without_schedules_nothing_is_copied() -> None:
    config = Config()
    assert config_at(config, 7) is config


def test_the_optimizer_steps_of_a_run_follow_a_schedule_of_its_epochs() -> None:
    """4, 3 and 2 epochs in the first three of five updates, and 2 in the others: 13 of 2 minibatches each."""
    fields = ["schedules.ppo.num_epochs={1: 4, 3: 2}", "ppo.num_updates=5", "ppo.num_minibatches=2"]
    assert ", 26 optimizer steps." in schedule_in_words(load_config(overrides=fields))

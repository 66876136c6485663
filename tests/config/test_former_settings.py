"""Settings of earlier versions, and settings that imply others."""

from pathlib import Path

import pytest
import yaml

from kedge.config import Config, load_config, resolved_yaml
from kedge.errors import ConfigError

FORMER = {
    "ppo.dual_clip=3": "ppo.policy_loss={dual_clip: 3}",
    "ppo.surrogate_kl_coef=2": "ppo.policy_loss={kl_penalty_fixed: 2}",
    "ppo.policy_loss=kl_penalty_adaptive ppo.surrogate_kl_coef=2": "ppo.policy_loss={kl_penalty_adaptive: 2}",
    "ppo.policy_loss=clipped ppo.surrogate_kl_coef=2": "ppo.policy_loss=clipped",
    "ppo.value_gradient=head": "ppo.critic=detached",
    "ppo.critic=shared ppo.value_gradient=head": "ppo.critic=detached",
    "data.rest=2": "data.draw={evenly: 2}",
    "data.rest=2 data.draw=by_spread": "data.draw={by_spread: 2}",
    "data.rest=0 data.draw=by_spread": "data.draw=by_spread",
    "ppo.critic=separate ppo.freeze_critic=attention": "ppo.critic=frozen_attention",
}


@pytest.mark.parametrize(("before", "now"), FORMER.items())
def test_a_former_setting_is_the_one_that_it_has_become(before: str, now: str) -> None:
    group = "rollout.num_responses=2"
    assert load_config(overrides=[*before.split(), group]) == load_config(overrides=[now, group])


def test_a_run_with_the_defaults_of_former_settings_loads(tmp_path: Path) -> None:
    recorded = yaml.safe_load(resolved_yaml(Config()))
    recorded["ppo"] |= {"dual_clip": None, "surrogate_kl_coef": 1.0, "value_gradient": "trunk", "freeze_critic": "none"}
    recorded["data"]["rest"] = 0
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recorded))
    assert load_config(tmp_path / "config.yaml") == Config()


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("dual_clip", "ppo.policy_loss={dual_clip: 3}"),
        ("surrogate_kl_coef", "ppo.policy_loss={kl_penalty_fixed: 1}"),
        ("value_gradient", "ppo.critic=detached"),
        ("freeze_critic", "ppo.critic=frozen_attention"),
        ("rest", "data.draw={evenly: 3}"),
    ],
)
def test_a_bare_former_name_is_answered_by_the_setting_to_use(name: str, now: str) -> None:
    with pytest.raises(ConfigError, match=name) as error:
        load_config(overrides=[f"{name}=3"], stage="ppo")
    assert now in str(error.value)


@pytest.mark.parametrize(
    ("given", "implied"),
    [
        ("ppo.kl_target=3", "ppo.kl_controller=ziegler"),
        ("ppo.kl_wait_fraction=0", "ppo.kl_controller=ziegler"),
        ("ppo.advantage=grpo rollout.num_responses=2", "ppo.kl_in=loss"),
    ],
)
def test_a_setting_implies_the_one_that_it_is_for(given: str, implied: str) -> None:
    assert load_config(overrides=given.split()) == load_config(overrides=[*given.split(), implied])


def test_what_is_set_is_not_implied(tmp_path: Path) -> None:
    config = load_config(overrides=["ppo.kl_target=3", "ppo.kl_controller=schulman"])
    assert config.ppo.kl_controller.name == "schulman"
    (tmp_path / "config.yaml").write_text(
        resolved_yaml(load_config(overrides=["ppo.kl_target=3", "ppo.kl_controller=fixed"]))
    )
    assert load_config(tmp_path / "config.yaml").ppo.kl_controller.name == "fixed"

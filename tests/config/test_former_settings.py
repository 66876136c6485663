"""Settings of earlier versions, and settings that imply others."""

import shlex
from pathlib import Path

import pytest
import yaml

from kedge.config import Config, config_from_settings, load_config, resolved_yaml
from kedge.config.schema.update.former import PARTS
from kedge_base.errors import ConfigError

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
    "ppo.kl_target=3": "ppo.kl_controller={ziegler: {target: 3}}",
    "ppo.kl_target=3 ppo.kl_controller=fixed": "ppo.kl_controller=fixed",
    "ppo.kl_target=3 ppo.kl_controller=schulman": "ppo.kl_controller={schulman: {target: 3}}",
    "ppo.kl_wait_fraction=0 ppo.kl_controller=schulman": "ppo.kl_controller={schulman: {wait: 0}}",
    "rollout.engine=vllm rollout.vllm.servers=a rollout.vllm.args=b": "rollout.engine={vllm: {servers: a, args: b}}",
    "rollout.vllm.servers=a": "rollout.engine=builtin",
    "ppo.importance_cap=3": "ppo.old_logprobs={trainer: 3}",
    "ppo.importance_cap=null": "ppo.old_logprobs={trainer: null}",
    "ppo.importance_cap=null ppo.old_logprobs=sampler": "ppo.old_logprobs=sampler",
    "'schedules.ppo.importance_cap={1: 2}'": "schedules={ppo.old_logprobs.cap: {1: 2}}",
    "ppo.critic_check_size=[8,2,2]": "ppo.critic_check.size=[8,2,2]",
    "ppo.critic_check=5 ppo.critic_check_size=[8,2,2]": "ppo.critic_check={every: 5, size: [8,2,2]}",
    "ppo.eval_every=5 ppo.eval_num_prompts=8": "ppo.eval_every={updates: 5, num_prompts: 8}",
    "ppo.value_warmup_updates=5 ppo.value_warmup_until=0.4": "ppo.value_warmup_updates={at_most: 5, until: 0.4}",
    "checkpoint.every=5 checkpoint.every_minutes=2": "checkpoint.every={updates: 5, minutes: 2}",
    "ppo.ptx_coef=2 ppo.ptx_batch=8": "ppo.ptx_coef={coef: 2, batch: 8}",
    "ppo.critic=separate ppo.freeze_critic=attention": "ppo.critic=frozen_attention",
}


@pytest.mark.filterwarnings("ignore:.*the old name works:FutureWarning")
@pytest.mark.parametrize(("before", "now"), FORMER.items())
def test_a_former_setting_is_the_one_that_it_has_become(before: str, now: str) -> None:
    group = "rollout.num_responses=2"
    assert load_config(overrides=[*shlex.split(before), group]) == load_config(overrides=[now, group])


@pytest.mark.parametrize(("former", "now"), PARTS.items())
def test_a_former_name_loads_everywhere_and_is_answered_by_the_new_one(former: str, now: str, tmp_path: Path) -> None:
    others = {"size": [8, 2, 2], "target": 3, "batch": 3, "num_prompts": 3, "servers": "a", "args": "a"}
    value = {"folder": "a", **others}.get(now.rpartition(".")[2], 0.5)
    owner = {"ppo.eval_every": 5, "ppo.value_warmup_updates": 5, "rollout.engine": "vllm"}
    rest = {name: set_to for name, set_to in owner.items() if now.startswith(f"{name}.")}
    wanted = load_config(flags={**rest, now: value})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**rest, former: value}))
    assert load_config(tmp_path / "run.yaml") == wanted
    with pytest.warns(FutureWarning, match=f"is now {now}"):
        assert load_config(overrides=[f"{former}={value}"], flags=rest) == wanted
    with pytest.warns(FutureWarning, match=f"is now {now}"):
        assert config_from_settings("ppo", {**rest, former.removeprefix("ppo."): value}) == wanted


def test_a_run_with_the_defaults_of_former_settings_loads(tmp_path: Path) -> None:
    recorded = yaml.safe_load(resolved_yaml(Config()))
    recorded["ppo"] |= {"dual_clip": None, "surrogate_kl_coef": 1.0, "value_gradient": "trunk", "freeze_critic": "none"}
    recorded["rollout"]["vllm"] = {"servers": [], "folder": None, "devices": None, "memory": 0.3, "args": []}
    recorded["ppo"] |= {"importance_cap": "auto", "kl_target": 6.0, "kl_wait_fraction": 0.1}
    recorded["ppo"] |= {
        "eval_num_prompts": 64,
        "critic_check_size": [32, 4, 8],
        "value_warmup_until": None,
        "ptx_batch": 1,
    }
    recorded["checkpoint"] |= {"every": None, "every_minutes": 10.0}
    recorded["data"]["rest"] = 0
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recorded))
    assert load_config(tmp_path / "config.yaml") == Config()


def test_a_former_name_without_its_section_works_in_every_stage_that_has_it() -> None:
    with pytest.warns(FutureWarning, match="every_minutes is now checkpoint.every.minutes"):
        assert load_config(overrides=["every_minutes=3"], stage="sft").checkpoint.every.minutes == 3


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
        ("ppo.kl_controller.target=3", "ppo.kl_controller={ziegler: {target: 3}}"),
        ("ppo.kl_controller.wait=0", "ppo.kl_controller={ziegler: {wait: 0}}"),
        ("ppo.advantage=grpo rollout.num_responses=2", "ppo.kl_in=loss"),
    ],
)
def test_a_setting_implies_the_one_that_it_is_for(given: str, implied: str) -> None:
    assert load_config(overrides=given.split()) == load_config(overrides=[*given.split(), implied])


@pytest.mark.filterwarnings("ignore:.*the old name works:FutureWarning")
def test_what_is_set_is_not_implied(tmp_path: Path) -> None:
    config = load_config(overrides=["kl_target=3", "ppo.kl_controller=schulman"], stage="ppo")
    assert config.ppo.kl_controller.name == "schulman"
    (tmp_path / "config.yaml").write_text(
        resolved_yaml(load_config(overrides=["ppo.kl_target=3", "ppo.kl_controller=fixed"]))
    )
    assert load_config(tmp_path / "config.yaml").ppo.kl_controller.name == "fixed"

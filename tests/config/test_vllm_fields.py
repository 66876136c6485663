"""The parameters of `rollout.engine=vllm`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kedge.config import load_config, resolved_yaml, with_values
from kedge.config.loading.load import changed_settings, changed_values, effective_settings
from kedge_base.errors import ConfigError


def test_parameters_are_set_by_dotted_names_by_nested_mappings_and_from_a_written_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("rollout:\n  engine: {vllm: {servers: http://one, memory: 0.5}}\n", encoding="utf-8")
    config = load_config(path, ["rollout.engine.memory=0.25", "rollout.engine.args=--enforce-eager"])
    assert (config.rollout.vllm.servers, config.rollout.vllm.memory) == (["http://one"], 0.25)
    assert config.rollout.vllm.args == ["--enforce-eager"]
    path.write_text(resolved_yaml(config), encoding="utf-8")
    assert load_config(path) == config
    assert yaml.safe_load(path.read_text())["rollout"]["engine"]["vllm"]["memory"] == 0.25
    assert changed_values(config)["rollout.engine"]["vllm"]["memory"] == 0.25
    assert with_values(config, {"rollout.engine.devices": "1"}).rollout.vllm.devices == "1"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("rollout.engine.memory=2", "rollout.engine.memory must be a number > 0 and ≤ 1; it is 2"),
        ("rollout.engine.server=a", "rollout.engine.server is not a field; did you mean rollout.engine.servers?"),
        ("rollout.vllm=3", "rollout.vllm is not a field"),
        ("rollout.vllm.port=1", "rollout.vllm.port is not a field"),
    ],
)
def test_a_mistake_names_the_field_as_the_user_does(override: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        load_config(overrides=[override])


def test_a_run_may_be_resumed_on_other_servers_but_not_with_another_engine() -> None:
    builtin, one, two = (
        load_config(overrides=overrides)
        for overrides in ([], *([f"rollout.engine.servers=http://{host}"] for host in ("one", "two")))
    )
    assert changed_settings(*effective_settings(one, two)) == []
    assert "rollout.engine: builtin in the run, vllm now" in changed_settings(*effective_settings(builtin, one))


def test_a_run_without_importance_weights_is_resumed_under_the_default() -> None:
    without, default = load_config(overrides=["ppo.old_logprobs.cap=null"]), load_config()
    assert changed_settings(*effective_settings(without, default)) == []

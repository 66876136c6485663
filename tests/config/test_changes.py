"""Changed settings are reported by name, with both values."""

from __future__ import annotations

import pytest
import yaml

from kedge.config import Config, changed_settings, effective_settings, load_config, resolved_yaml
from kedge.config.explain.describe import find_field, section_type
from kedge.config.loading.load import FREE


def settings(*overrides: str) -> dict:
    return load_config(overrides=list(overrides)).model_dump(mode="json")


def test_the_same_configuration_has_no_changes():
    config = load_config(overrides=["ppo.clip_range=0.1", "reward={rm: 0.3}", "data.prompts=[a, b]"])
    assert changed_settings(yaml.safe_load(resolved_yaml(config)), config.model_dump(mode="json")) == []


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        (["ppo.clip_range=0.1"], [], ["ppo.clip_range: 0.1 in the run, 0.2 now"]),
        (["ppo.learning_rate=1e-5"], ["ppo.learning_rate=1.0000001e-5"],
         ["ppo.learning_rate: 1e-05 in the run, 1.0000001e-05 now"]),
        ([], ["model=other"], ["model: null in the run, other now"]),
        (["reward=a"], ["reward={a: 2}"], ["reward[0].weight: 1.0 in the run, 2.0 now"]),
        (["data.prompts=[a]"], ["data.prompts=[a, b]"], ["data.prompts[1]: not set in the run, b now"]),
        (["data.prompts=[a]"], [],
         ["data.prompts[0]: a in the run, not set now", "data.prompts: not set in the run, [] now"]),
        ([], ["runtime.num_threads=1"], ["runtime.num_threads: null in the run, 1 now"]),
        ([], ["out=x", "runtime.num_samples=0", "checkpoint.every=1", "checkpoint.keep=9"], []),
        (["runtime.loggers=wandb"], ["runtime.loggers={trackio: tides, tensorboard: tides}"], []),
    ],
)  # fmt: skip
def test_each_change_is_a_line(before, now, lines):
    assert changed_settings(settings(*before), settings(*now)) == lines


def test_allowed_changes_are_left_out():
    saved, current = settings("reward=a"), settings("reward=b", "ppo.clip_range=0.1", "ppo.gamma=0.9")
    assert changed_settings(saved, current, allowed=["reward", "ppo"]) == []
    assert changed_settings(saved, current, allowed=["reward", "ppo.clip_range"]) == [
        "ppo.gamma: 1.0 in the run, 0.9 now"
    ]
    assert len(changed_settings(saved, current, allowed=["rew", "ppo.clip", "pp"])) == 3


def test_other_names_are_compared_too():
    assert changed_settings({"data": "ab12"}, {"data": "cd34"}) == ["data: ab12 in the run, cd34 now"]


def test_free_settings_exist():
    assert all(find_field(name) or section_type(name) for name in FREE)


def test_a_field_missing_from_a_saved_file_is_reported():
    saved = settings()
    del saved["ppo"]["gamma"]
    assert changed_settings(saved, Config().model_dump(mode="json")) == ["ppo.gamma: not set in the run, 1.0 now"]


def test_a_run_from_before_auto_is_resumed_under_its_default():
    saved = load_config(overrides=["ppo.critic=shared", "ppo.whiten_advantages=true"])
    assert changed_settings(*effective_settings(saved, Config())) == []
    without = load_config(overrides=["ppo.advantage=to_go"])
    assert "ppo.critic: shared in the run, none now" in changed_settings(*effective_settings(saved, without))


@pytest.mark.parametrize("change", ["rollout.max_staleness=1", "rollout.engine=vllm", "ppo.advantage=to_go"])
def test_a_setting_that_is_auto_in_both_is_not_named(change):
    """It has other values there only because the setting that changed does."""
    changes = changed_settings(*effective_settings(Config(), load_config(overrides=[change])))
    assert [line.split(":")[0] for line in changes] == [change.split("=")[0]]

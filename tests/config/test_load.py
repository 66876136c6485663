"""Files, overrides, flags and presets: precedence, parsing, and that a resolved configuration reads back."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.config import (
    Config,
    config_from_settings,
    load_config,
    preset_conflicts,
    resolved_yaml,
    with_values,
)
from kedge_base.errors import ConfigError


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("preset: tldr-n+\nmodel: m\nppo:\n  kl_coef: 0.1\n  clip_range: 0.15\nrollout.temperature: 0.9\n")
    return path


def test_precedence_flags_overrides_file_preset_defaults(run_yaml: Path) -> None:
    config = load_config(
        run_yaml, ["ppo.clip_range=0.25", "ppo.gamma=0.9", "ppo.clip_range=0.3"], {"ppo.gamma": 0.8, "model": None}
    )
    assert config.ppo.gamma == 0.8  # flag
    assert config.ppo.clip_range == 0.3  # the later override
    assert config.ppo.kl_coef == 0.1  # file
    assert config.rollout.temperature == 0.9  # file, dotted
    assert config.ppo.value_coef == 0.1  # preset
    assert config.ppo.clip_range_high is None  # default
    assert config.model == "m"  # a flag that was not given leaves it


def test_a_further_preset_is_merged_over_that_of_the_file(run_yaml: Path) -> None:
    config = load_config(run_yaml, ["critic_init=policy"], preset="ziegler")
    assert config.preset == ["tldr-n+", "ziegler"]
    assert config.ppo.kl_control.horizon == 10_000
    assert config.sft.batch_size == 128  # of tldr-n+ alone
    assert config.ppo.kl_coef == 0.1  # still the file's
    replaced = load_config(run_yaml, ["preset=null"], preset="ziegler")
    assert (replaced.preset, replaced.sft.batch_size) == (["ziegler"], Config().sft.batch_size)


MERGED = {"ppo.advantage": "grpo", "rollout.num_responses": 64, "ppo.learning_rate": 1e-4, "rollout.max_new_tokens": 48}
"""What the presets grpo and small-cpu set alone, by hand from their definitions."""


@pytest.mark.parametrize(
    ("names", "epochs", "prompts"), [(["grpo", "small-cpu"], 4, 64), (["small-cpu", "grpo"], 1, 16)]
)
def test_presets_merge_in_order_however_they_are_given(
    names: list[str], epochs: int, prompts: int, tmp_path: Path
) -> None:
    listed, first = tmp_path / "listed.yaml", tmp_path / "first.yaml"
    listed.write_text(f"preset: [{', '.join(names)}]\n")
    first.write_text(f"preset: {names[0]}\n")
    for config in (
        load_config(preset=names),
        load_config(listed),
        load_config(first, preset=names[1]),
        load_config(first, [f"preset={names[1]}"]),
        load_config(None, [f"preset=[{','.join(names)}]"]),
        load_config(None, [f"preset={name}" for name in (names[1], *names)]),
        config_from_settings("ppo", {"preset": names}),
        config_from_settings("ppo", {"preset": tuple(names)}),
        with_values(load_config(preset=names), {"out": "x"}),
    ):
        values = config.model_dump()
        found = {name: values[name.split(".")[0]][name.split(".")[1]] for name in MERGED}
        assert (config.preset, found) == (names, MERGED)
        assert (config.ppo.num_epochs, config.rollout.num_prompts) == (epochs, prompts)
        first_name, last = names
        old = {"grpo": (16, 1), "small-cpu": (64, 4)}[first_name]
        assert preset_conflicts(config) == (
            f"presets differ, and the later one counts: rollout.num_prompts={prompts} as in {last} ({old[0]} in "
            f"{first_name}), ppo.num_epochs={epochs} as in {last} ({old[1]} in {first_name})"
        )


def test_a_conflict_of_presets_that_the_user_or_the_stage_settles_is_not_said() -> None:
    names = ["grpo", "small-cpu"]
    assert (
        preset_conflicts(load_config(None, ["num_epochs=7", "rollout.num_prompts=8"], preset=names, stage="ppo"))
        is None
    )
    assert preset_conflicts(load_config(preset=names), "sft") is None
    assert preset_conflicts(load_config(preset=["small-cpu", "rloo", "rloo"])) is not None
    assert preset_conflicts(load_config(preset=["small-cpu", "reinforce++"])) is None


def test_a_preset_beside_a_file_that_sets_all_its_fields_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(resolved_yaml(load_config(preset="small-cpu")))
    for arguments in ({"preset": "grpo"}, {"overrides": ["preset=grpo"]}):
        with pytest.raises(
            ConfigError, match=r"^preset grpo would have no effect: .*run.yaml sets all of its fields, "
        ):
            load_config(path, **arguments)
    assert load_config(path, preset="small-cpu") == load_config(preset="small-cpu")  # the command repeated


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("grpo,small-cpu", "preset 'grpo,small-cpu' does not exist; give --preset once for each"),
        ("small-cpu, grpo", "preset 'small-cpu, grpo' does not exist; give --preset once for each"),
        (["grpo", "best"], "preset 'best' does not exist; choose one of tldr-n+"),
        (["grpo", 3], "preset 3 does not exist"),
        ([["grpo"]], "preset ['grpo'] does not exist"),
        ({"grpo": 1}, "preset {'grpo': 1} does not exist"),
        (
            ["sao", "grpo"],
            "presets sao, grpo do not fit together: ppo.gae_lambda=length_adaptive needs ppo.advantage=gae",
        ),
    ],
)
def test_a_list_of_presets_with_a_mistake_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_settings("ppo", {"preset": given})
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("text", ["3e-6", "3E-6", "3.0e-6", "3.e-6", "0.3e-5", "+3e-6", "0.000003"])
def test_scientific_notation_is_a_number(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"ppo:\n  learning_rate: {text}\nreward:\n  f.py:g: {text}\n")
    assert load_config(path).ppo.learning_rate == pytest.approx(3e-6, rel=1e-12)
    assert load_config(path).reward[0].weight == pytest.approx(3e-6, rel=1e-12)
    assert load_config(overrides=[f"ppo.learning_rate={text}"]).ppo.learning_rate == pytest.approx(3e-6, rel=1e-12)


@settings(max_examples=15)
@given(
    rate=st.floats(0, 1e3, allow_subnormal=True),
    prompts=st.lists(st.text(min_size=1, max_size=20), max_size=3),
    seed=st.integers(0, 2**63 - 1),
    stop=st.none() | st.text(max_size=8),
)
def test_a_resolved_configuration_reads_back(
    tmp_path_factory: pytest.TempPathFactory, rate: float, prompts: list[str], seed: int, stop: str | None
) -> None:
    settings = {"learning_rate": rate, "data.prompts": prompts, "seed": seed, "stop_token": stop, "preset": "stiennon"}
    config = config_from_settings("ppo", settings)
    path = tmp_path_factory.mktemp("run") / "config.yaml"
    path.write_text(resolved_yaml(config), encoding="utf-8")
    assert load_config(path) == config


@pytest.mark.parametrize(
    "text", ["1e5", "1e-5", "-3E+6", "+.5e3", "2.e1", "1_0e2", "1e5x", "0x1F", "1:30", "~", "no", "3"]
)
def test_a_text_that_looks_like_a_number_reads_back_as_text(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    reward = {"source": "f.py:g", "settings": {"unit": text, text: 1e-5}}
    config = config_from_settings("ppo", {"out": text, "data.columns": {"prompt": text}, "reward": reward})
    path.write_text(resolved_yaml(config), encoding="utf-8")
    assert load_config(path) == config


def test_resolved_yaml_names_the_versions() -> None:
    assert resolved_yaml(Config()).startswith("# kedge ")
    assert "torch " in resolved_yaml(Config()).splitlines()[0]


@pytest.mark.parametrize("text", ["ppo: {gamma: 1}\nppo.gamma: 0.9\n", "ppo.gamma: 0.9\nppo:\n  gamma: 1\n"])
def test_a_field_in_its_section_and_by_itself_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"^{path}:{text.count(chr(10))}: ppo\.gamma is given twice; keep one$"):
        load_config(path)
    # In Python, where settings are often defaults with others over them, the more exact name counts.
    assert config_from_settings("ppo", {"ppo": {"gamma": 1.0}, "gamma": 0.9}).ppo.gamma == 0.9


def test_a_name_that_looks_like_a_date_is_a_name(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("out: 2024-01-01\nreward: {a: 1, b: 2}\n")
    assert load_config(path).out == load_config(overrides=["out=2024-01-01"]).out == "2024-01-01"


@pytest.mark.parametrize("name", ["007", "12:30", "1:30.5", "0o17"])
def test_a_name_that_older_yaml_reads_as_another_number_is_a_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"out: {name}\n")
    assert load_config(path).out == load_config(overrides=[f"out={name}"]).out == name


def test_a_leading_zero_does_not_change_a_number() -> None:
    config = load_config(overrides=["ppo.num_updates=010", "schedules.ppo.kl_coef={010: 0.1}", "data.mix=[03, 1_0]"])
    assert (config.ppo.num_updates, config.schedules["ppo.kl_coef"], config.data.mix) == (10, {10: 0.1}, [3, 10])


def test_the_class_of_an_environment_may_stand_for_its_section(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("environment: a.py:A\n")
    given = load_config(path, ["environment.max_turns=3"]).environment
    assert (given.source, given.max_turns) == ("a.py:A", 3)
    path.write_text("environment: {source: a.py:A, max_turns: 3}\n")
    given = load_config(path, ["environment=b.py:B"]).environment
    assert (given.source, given.max_turns) == ("b.py:B", 3)


def test_a_commented_out_section_is_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfppo:\r\n  # clip_range: 0.1\r\n")
    assert load_config(path) == Config()


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.touch()
    assert load_config(path) == Config()


def test_aliases_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("sft: &opt {learning_rate: 1e-4, num_epochs: 2}\nreward_model:\n  <<: *opt\n  num_epochs: 1\n")
    with pytest.raises(ConfigError, match=r"line 3: aliases such as \*opt are not supported; write the value out"):
        load_config(path)


def test_a_resolved_configuration_has_no_aliases(tmp_path: Path) -> None:
    shared = {"words": ["a", "b"]}
    path = tmp_path / "config.yaml"
    config = config_from_settings(
        "ppo", {"reward": [{"source": "f.py:g", "settings": {"first": shared, "second": shared}}]}
    )
    path.write_text(resolved_yaml(config), encoding="utf-8")
    assert load_config(path) == config


def test_with_values_sets_and_checks() -> None:
    config = with_values(load_config(preset="ziegler"), {"reward": ["rm"], "out": "x", "ppo.num_updates": 2})
    assert (config.out, config.ppo.num_updates, config.ppo.kl_coef) == ("x", 2, 0.15)
    assert config.reward[0].source == "rm"
    with pytest.raises(ConfigError, match="does not divide"):
        with_values(config, {"ppo.num_minibatches": 7})
    with pytest.raises(ConfigError, match=r"the nearest divisor is 8$"):
        with_values(config, {"rollout.num_prompts": 8, "ppo.num_minibatches": 9})


def test_settings_by_bare_dotted_and_section_names() -> None:
    settings = {"num_updates": 3, "max_new_tokens": 7, "seed": 5, "ppo": {"kl_coef": 0.2}, "data.max_length": 9}
    config = config_from_settings("ppo", settings)
    assert (config.ppo.num_updates, config.rollout.max_new_tokens, config.runtime.seed) == (3, 7, 5)
    assert (config.ppo.kl_coef, config.data.max_length) == (0.2, 9)


def test_a_bare_name_means_the_section_of_its_stage() -> None:
    assert config_from_settings("sft", {"learning_rate": 0.5}).sft.learning_rate == 0.5
    assert config_from_settings("reward", {"learning_rate": 0.5}).reward_model.learning_rate == 0.5
    assert config_from_settings("ppo", {"num_prompts": 4}).rollout.num_prompts == 4
    assert config_from_settings("evaluate", {"num_prompts": 4}).evaluate.num_prompts == 4


def test_bare_names_on_the_command_line_mean_what_they_mean_in_python() -> None:
    given = ["num_updates=3", "every=5", "prompts=[p]", "ppo.num_updates=4"]
    config = load_config(overrides=given, stage="ppo")
    assert config == config_from_settings("ppo", {"ppo.num_updates": 4, "every": 5, "prompts": ["p"]})
    assert load_config(overrides=["clip_range=0.1"]).ppo.clip_range == 0.1  # unique among all sections
    with pytest.raises(ConfigError, match=r"learning_rate is a field of several .* write sft\.learning_rate or"):
        load_config(overrides=["learning_rate=0.1"])


@pytest.mark.parametrize(
    ("stage", "name", "said"),
    [
        ("rlhf", "num_prompts", ["rlhf.num_prompts", "rollout.num_prompts"]),
        ("rlhf", "learning_rate", ["ppo.learning_rate", "sft.learning_rate", "reward_model.learning_rate"]),
        ("ppo", "clip_rang", ["not a setting of ppo", "ppo.clip_range"]),
        ("sft", "clip_range", ["clip_range is not a setting of sft; the field is ppo.clip_range"]),
        ("ppo", "comparisons", ["comparisons is not a setting of ppo; the field is data.comparisons"]),
        ("ppo", "eps_clip", ["eps_clip is OpenRLHF's name; here it is ppo.clip_range"]),
    ],
)
def test_a_bare_name_that_is_not_clear_is_refused(stage: str, name: str, said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_settings(stage, {name: 1})
    assert all(part in str(caught.value) for part in said)


@pytest.mark.parametrize(("preset", "names"), [("null", []), ("grpo", ["grpo"])])
def test_the_preset_in_a_file_may_be_a_name_or_null(tmp_path: Path, preset: str, names: list[str]) -> None:
    path = tmp_path / "config.yaml"
    text = resolved_yaml(load_config(preset=names))
    path.write_text(re.sub(r"preset:.*?\n(?=data:)", f"preset: {preset}\n", text, flags=re.DOTALL))
    assert load_config(path) == load_config(preset=names)


@pytest.mark.parametrize("stage", ["critic", "ppo", "rlhf", "generate", "evaluate"])
def test_limits_of_judges_need_their_section(stage: str) -> None:
    """`max_tokens` alone would seem to limit the responses."""
    with pytest.raises(ConfigError, match=r"the field is judge\.max_tokens"):
        load_config(None, ["max_tokens=5"], {}, None, stage=stage)
    assert load_config(None, ["judge.max_tokens=5"], {}, None, stage=stage).judge.max_tokens == 5

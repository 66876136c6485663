"""Which runs a sweep makes."""

from collections.abc import Mapping
from typing import Any

import pytest

from kedge.config import Config, load_config
from kedge_base.errors import ConfigError
from kedge_lab.sweep import plan_trials, split_override


def resolve(values: Mapping[str, Any]) -> Config:
    return load_config(overrides=[f"{field}={value}" for field, value in values.items()])


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("ppo.clip_range=0.1", ["0.1"]),
        ("ppo.clip_range=0.1, 0.2", ["0.1", "0.2"]),
        ("runtime.loggers=[wandb,trackio]", ["[wandb,trackio]"]),
        ("runtime.loggers=[wandb,trackio],[]", ["[wandb,trackio]", "[]"]),
        ("schedules={ppo.kl_coef: {1: 1, 2: 0}},{}", ["{ppo.kl_coef: {1: 1, 2: 0}}", "{}"]),
        ("evaluate.judge='a,b',c", ["'a,b'", "c"]),
        ("ppo.learning_rate=1e-6..1e-4", ["1e-6..1e-4"]),
        ("data.prompts=don't.txt,b.txt", ["don't.txt", "b.txt"]),
    ],
)
def test_commas_separate_values_unless_bracketed_or_quoted(override: str, values: list[str]) -> None:
    assert split_override(override) == (override.partition("=")[0], values)


def test_every_combination_runs_with_every_seed() -> None:
    swept = {"ppo.learning_rate": ["1e-5", "1e-4"], "ppo.policy_loss": ["clipped", "unclipped"]}
    trials = plan_trials(swept, [0, 7], resolve)
    assert len(trials) == len({trial.name for trial in trials}) == 8
    assert trials[1].name == "learning_rate=1e-5_policy_loss=clipped_seed=7"
    assert trials[1].values == trials[0].values == {"ppo.learning_rate": "1e-5", "ppo.policy_loss": "clipped"}
    config = trials[7].config
    assert (config.ppo.learning_rate, config.ppo.policy_loss, config.runtime.seed) == (
        1e-4,
        "unclipped",
        7,
    )


def test_without_seeds_the_configured_one_counts_and_more_seeds_keep_its_runs() -> None:
    swept = {"ppo.num_epochs": ["1", "2"]}

    def seeded(values: Mapping[str, str]) -> Config:
        return resolve({"runtime.seed": "7", **values})

    alone = plan_trials(swept, None, seeded)
    assert [trial.config.runtime.seed for trial in alone] == [7, 7]
    names = {trial.name for trial in plan_trials(swept, [7, 8], seeded)}
    assert len(names) == 4
    assert names > {trial.name for trial in alone}
    [trial] = plan_trials({"model": ["../base"]}, None, seeded)
    assert (trial.config.model, trial.seed) == ("../base", 7)


def test_random_settings_lie_in_their_ranges_and_are_the_same_every_time() -> None:
    swept = {"ppo.learning_rate": ["1e-6..1e-2"], "ppo.num_epochs": ["1..8"], "ppo.gae_lambda": ["0.9..1.0"]}
    trials = plan_trials(swept, [0], resolve, num_random=40)
    rates = sorted(trial.config.ppo.learning_rate for trial in trials)
    assert 1e-6 <= rates[0] < 1e-5 < 1e-4 < rates[-1] <= 1e-2  # a linear scale puts 1 in 1,000 below 1e-5
    assert {trial.config.ppo.num_epochs for trial in trials} == set(range(1, 9))
    assert all(0.9 <= trial.config.ppo.gae_lambda <= 1 for trial in trials)
    assert [trial.name for trial in plan_trials(swept, [0], resolve, num_random=40)] == [each.name for each in trials]


@pytest.mark.parametrize(
    ("field", "span", "low", "high"),
    [("ppo.gamma", "0.9990..0.9999", 0.999, 0.9999), ("ppo.gae_lambda", "0.123456..0.123459", 0.123456, 0.123459)],
)
def test_a_narrow_range_is_not_left(field: str, span: str, low: float, high: float) -> None:
    drawn = [float(trial.values[field]) for trial in plan_trials({field: [span]}, [0], resolve, num_random=12)]
    assert len(drawn) == 12
    assert low <= min(drawn) < max(drawn) <= high


def test_whole_numbers_of_a_wide_range_are_drawn_on_a_log_scale() -> None:
    trials = plan_trials({"ppo.num_updates": ["1..1000"]}, [0], resolve, num_random=40)
    assert sum(trial.config.ppo.num_updates <= 100 for trial in trials) > 20  # a linear scale puts 4 of 40 there


def test_no_more_settings_are_drawn_than_there_are() -> None:
    assert len(plan_trials({"ppo.num_epochs": ["1..3"]}, [0], resolve, num_random=9)) == 3


def test_names_are_those_of_folders() -> None:
    long = ",".join(f"a/b{number}.jsonl" for number in range(40))
    trials = plan_trials({"data.prompts": [f"[{long}]", "other/x.jsonl"]}, [0], resolve)
    assert all("/" not in trial.name and len(trial.name) < 150 for trial in trials)
    assert len({trial.name for trial in trials}) == 2


@pytest.mark.parametrize(
    ("swept", "seeds", "message"),
    [
        ({}, [0], "nothing varies"),
        ({"ppo.num_epochs": ["1", "2"]}, [], "the sweep has no runs"),
        ({"ppo.num_epochs": []}, None, "the sweep has no runs"),
        ({"ppo.learning_rate": ["1e-6..1e-4"]}, [0], "is a range; add num_random=N"),
        ({"ppo.num_epochs": ["1", "1"]}, [0], "two runs of the sweep are the same"),
        ({"push.repo": ["me/a", "me/b"]}, [0], "a sweep pushes no model"),
        ({"runtime.seed": ["1", "2"]}, None, "give the seeds of every setting with seeds="),
        ({"seed": ["1", "2"]}, [0], "give the seeds of every setting with seeds="),
        ({"ppo.num_epochs": ["1", "0"]}, [0], "ppo.num_epochs must be a whole number ≥ 1"),
    ],
)
def test_a_mistake_is_found_before_the_first_run(
    swept: dict[str, list[str]], seeds: list[int] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        plan_trials(swept, seeds, resolve)

"""Findings and advice with every advantage estimator, and with every spelling of a setting that takes a parameter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from kedge.config import config_from_settings
from kedge_base.errors import KedgeError
from kedge_base.estimators import ESTIMATORS
from kedge_inspect.doctor import diagnose
from kedge_inspect.record import RunRecord
from tests.inspect.doctor.cases import CASES
from tests.inspect.doctor.synthetic import synthetic_run, towards

SAMPLED = {"rollout.num_prompts": 128, "rollout.num_responses": 4, "ppo.num_epochs": 2}
DRIFTING = {
    "objective/kl": towards(0.0, 8.0),
    "objective/kl_coef": [0.001] * 16,
    "reward/score_mean": [1.0] * 4 + [2.0] * 12,
    "reward/score_std": [0.5] * 16,
}
STRONG = {"objective/kl_coef": [9.0] * 16, "reward/score_mean": [1.0] * 16, "reward/score_std": [0.5] * 16}
RUNS = {
    **{case.rule: case.faulty for case in CASES if case.faulty.stage == "ppo"},
    "drifting": synthetic_run(metrics=DRIFTING),
    "drifting without a penalty": synthetic_run(metrics={**DRIFTING, "objective/kl_coef": 0.0}),
    "held by its penalty": synthetic_run(metrics=STRONG),
    "small spread": synthetic_run(metrics={"group/small_spread": [0.5] * 16}),
}
PENALTIES: tuple[Mapping[str, Any], ...] = (
    {"ppo.kl_in": "loss"},
    {"ppo.kl_in": "reward"},
    {"ppo.kl_in": "reward", "ppo.kl_coef": 0.0},
)
PAIRS: tuple[tuple[str, str, Any], ...] = (
    ("ppo.advantage", "gigpo", {"gigpo": 1.0}),
    ("ppo.advantage", "spo", {"spo": 0.875}),
    ("ppo.advantage", "n_step", {"n_step": 5}),
    ("ppo.constant_groups", "resample", {"resample": 9}),
    ("ppo.critic", "readout", {"readout": 8}),
    ("ppo.critic", "privileged", {"privileged": ["answer"]}),
    ("ppo.importance_mask", "token", {"token": [0.5, 2.0]}),
    ("ppo.kl_controller", "schulman", {"schulman": {"target": 6.0}}),
    ("ppo.kl_controller", "ziegler", {"ziegler": {"target": 6.0}}),
    ("ppo.kl_in", "loss", {"loss": "k2"}),
    ("ppo.kl_in", "reward", {"reward": "k1"}),
    ("ppo.kl_in", "score", {"score": "k1"}),
    ("ppo.old_logprobs", "trainer", {"trainer": "auto"}),
    ("ppo.on_spike", "skip", {"skip": 8.0}),
    ("ppo.policy_loss", "dual_clip", {"dual_clip": 3.0}),
    ("ppo.policy_loss", "kl_penalty_adaptive", {"kl_penalty_adaptive": 1.0}),
    ("ppo.policy_loss", "kl_penalty_fixed", {"kl_penalty_fixed": 1.0}),
    ("ppo.value_loss", "hl_gauss", {"hl_gauss": [-10.0, 10.0, 101]}),
)
"""Settings with a parameter that is also its default. `rollout.engine`, `data.draw` and schedules have no default."""


@cache
def loaded(settings: str) -> Mapping[str, Any]:
    """The configuration that settings in JSON give."""
    return config_from_settings("ppo", json.loads(settings)).model_dump(mode="json")


def findings(run: RunRecord, settings: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> list[Any]:
    """What the doctor says of a run with these settings, each of whose changes loads."""
    found = diagnose(replace(run, config=config or loaded(json.dumps(settings))))
    for each in found:
        # A critic's settings must be removed with it; the advice names each of them.
        changed = {**settings, **each.changes}
        kept = {name: value for name, value in changed.items() if f"leave out {name}" not in each.try_}
        loaded(json.dumps(kept))
    return found


def allowed() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every estimator, with each penalty that a configuration with it accepts."""
    for name in ESTIMATORS:
        number = len(PENALTIES)
        for penalty in PENALTIES:
            try:
                config_from_settings("ppo", settings := {**SAMPLED, "ppo.advantage": name, **penalty})
            except KedgeError:
                number -= 1
            else:
                yield name, settings
        assert number >= 2, f"{name}: PENALTIES has too few that it accepts"


@pytest.mark.parametrize(("name", "settings"), allowed())
def test_what_is_advised_loads_with_every_estimator(name: str, settings: dict[str, Any]) -> None:
    for run in RUNS.values():
        findings(run, settings)


@pytest.mark.parametrize(("field", "word", "written"), PAIRS)
def test_a_parameter_that_is_the_default_changes_no_finding(field: str, word: str, written: Any) -> None:
    settings = {**SAMPLED, **{"ppo.kl_in": "loss"}, field: word}
    config = config_from_settings("ppo", settings).model_dump(mode="json")
    section, name = field.split(".")
    assert config[section][name] == word
    other = {**config, section: {**config[section], name: written}}
    for label, run in RUNS.items():
        short, long = findings(run, settings), findings(run, {**settings, field: written}, other)
        assert [each.rule for each in short] == [each.rule for each in long], label
        assert [each.changes for each in short] == [each.changes for each in long], label


def test_estimators_that_divide_are_told_the_same() -> None:
    """The advantages of each have a spread of 1, in every spelling."""
    names = [name for name, facts in ESTIMATORS.items() if facts.divides]
    for penalty in PENALTIES[0], PENALTIES[2]:
        for run in RUNS.values():
            said: set[str] = set()
            for advantage in [*names, {"gigpo": 1.0}]:
                found = findings(run, {**SAMPLED, "ppo.advantage": advantage, **penalty})
                said.add(str([(each.rule, each.changes) for each in found]))
            assert len(said) == 1

"""No metrics or settings, however odd, make the doctor raise: it runs inside the training loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge_inspect.doctor import diagnose
from kedge_inspect.record import RunRecord
from tests.inspect.doctor.cases import CASES
from tests.inspect.doctor.synthetic import BY_NAME, metrics_read

NAMES = sorted(
    {name for case in CASES for row in case.faulty.metrics for name in row if name != "update"}.union(
        *(metrics_read(BY_NAME[case.rule], case.faulty) for case in CASES)
    )
)
NUMBERS = st.one_of(
    st.none(), st.sampled_from([0.0, -1.0, 1.0, 1e-12, 1e30, -1e30, float("nan"), float("inf")]), st.floats(-100, 100)
)
FIELDS = ["learning_rate", "num_epochs", "kl_coef", "kl_controller", "entropy_coef", "value_coef", "num_updates"]
VALUES = st.one_of(st.none(), st.booleans(), st.integers(0, 3), st.floats(0, 10), st.text(max_size=2))


@st.composite
def runs(draw: st.DrawFn) -> RunRecord:
    """Rows with any values, under any settings."""
    updates = draw(st.integers(0, 14))
    names = draw(st.lists(st.sampled_from(NAMES), max_size=len(NAMES), unique=True))
    steady = {name: draw(NUMBERS) for name in names}
    rows: list[dict[str, Any]] = [{"update": update + 1, **steady} for update in range(updates)]
    for row in rows[: draw(st.integers(0, updates))]:
        row[draw(st.sampled_from(NAMES))] = draw(NUMBERS)
    config = {
        "ppo": draw(st.dictionaries(st.sampled_from(FIELDS), VALUES)),
        "reward": draw(st.sampled_from([None, [], [{}], [{"source": "rm", "weight": 0, "name": None}]])),
        "rollout": draw(st.sampled_from([None, {}, {"num_prompts": 0, "missing_eos_score": "auto"}])),
    }
    return RunRecord(Path("run"), {"stage": "ppo"}, config, rows)


@given(runs())
@settings(max_examples=150, deadline=None)
def test_no_metrics_and_no_settings_make_a_rule_raise(run: RunRecord) -> None:
    for finding in diagnose(run):
        assert finding.seen
        assert finding.rule


@pytest.mark.parametrize("name", ["entropy_coef", "entropy_target", "clip_range", "value_head_rate"])
def test_a_setting_that_is_text_does_not_make_a_rule_raise(name: str) -> None:
    for case in CASES:
        config = {**case.faulty.config, "ppo": {**case.faulty.config.get("ppo", {}), name: "0"}}
        assert replace(case.faulty, config=config).number(f"ppo.{name}") == 0
        diagnose(replace(case.faulty, config=config))

"""Whatever a run has measured, the doctor says something or nothing: it never ends the run that it looks at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.inspect.doctor import RULES, diagnose
from kedge.inspect.record import RunRecord

NAMES = sorted({name.replace("NAME", "mine") for rule in RULES for name in rule.reads})
FIGURES = st.one_of(
    st.none(), st.sampled_from([0.0, -1.0, 1.0, 1e-12, 1e30, -1e30, float("nan"), float("inf")]), st.floats(-100, 100)
)
KNOBS = ["learning_rate", "num_epochs", "kl_coef", "kl_target", "entropy_coef", "value_coef", "num_updates"]
VALUES = st.one_of(st.none(), st.booleans(), st.integers(0, 3), st.floats(0, 10), st.text(max_size=2))


@st.composite
def runs(draw: st.DrawFn) -> RunRecord:
    """Rows with any figures, under any settings."""
    updates = draw(st.integers(0, 14))
    names = draw(st.lists(st.sampled_from(NAMES), max_size=len(NAMES), unique=True))
    steady = {name: draw(FIGURES) for name in names}
    rows: list[dict[str, Any]] = [{"update": update + 1, **steady} for update in range(updates)]
    for row in rows[: draw(st.integers(0, updates))]:
        row[draw(st.sampled_from(NAMES))] = draw(FIGURES)
    config = {
        "ppo": draw(st.dictionaries(st.sampled_from(KNOBS), VALUES)),
        "reward": draw(st.sampled_from([None, [], [{}], [{"source": "rm", "weight": 0, "name": None}]])),
        "rollout": draw(st.sampled_from([None, {}, {"num_prompts": 0, "missing_eos_score": "auto"}])),
    }
    return RunRecord(Path("run"), {"stage": "ppo"}, config, rows)


@given(runs())
@settings(max_examples=150, deadline=None)
def test_no_figures_and_no_settings_are_too_much_for_a_rule(run: RunRecord) -> None:
    for finding in diagnose(run):
        assert finding.seen
        assert finding.rule

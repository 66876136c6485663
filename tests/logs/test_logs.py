"""`metrics.jsonl` and `samples.jsonl`: valid JSON for any value, equal bytes for equal values."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.logs.json_lines import MetricsLog, Sample, SamplesLog, plain_json, rows_until
from kedge_base.errors import DataError, ShapeError
from kedge_base.run_folder.output import replace_file
from kedge_base.run_folder.record_format import METRICS_FILE, SAMPLES_FILE, read_metrics, read_samples

SAMPLE = Sample(
    prompt="p", response="a b", tokens=["a", " b"], score=1 / 3, stopped=True, logprobs=[-1 / 3, -1.0],
    ref_logprobs=None, values=[0.0, 0.5], rewards=[0.0, 1.0], advantages=[1e-9 / 3, math.nan],
)  # fmt: skip


def test_rows_are_flushed_in_a_fixed_order(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write(1, {"time/update": 2.0, "value/loss": 0.5, "tokens_per_second": 9, "policy/loss": torch.tensor(0.25)})
        # Read while the file is still open: a killed run keeps every finished row.
        line = (tmp_path / METRICS_FILE).read_text()
    assert line == (
        '{"update": 1, "policy/loss": 0.25, "value/loss": 0.5, "time/update": 2.0, "tokens_per_second": 9}\n'
    )


def test_the_order_of_the_figures_changes_no_byte(tmp_path):
    figures = {"b": 0.1, "a": 1 / 3, "time/x": 1.0, "c": np.float32(0.1)}
    for name, order in (("one", figures), ("two", dict(reversed(figures.items())))):
        (tmp_path / name).mkdir()
        with MetricsLog(tmp_path / name) as log:
            log.write(1, order)
    assert (tmp_path / "one" / METRICS_FILE).read_bytes() == (tmp_path / "two" / METRICS_FILE).read_bytes()


def test_nonfinite_values_are_null(tmp_path):
    figures = {"nan": math.nan, "inf": torch.tensor(math.inf), "minus": np.float64(-math.inf), "none": None}
    with MetricsLog(tmp_path) as log:
        log.write(1, figures)
    assert read_metrics(tmp_path) == [{"update": 1, **dict.fromkeys(figures)}]


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers()),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.integers(), inner, max_size=3)),
    )
)
def test_any_value_becomes_strict_json(value):
    json.dumps(plain_json(value), allow_nan=False)
    assert plain_json(plain_json(value)) == plain_json(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor([2.5]), 2.5),
        (torch.tensor([1, 2]), [1, 2]),
        (np.array([math.nan, 1]), [None, 1.0]),
        (np.int8(3), 3),
    ],
)
def test_tensors_and_arrays_become_numbers(value, expected):
    assert plain_json(value) == expected


def test_figures_survive_exactly(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write(1, {"x": 0.1 + 0.2})
    assert read_metrics(tmp_path)[0]["x"] == 0.1 + 0.2


def test_a_log_is_appended_to(tmp_path):
    for update in (1, 2):
        with MetricsLog(tmp_path) as log:
            log.write(update, {})
    assert [row["update"] for row in read_metrics(tmp_path)] == [1, 2]


def test_a_last_line_cut_short_is_left_out(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write(1, {"note": "é"})
    whole = (tmp_path / METRICS_FILE).read_bytes()
    for end in range(1, len(whole)):
        (tmp_path / METRICS_FILE).write_bytes(whole + whole[:end])
        expected = 2 if end == len(whole) - 1 else 1
        assert len(read_metrics(tmp_path)) == expected


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / METRICS_FILE).write_text('{"update": 1}\n{"upd\n{"update": 3}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl', line 2: not a JSON object$"):
        read_metrics(tmp_path)
    with pytest.raises(DataError, match=r"samples.jsonl' does not exist; expected a run's folder"):
        read_samples(tmp_path)


def test_samples_keep_six_digits_and_every_character(tmp_path):
    odd = dataclasses.replace(SAMPLE, response="naïve 🛟 \ud83d \u2028 <script>")
    with SamplesLog(tmp_path) as log:
        log.write(7, [SAMPLE, odd])
    first, second = read_samples(tmp_path)
    assert first["update"] == 7
    assert first["score"] == 0.333333
    assert first["logprobs"] == [-0.333333, -1.0]
    assert first["advantages"] == [3.33333e-10, None]
    assert first["ref_logprobs"] is None
    assert second["response"] == odd.response
    assert "naïve" in (tmp_path / SAMPLES_FILE).read_text()


def test_what_only_episodes_have_is_in_the_file_only_for_them(tmp_path):
    episode = dataclasses.replace(SAMPLE, foreign=[(1, "no.\n")], turns=[(0, 0, 5, 5)], ending="max_turns")
    with SamplesLog(tmp_path) as log:
        log.write(1, [SAMPLE, episode])
    first, second = read_samples(tmp_path)
    assert list(first)[-1] == "fixed"
    assert {name: second[name] for name in second.keys() - first.keys()} == {
        "foreign": [[1, "no.\n"]],
        "turns": [[0, 0, 5, 5]],
        "ending": "max_turns",
    }
    for row in (first, second):  # as a logger reads them
        del row["update"]
        Sample(**row)


def test_a_sample_has_a_figure_per_token():
    with pytest.raises(ShapeError, match="values has 1 entries; expected 2, one per token"):
        dataclasses.replace(SAMPLE, values=[1.0])


def write_updates(folder, updates) -> bytes:
    with MetricsLog(folder) as log:
        for update in updates:
            log.write(update, {"loss": 1 / update})
        log.sync()
    return (folder / METRICS_FILE).read_bytes()


def test_a_resumed_log_is_the_log_of_a_run_that_was_not_cut(tmp_path):
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole, path = write_updates(tmp_path / "whole", range(1, 8)), tmp_path / "cut" / METRICS_FILE
    for kept in range(8):
        for torn in (b"", b"{", b'{"update": 6, "lo', b'{"update": 6}', b"\0\0"):
            path.write_bytes(b"".join(whole.splitlines(keepends=True)[: kept + 2]) + torn)
            rows = rows_until(path, kept)
            assert len(rows) == min(kept, 7)
            replace_file(path, rows)
            assert write_updates(tmp_path / "cut", range(kept + 1, 8)) == whole
    assert [entry.name for entry in path.parent.iterdir()] == [METRICS_FILE]


def test_all_samples_of_an_update_stay_or_go(tmp_path):
    with SamplesLog(tmp_path) as log:
        for update in (1, 2, 3):
            log.write(update, [SAMPLE, SAMPLE])
        log.sync()
    path = tmp_path / SAMPLES_FILE
    replace_file(path, rows_until(path, 2))
    assert [row["update"] for row in read_samples(tmp_path)] == [1, 1, 2, 2]


@pytest.mark.parametrize("row", ['{"upd', "[]", "{}", '{"update": null}', "7", ""])
def test_a_log_with_an_invalid_line_is_left_unchanged(tmp_path, row):
    text = f'{{"update": 1}}\n{row}\n{{"update": 3}}\n'
    (tmp_path / METRICS_FILE).write_text(text)
    with pytest.raises(DataError, match=r"metrics.jsonl', line 2: not a row with an update"):
        rows_until(tmp_path / METRICS_FILE, 1)
    assert (tmp_path / METRICS_FILE).read_text() == text

"""`incidents.jsonl`: one row per incident, with values per token."""

import json
import math

import pytest
import torch

from kedge.logs.incidents import add_incident, describe_row, truncate_incidents
from kedge_base.run_folder.output import DIAGNOSTIC_FILES, INCIDENTS_FILE
from kedge_base.run_folder.record_format import read_json_lines
from tests.tiny import tiny_tokenizer
from tests.training.test_update import make_experience, make_models


def test_rows_are_appended_with_nonfinite_values_as_text(tmp_path):
    add_incident(
        tmp_path, {"update": 1, "what": "ü\ud800", "figures": {"loss": math.nan, "norm": torch.tensor(math.inf)}}
    )
    add_incident(tmp_path, {"update": 2, "values": [1.5, math.inf, -math.inf], "row": None})
    lines = (tmp_path / "incidents.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == read_json_lines(tmp_path / INCIDENTS_FILE)
    first, second = read_json_lines(tmp_path / INCIDENTS_FILE)
    assert first["figures"] == {"loss": "nan", "norm": "inf"}
    assert second == {"update": 2, "values": [1.5, "inf", "-inf"], "row": None}


def test_incidents_outlive_a_run_without_results():
    assert "incidents.jsonl" in DIAGNOSTIC_FILES


@pytest.mark.parametrize("complete", [True, False])
def test_a_response_has_all_known_values(complete):
    experience = make_experience(make_models())
    row = describe_row(experience if complete else experience.rollout, 2, tiny_tokenizer())
    length = int(experience.rollout.response_lengths[2])
    assert row["sampler_logprobs"] == experience.rollout.logprobs[2, :length].tolist()
    assert len(row["tokens"]) == length
    assert row["response"] == "".join(row["tokens"])
    figures = {"score", "old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns"}
    assert (figures <= row.keys()) == complete
    if complete:
        torch.testing.assert_close(torch.tensor(row["values"]), experience.values[2, :length])
        assert row["score"] == float(experience.scores[2])


def test_a_resumed_run_keeps_earlier_incidents_and_what_stopped_it(tmp_path):
    rows = [(1, "skip"), (3, "rollback"), (3, "stop"), (4, "skip")]
    for update, consequence in rows:
        add_incident(tmp_path, {"update": update, "consequence": consequence})
    path = tmp_path / INCIDENTS_FILE
    path.write_bytes(b'[1]\n{"half": \n' + path.read_bytes() + b'{"update": 1, "conse')
    truncate_incidents(tmp_path, 2)
    assert [(row["update"], row["consequence"]) for row in read_json_lines(tmp_path / INCIDENTS_FILE)] == [
        (1, "skip"),
        (3, "stop"),
    ]

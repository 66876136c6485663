"""Several ranks sample on a server as one rank does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.processes import torchrun
from tests.ranks.test_equality import assert_equal_runs, prepared
from tests.rollout.vllm.stand_in import StandIn
from tests.rollout.vllm.test_engine import Sampling


@pytest.mark.slow
def test_two_ranks_on_a_server_equal_one(tmp_path: Path) -> None:
    asked: list[int] = []
    for count in (1, 2):
        folder = prepared(tmp_path / str(count))
        sampling = Sampling(folder / "models" / "policy")
        with StandIn(sample=sampling, on_update=sampling.load) as server:
            code, output = torchrun(count, "tests.ranks.cases", str(folder), "served", SERVER_URL=server.url)
            asked.append(len(server.requests))
        assert code == 0, output
    assert asked[0] == asked[1] > 0, "one rank asks for all"
    assert_equal_runs(tmp_path / "1" / "runs" / "served", tmp_path / "2" / "runs" / "served")

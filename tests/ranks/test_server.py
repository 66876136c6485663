"""Several ranks sample on a server as one rank does."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from tests.ranks.processes import torchrun
from tests.ranks.test_equality import assert_equal_runs, prepared
from tests.rollout.vllm.stand_in import StandIn
from tests.rollout.vllm.test_engine import Sampling


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_with_parts_of_the_weights_send_whole_ones(count: int, tmp_path: Path) -> None:
    sent: list[list[dict[str, Tensor]]] = []
    for ranks, case in ((1, "served_now"), (count, "served_now:shard")):
        folder = prepared(tmp_path / str(ranks))
        sampling = Sampling(folder / "models" / "policy")
        with StandIn(sample=sampling, on_update=sampling.load) as server:
            code, output = torchrun(ranks, "tests.ranks.cases", str(folder), case, SERVER_URL=server.url)
        assert code == 0, output
        sent.append(sampling.updates)
    assert len(sent[0]) == len(sent[1]) > 1
    for one, several in zip(*sent, strict=True):
        assert one.keys() == several.keys() >= {"lm_head.weight"}
        for name, weight in one.items():
            assert (several[name] - weight).abs().max() < 2e-5, name
    runs = [tmp_path / str(ranks) / "runs" for ranks in (1, count)]
    assert_equal_runs(runs[0] / "served_now", runs[1] / "served_now-shard")


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

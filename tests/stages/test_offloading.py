"""Runs whose optimizer's state is in the host's memory: the same to the bit, also when resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import kedge
from kedge.config import load_config
from kedge.ranks import Ranks
from kedge.runs.run import open_run
from kedge.training import optimizer
from kedge.training.host_state import HostState
from kedge_base.errors import ConfigError
from tests.stages.ppo.test_ppo import copies_at
from tests.tiny import save_tiny_policy

TEXTS = ["The boat", "A sailor", "My rope", "Our anchor"]
PPO: dict[str, Any] = {
    "prompts": TEXTS,
    "num_prompts": 4,
    "num_updates": 4,
    "max_new_tokens": 6,
    "critic": "separate",
    "value_warmup_updates": 1,
    "adam_eps": {"tf1": 1e-5},
}


def vowels(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


class TwoAtATime(HostState):
    """Steps of few parameters, in a memory of its own, as between a GPU and its host."""

    built = 0

    def __init__(self, inner: Any) -> None:
        type(self).built += 1
        super().__init__(inner, at_a_time=4096, to_host=torch.clone)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.runs.run.Run.offloads", lambda run, name: name == "optimizer")
    monkeypatch.setattr(optimizer, "HostState", TwoAtATime)
    monkeypatch.setattr(TwoAtATime, "built", 0)


def run(kind: str, model: Path, out: Path, **settings: Any) -> dict[str, torch.Tensor]:
    common = {"model": model, "out": out, "device": "cpu", "precision": "fp32", "report": False, "checkpoint.every": 1}
    if kind == "ppo":
        kedge.ppo(reward=vowels, **common, **PPO, **settings)
    else:
        rows = [{"prompt": text, "completion": " and more"} for text in TEXTS]
        kedge.sft(demonstrations=rows, batch_size=2, num_epochs=2, **common, **settings)
    return {
        f"{path.parent.name}/{name}": weight
        for path in sorted((out / "model").rglob("*.safetensors"))
        for name, weight in load_file(path).items()
    }


@pytest.mark.parametrize("kind", ["ppo", "sft"])
def test_a_run_ends_the_same_and_is_resumed_in_either_memory(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    model = save_tiny_policy(tmp_path / "policy")
    copies = copies_at(3, tmp_path / "whole", tmp_path / "stopped here")
    whole = run(kind, model, tmp_path / "whole", on_update=copies)
    request.getfixturevalue("as_on_a_gpu")
    copies = copies_at(3, tmp_path / "there", tmp_path / "stopped there")
    found = {"there": run(kind, model, tmp_path / "there", on_update=copies)}
    found["resumed there"] = run(kind, model, tmp_path / "stopped here", resume=True)
    assert TwoAtATime.built == 2
    monkeypatch.undo()
    found["resumed here"] = run(kind, model, tmp_path / "stopped there", resume=True)
    for name, weights in found.items():
        assert weights.keys() == whole.keys()
        assert all(torch.equal(weights[each], whole[each]) for each in whole), name


def test_on_a_cpu_it_has_no_effect_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("sft", save_tiny_policy(tmp_path / "policy"), tmp_path / "run", offload="optimizer")
    line = "runtime.offload=optimizer has no effect on cpu: it moves tensors from a GPU"
    assert line in "".join(capsys.readouterr())


def test_with_sharded_weights_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.runs.run.join_ranks", lambda parallel: Ranks(0, 2, is_sharded=True))
    given = [f"out={tmp_path / 'run'}", "data.prompts=p.jsonl", "reward=r.py:f", "runtime.offload=optimizer"]
    with pytest.raises(ConfigError, match=r"offload=optimizer does not work with runtime\.parallel=shard"):
        open_run(load_config(overrides=given), "ppo")

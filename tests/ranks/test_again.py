"""`kedge verify RUN --update` makes updates of several ranks again, by as many ranks, to the bit."""

from __future__ import annotations

import json

import pytest

from kedge_base.errors import DataError
from kedge_base.run_folder.output import kept_checkpoints
from kedge_lab.again import _obstacle, make_again
from tests.ranks.processes import torchrun
from tests.stages.ppo.test_ppo import PROMPTS, REWARD
from tests.tiny import save_tiny_policy

SETTINGS = (
    *("device=cpu", "report=false", "num_updates=4", "num_prompts=4", "max_new_tokens=6", "micro_batch_tokens=40"),
    *("checkpoint.every=2", "checkpoint.keep=100", "ppo.eval_every=3", "data.eval_fraction=0.2", "critic=separate"),
)


def vowels(completions: list[str], **_: object) -> list[float]:
    return [sum(text.count(vowel) for vowel in "aeiou") / 10 for text in completions]


@pytest.mark.parametrize(
    ("parallel", "update", "begin"),
    [
        ("replicate", 1, "updates 1 to 2 made again from the start"),
        # It is the last one before a checkpoint that the stopped run would not have.
        ("shard", 3, "updates 3 to 4 made again from"),
    ],
)
def test_updates_of_two_ranks_are_made_again_to_the_bit(tmp_path, monkeypatch, parallel, update, begin):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # the machine's host name may not resolve
    run = tmp_path / "run"
    policy = save_tiny_policy(tmp_path / "policy")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in PROMPTS))
    (tmp_path / "reward.py").write_text(REWARD)
    given = ["--model", policy, "--prompts", tmp_path / "prompts.jsonl", "--reward", f"{tmp_path}/reward.py:vowels"]
    code, said = torchrun(2, "kedge", "ppo", *map(str, given), "--out", str(run), *SETTINGS, f"parallel={parallel}")
    assert code == 0, said
    assert kept_checkpoints(run) == [0, 2, 4]
    faults, summary = make_again(run, update)
    assert faults == [], summary
    assert summary.startswith(begin)
    assert summary.endswith(": metrics and weights are the same to the bit"), summary
    (tmp_path / "reward.py").write_text(REWARD.replace("10", "20"))
    with pytest.raises(
        DataError, match=r"^the update cannot be made again by 2 ranks: .*reward: the files have changed"
    ):
        make_again(run, 3)


def test_what_stays_with_a_single_process_is_said():
    machine = {"device": "cpu", "ranks": "2", "threads": "1"}
    assert _obstacle(machine, {}) == ""
    assert _obstacle(machine, {"reward": vowels}) == "Python objects stay in this process"
    assert _obstacle({**machine, "device": "H200", "ranks": "1000"}, {}).endswith(" GPUs here")

"""A loop that the caller writes trains as `kedge.ppo` does, takes responses from elsewhere, and loses nothing."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas
import psutil
import pytest
import torch
from safetensors.torch import load_file

import kedge
from kedge.runs.claim import claim
from kedge.training.runtime import Terminated
from kedge_base.errors import ConfigError, DataError, EnvError, OutputError, RewardError
from kedge_base.run_folder.record_format import MEASURED, read_samples
from tests.forking import fork_context, forked_python
from tests.tasks.environments.worlds import Rooms
from tests.tiny import CHAT_TEMPLATE, save_tiny_policy, save_tiny_reward_model, tiny_tokenizer

PROMPTS = ["The boat", "A sailor", "My rope broke", "Once upon a time"]
SIZES: dict[str, Any] = {
    "num_updates": 3,
    "num_prompts": 4,
    "max_new_tokens": 8,
    "learning_rate": 1e-3,
    "report": False,
}
LORA = {"adapter": {"kind": "lora", "rank": 4}}
SEPARATE = {"critic": "separate", "num_minibatches": 2, "value_warmup_updates": 1}
GROUPS = {"preset": "grpo", "num_prompts": 2, "num_responses": 4}
NUMBERED: Any = ([7, 3, 7], torch.tensor([7, 3, 7]), np.array([7, 3, 7]))
DROPPED = {"preset": "grpo", "num_prompts": 2, "num_responses": 2, "constant_groups": "drop"}
OFF: dict[str, Any] = {"value_clip_range": None, "ppo.old_logprobs.cap": None, "missing_eos_score": None}
SCHEDULED = {"schedules": {"ppo.kl_coef": {"1": 0.1, "3": 0.01}}, "checkpoint": {"every": 1}}


def scored(completions: list[str], **_: object) -> list[float]:
    return [sum(map(ord, text)) % 10 / 10 for text in completions]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


def trained(policy: Path, folder: Path, **settings: Any) -> list[dict[str, float]]:
    """The updates of a loop that scores by itself."""
    with kedge.PpoTrainer(model=policy, prompts=PROMPTS, out=folder, **{**SIZES, **settings}) as trainer:
        return [dict(trainer.update(batch, scored(batch.responses))) for batch in sampled(trainer)]


def sampled(trainer: kedge.PpoTrainer) -> Any:
    for _ in trainer.updates():
        yield trainer.sample()


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics, without times and with one name for the reward."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name.replace("scored", "scores"): value for name, value in row.items() if not name.startswith(MEASURED)}
        for row in found
    ]


def assert_same(one: Path, other: Path, besides: tuple[str, ...] = ()) -> None:
    """The runs have the same metrics and weights, bit for bit; but for some metrics."""
    ours, theirs = (
        [{name: row[name] for name in row.keys() - set(besides)} for row in rows(each)] for each in (one, other)
    )
    assert ours == theirs
    [file] = {path.name for path in (one / "model").glob("*.safetensors")}
    ours, theirs = (load_file(folder / "model" / file) for folder in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "settings",
    [{}, SEPARATE, GROUPS, DROPPED, LORA, SCHEDULED, OFF],
    ids=["default", "separate", "groups", "dropped", "lora", "scheduled", "off"],
)
def test_a_callers_loop_is_bit_identical(policy: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    kedge.ppo(model=policy, prompts=PROMPTS, reward=scored, out=tmp_path / "stage", **{**SIZES, **settings})
    trained(policy, tmp_path / "loop", **settings)
    assert_same(tmp_path / "stage", tmp_path / "loop")


def test_pretraining_and_the_runs_own_reward_act(policy: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"The tide goes out {n} times."}) + "\n" for n in range(8)))
    settings = {**SIZES, "ptx_coef": 1.0, "data": {"pretraining": [str(texts)]}, "reward": scored}
    kedge.ppo(model=policy, prompts=PROMPTS, out=tmp_path / "stage", **settings)
    with kedge.PpoTrainer(model=policy, prompts=PROMPTS, out=tmp_path / "loop", **settings) as trainer:
        for batch in sampled(trainer):
            trainer.update(batch)
    assert_same(tmp_path / "stage", tmp_path / "loop")


def test_prompts_of_the_loop_are_those_of_the_run(policy: Path, tmp_path: Path) -> None:
    trained(policy, tmp_path / "run", num_prompts=2)
    drawn: list[list[str]] = []
    with kedge.PpoTrainer(model=policy, prompts=PROMPTS, out=tmp_path / "peek", **{**SIZES, "num_prompts": 2}) as run:
        for batch in sampled(run):
            drawn.append(batch.prompts)
            run.update(batch, scored(batch.responses))
    with kedge.PpoTrainer(model=policy, out=tmp_path / "loop", **{**SIZES, "num_prompts": 2}) as trainer:
        for prompts in drawn:
            batch = trainer.sample(prompts)
            trainer.update(batch, scored(batch.responses))
    assert_same(tmp_path / "run", tmp_path / "loop")


def test_resumed_in_mid_loop_it_is_bit_identical(policy: Path, tmp_path: Path) -> None:
    def loop(folder: Path, last: int, **settings: Any) -> None:
        with kedge.PpoTrainer(model=policy, out=folder, **SIZES, **SCHEDULED, **settings) as trainer:
            for update in trainer.updates():
                batch = trainer.sample(PROMPTS[update % 2 :])
                trainer.update(batch, [score + update for score in scored(batch.responses)])
                if trainer.done == last:
                    break

    loop(tmp_path / "whole", 3)
    loop(tmp_path / "parts", 1)
    assert len(rows(tmp_path / "parts")) == 1
    loop(tmp_path / "parts", 3, resume=True)
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_draws_from_global_generators_inside_the_loop_repeat(policy: Path, tmp_path: Path) -> None:
    def loop(folder: Path, last: int, **settings: Any) -> None:
        with kedge.PpoTrainer(model=policy, out=folder, **SIZES, checkpoint={"every": 1}, **settings) as trainer:
            for _ in trainer.updates():
                batch = trainer.sample(random.choices(PROMPTS, k=4))
                drawn = [*np.random.rand(2).tolist(), *torch.rand(2).tolist()]
                if trainer.done == last:
                    raise ZeroDivisionError
                trainer.update(batch, drawn)

    loop(tmp_path / "whole", 4)
    with pytest.raises(ZeroDivisionError):
        loop(tmp_path / "parts", 2)
    random.seed(5)
    loop(tmp_path / "parts", 4, resume=True)
    assert_same(tmp_path / "whole", tmp_path / "parts")


def killed_loop(policy: Path, folder: Path) -> None:
    with kedge.PpoTrainer(model=policy, out=folder, **SIZES, checkpoint={"every": 1}) as trainer:
        for _ in trainer.updates():
            batch = trainer.sample(PROMPTS)
            if trainer.done == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.update(batch, scored(batch.responses))


def test_killed_between_sampling_and_update_it_resumes(policy: Path, tmp_path: Path) -> None:
    process = fork_context().Process(target=killed_loop, args=(policy, tmp_path / "killed"))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    for folder, resume in ((tmp_path / "killed", True), (tmp_path / "whole", False)):
        with kedge.PpoTrainer(model=policy, out=folder, **SIZES, checkpoint={"every": 1}, resume=resume) as trainer:
            assert trainer.done == (2 if resume else 0)
            for _ in trainer.updates():
                batch = trainer.sample(PROMPTS)
                trainer.update(batch, scored(batch.responses))
    assert_same(tmp_path / "killed", tmp_path / "whole")


def elsewhere(trainer: kedge.PpoTrainer, kind: str) -> Any:
    """The batch that the trainer samples, given back to it in another form."""
    own = trainer.sample(PROMPTS)
    known = [row[: len(ids)] for row, ids in zip(own.logprobs, own.response_ids, strict=True)]
    if kind == "own":
        return own
    if kind == "ids":
        return trainer.batch(own.prompt_ids, own.response_ids, logprobs=known)
    return trainer.batch(own.prompts, own.response_ids)


@pytest.mark.parametrize("kind", ["ids", "ids alone"])
def test_a_batch_from_elsewhere_gives_the_same_update(policy: Path, tmp_path: Path, kind: str) -> None:
    """The log probabilities are computed again, in other batches: equal up to rounding."""
    metrics: dict[str, dict[str, float]] = {}
    for name in ("own", kind):
        with kedge.PpoTrainer(model=policy, out=tmp_path / name, **SIZES) as trainer:
            batch = elsewhere(trainer, name)
            metrics[name] = dict(trainer.update(batch, scored(batch.responses)))
    # FLOPs aside: the passes that sampling had made are made again. Importance weights, which are 1, come on top.
    left_out = (*MEASURED, "flops/", "cost/")
    own = {name: value for name, value in metrics["own"].items() if not name.startswith(left_out)}
    given = {name: value for name, value in metrics[kind].items() if name in own}
    assert given.keys() == own.keys()
    for name, value in own.items():
        assert given[name] == pytest.approx(value, abs=2e-5), name


class FewRooms(Rooms):
    """Six rooms, of which the policy reads its notes instead of the history twice."""

    def step(self, text: str) -> Any:
        return replace(super().step(text), terminated=self.turns == 6)


def calls_of(batch: Any) -> Any:
    """What each call of each episode read and said, by walking from each token to the one read before it."""
    parents, starts = (table.tolist() for table in (batch.rollout.parents, batch.rollout.turn_starts))
    table = zip(batch.prompt_ids, batch.response_ids, batch.masks, parents, starts, strict=True)
    for prompt, ids, own, parents, starts in table:
        calls = []
        for start in (slot for slot, begins in enumerate(starts) if begins):
            slot, read = parents[start], []
            while slot >= -len(prompt):
                read.append(ids[slot] if slot >= 0 else prompt[slot])
                slot = parents[slot] if slot >= 0 else slot - 1
            end = next((slot for slot in range(start + 1, len(ids)) if not own[slot] or starts[slot]), len(ids))
            calls.append((read[::-1], ids[start:end], (start, end)))
        yield calls


@pytest.mark.parametrize(
    "settings",
    [{}, {"credit": "turn", "ratio": "turn"}, {"critic": "separate", "num_minibatches": 2}],
    ids=["tokens", "turns", "separate"],
)
def test_an_episode_given_as_its_calls_is_the_one_that_was_played(
    policy: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    settings = {**SIZES, "max_new_tokens": 200, "num_updates": 1, "micro_batch_tokens": 2000, **settings}
    with kedge.PpoTrainer(
        model=policy, out=tmp_path / "played", environment=FewRooms, max_turn_tokens=5, **settings
    ) as trainer:
        # Its log probabilities and values are computed again, as those of calls are.
        played = replace(trainer.sample(PROMPTS), _is_exact=False)
        assert played.rollout.branches
        metrics = trainer.update(played)
    episodes = list(calls_of(played))
    paid = [
        [row[end - 1] for *_, (_, end) in calls]
        for row, calls in zip(played.rollout.rewards.tolist(), episodes, strict=True)
    ]
    logprobs = [
        [known[slice(*place)] for *_, place in calls] for known, calls in zip(played.logprobs, episodes, strict=True)
    ]
    with kedge.PpoTrainer(model=policy, out=tmp_path / "given", **settings) as trainer:
        calls = [[(read, said) for read, said, _ in calls] for calls in episodes]
        batch = trainer.batch(PROMPTS, calls, logprobs=logprobs)
        for name in ("prompt_ids", "response_ids", "token_mask", "action_mask", "logprobs", "turn_starts", "parents"):
            assert torch.equal(getattr(batch.rollout, name), getattr(played.rollout, name)), name
        computed = trainer.batch(PROMPTS, calls).rollout.logprobs
        torch.testing.assert_close(computed, played.rollout.logprobs, atol=1e-4, rtol=0)  # in other batches
        given = trainer.update(batch, paid)
    left_out = (*MEASURED, "flops/", "cost/", "episode/", "score/", "tools/", "reward/environment")
    common = [name for name in metrics if not name.startswith(left_out)]
    assert {name: given[name] for name in common} == {name: metrics[name] for name in common}
    assert_same(
        tmp_path / "given",
        tmp_path / "played",
        besides=tuple(rows(tmp_path / "given")[0] | rows(tmp_path / "played")[0]),
    )
    ours, theirs = (next(iter(read_samples(tmp_path / name))) for name in ("given", "played"))
    assert {name: value for name, value in theirs.items() if name != "ending"} == ours


def test_scores_of_an_episode_are_one_or_one_per_call_or_token(policy: Path, tmp_path: Path) -> None:
    """In the order of time: 5 6 ─▶ 7 2 ─▶ 8 read ─▶ 9 2, and a new context 5 9 ─▶ 2."""
    calls = [([5, 6], [7, 2]), ([5, 6, 7, 2, 8], [9, 2]), ([5, 9], [2])]
    with kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES) as trainer:
        batch = trainer.batch(["The boat", "A sailor"], [calls, " at"])
        assert batch.prompt_ids[0] == [5, 6]
        assert batch.response_ids[0] == [7, 2, 8, 9, 2, 9, 2]
        assert batch.masks[0] == [True, True, False, True, True, False, True]
        assert batch.rollout.parents[0].tolist()[:7] == [-1, 0, 1, 2, 3, -2, 5]
        other = [0.5] * len(batch.response_ids[1])
        # A number at a token that was only read counts at the policy's last token before it.
        assert batch.by_token([[1.0, 2.0, 3.0], other]) == [[0.0, 0.0, 1.0, 0.0, 0.0, 2.0, 3.0], other]
        assert batch.rollout.turn_starts.sum(-1).tolist() == [3, 1]
        assert batch.by_token([[1.0] * 7, None]) == [[1.0] * 7, None]
        for wrong in ([1.0, 2.0], [1.0] * 8):
            line = f"^response 0 has 3 turns and 7 tokens, and {len(wrong)} scores; expected a number, or one for each"
            with pytest.raises(RewardError, match=line):
                trainer.update(batch, [wrong, 0.0])
        assert trainer.update(batch, [[1.0, 2.0, 3.0], 0.0])["reward/score_mean"] == 3.0


def test_a_text_is_encoded_again(policy: Path, tmp_path: Path) -> None:
    """`ab` is one token in the vocabulary where the policy may sample two: the ids of a text can be others."""
    with kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES) as trainer:
        tokenizer = trainer.tokenizer
        whole = tokenizer.encode(" boat")
        letters = [token for letter in (" ", "b", "o", "a", "t") for token in tokenizer.encode(letter)]
        batch = trainer.batch(["The", "The"], [[*letters, 2], " boat"])
        numbered = [trainer.batch(["The"] * 3, [" boat"] * 3, groups=groups) for groups in NUMBERED]
    assert batch.response_ids == [[*letters, 2], [*whole, 2]]
    assert batch.responses == [" boat", " boat"]
    assert batch.groups == [0, 0]
    assert [each.groups for each in numbered] == [[0, 1, 0]] * len(NUMBERED)


def test_a_batch_of_texts_is_the_batch_of_their_ids(policy: Path, tmp_path: Path) -> None:
    texts = [" lay", " sea", " it", " sun"]
    for name in ("texts", "ids"):
        with kedge.PpoTrainer(model=policy, out=tmp_path / name, **SIZES) as trainer:
            ids = [[*trainer.tokenizer.encode(text), trainer.tokenizer.eos_token_id] for text in texts]
            batch = trainer.batch(PROMPTS, texts if name == "texts" else ids)
            assert batch.response_ids == ids
            trainer.update(batch, scored(batch.responses))
    assert_same(tmp_path / "texts", tmp_path / "ids")


def test_what_numpy_and_pandas_hold_is_read(policy: Path, tmp_path: Path) -> None:
    trainer = kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES)
    texts = np.array(PROMPTS)
    assert trainer.sample(texts).prompts == PROMPTS
    responses = np.array([" lay", " sea", " it", " sun"])
    assert trainer.batch(texts, responses, policy_version=np.int64(0)).responses == responses.tolist()
    assert trainer.batch(texts[:2], [[5, 2], [5]], stopped=np.array([1, 0])).rollout.stopped.tolist() == [True, False]
    table = pandas.DataFrame({"prompt": PROMPTS, "place": range(4)})
    assert trainer.sample(table).columns == {"place": [0, 1, 2, 3]}
    missing = [{"prompt": "The boat", "source": float("nan")} for _ in range(2)]  # as a DataFrame has them
    assert trainer.batch(missing, [" sank", " lay"]).groups == [0, 0]
    for numbers in (torch.tensor([5, 6]), np.array([5, 6])):  # the ids of one prompt instead of a list of prompts
        with pytest.raises(DataError, match=r"2 of 2 rows .* cannot be used"):
            trainer.sample(numbers)
    with pytest.raises(DataError, match="prompt 0 has no tokens"):
        trainer.sample([torch.tensor([], dtype=torch.long)])
    trainer.close()


def test_several_turns_train_the_policys_own_tokens_alone(policy: Path, tmp_path: Path) -> None:
    with kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES) as trainer:
        tokenizer = trainer.tokenizer
        call, answer, end = (tokenizer.encode(text) for text in ("2+", "4", "so"))
        batch = trainer.batch(["The boat"], [[(call, True), ("4", False), (end, True)]], stopped=[False])
        assert batch.response_ids == [[*call, *answer, *end]]
        assert batch.masks == [[True] * len(call) + [False] * len(answer) + [True] * len(end)]
        foreign = batch.masks[0].index(False)
        assert batch.logprobs[0][foreign] == 0 > batch.logprobs[0][foreign + 1]
        metrics = trainer.update(batch, [1.0])
    assert metrics["response/length"] == len(call) + len(end)
    [sample] = read_samples(tmp_path / "run")
    assert sample["response"] == "2+4so"
    assert "".join(sample["tokens"]) == "2+so"
    assert sample["foreign"] == [[len(call), "4"]]
    assert "ending" not in sample


def test_turns_sampled_one_after_the_other_are_exact(policy: Path, tmp_path: Path) -> None:
    """Each turn is read and sampled in ids, so the sampler's log probabilities are those of the whole response."""
    with kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES) as trainer:
        said = trainer.tokenizer.encode(" at")
        first = trainer.sample(PROMPTS, max_new_tokens=3)
        assert max(map(len, first.response_ids)) <= 3
        read = [p + r + said for p, r in zip(first.prompt_ids, first.response_ids, strict=True)]
        second = trainer.sample(read, max_new_tokens=2)
        assert second.prompt_ids == read
        assert len(trainer.generate(read, greedy=True)) == 4
        turns = [[(a, True), (said, False), (b, True)]
                 for a, b in zip(first.response_ids, second.response_ids, strict=True)]  # fmt: skip
        logprobs = [a + b for a, b in zip(first.logprobs, second.logprobs, strict=True)]
        batch = trainer.batch(PROMPTS, turns, logprobs=logprobs)
        metrics = trainer.update(batch, scored(batch.responses))
    assert metrics["policy/sampler_k3"] < 1e-9


@pytest.mark.parametrize("settings", [{"credit": "turn", "ratio": "turn"}, {"critic": "separate"}])
def test_an_episode_given_as_its_parts_is_the_one_given_as_its_calls(
    policy: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Both are one context of three turns; the last two are only separate because the second one stopped."""
    read, own = [5, 6], [[7, 2], [9, 2], [8]]
    parts = [(own[0], True), ([8, 7], False), (own[1], True), (own[2], True)]
    calls = [(read, own[0]), ([*read, 7, 2, 8, 7], own[1]), ([*read, 7, 2, 8, 7, 9, 2], own[2])]
    for name, response in {"parts": parts, "calls": calls}.items():
        used = SIZES | {"gamma": 0.9, "gae_lambda": 0.5, "num_minibatches": 1} | settings
        with kedge.PpoTrainer(model=policy, out=tmp_path / name, **used) as trainer:
            batch = trainer.batch([read, read], [response, [9, 2]], stopped=[False, True])
            assert batch.rollout.turn_starts.sum(-1).tolist() == [3, 1]
            with pytest.raises(RewardError, match=r"^response 0 has 3 turns and 7 tokens, and 2 scores"):
                trainer.update(batch, [[1.0, 2.0], 0.0])
            trainer.update(batch, [[1.0, 2.0, -1.0], 0.5])
    assert_same(tmp_path / "parts", tmp_path / "calls")
    assert [*read_samples(tmp_path / "parts")] == [*read_samples(tmp_path / "calls")]


@pytest.mark.parametrize("limit", [0, 9, "3", 1.5, True])
def test_a_turn_has_at_most_the_tokens_of_a_response(policy: Path, tmp_path: Path, limit: Any) -> None:
    with kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES) as trainer:
        with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens allows 1 to 8"):
            trainer.sample(PROMPTS, max_new_tokens=limit)
        with pytest.raises(DataError, match="prompt 0 has the token id 9999"):
            trainer.sample([[9999]])


def test_the_limit_of_a_turn_is_that_of_its_update(policy: Path, tmp_path: Path) -> None:
    limits = {"schedules": {"rollout.max_new_tokens": {1: 3, 2: 8}}}
    with kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES, **limits) as trainer:
        with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens allows 1 to 3"):
            trainer.sample(PROMPTS, max_new_tokens=4)
        batch = trainer.sample(PROMPTS)
        trainer.update(batch, scored(batch.responses))
        trainer.sample(PROMPTS, max_new_tokens=8)


def test_a_batch_of_an_earlier_update_is_stale_and_trained_on(policy: Path, tmp_path: Path) -> None:
    with kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES) as trainer:
        first, second = trainer.sample(PROMPTS), trainer.sample(PROMPTS)
        assert first.responses != second.responses
        trainer.update(first, scored(first.responses))
        metrics = trainer.update(second, scored(second.responses))
    assert metrics["policy/staleness"] == 1


def test_measurements_need_the_runs_prompts_and_reward(policy: Path, tmp_path: Path) -> None:
    settings = {**SIZES, "eval_every": 1, "data": {"eval_fraction": 0.5}}
    with pytest.raises(ConfigError, match="eval_every samples and scores held-out prompts"):
        kedge.PpoTrainer(model=policy, out=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()
    kedge.ppo(model=policy, prompts=PROMPTS, reward=scored, out=tmp_path / "stage", **settings)
    with kedge.PpoTrainer(model=policy, prompts=PROMPTS, reward=scored, out=tmp_path / "run", **settings) as trainer:
        for batch in sampled(trainer):
            trainer.update(batch)
    assert_same(tmp_path / "stage", tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"max_staleness": 1}, "rollout.max_staleness samples the next prompts ahead"),
        ({**GROUPS, "constant_groups": "resample"}, "ppo.constant_groups=resample draws further prompts"),
        ({"advantage": "remax"}, "ppo.advantage=remax scores a greedy response"),
        ({**GROUPS, "data": {"draw": {"evenly": 2}}}, "data.draw={evenly: 2} chooses among prompts that the run draws"),
        ({"data": {"curriculum": "level"}}, "data.curriculum orders the run's prompts"),
        ({"learning_rat": 1e-5}, "learning_rat"),
    ],
)
def test_what_cannot_act_is_refused(policy: Path, tmp_path: Path, settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        kedge.PpoTrainer(model=policy, out=tmp_path / "run", **{**SIZES, **settings})
    assert not (tmp_path / "run").exists()


def test_mistakes_get_one_line_and_lose_nothing(policy: Path, tmp_path: Path) -> None:
    trainer = kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES)
    with pytest.raises(ConfigError, match=r"sample\(\) needs prompts"):
        trainer.sample()
    with pytest.raises(DataError, match="max_prompt_tokens"):
        trainer.sample(["The boat", "boat " * 2000])
    batch = trainer.sample(PROMPTS)
    for scores, line in (
        ([1.0], "1 scores for 4 responses"),
        (None, "scores are missing"),
        (["a", 1, 2, 3], "scores gave response 0"),
        ([[1.0], [1.0], [1.0], [1.0]], "scores"),
        ([None] * 4, "scored none"),
        ([1.0, math.nan, 1.0, 1.0], "scores gave response 1 nan"),
        ([1.0, -1e38, 1.0, 1.0], r"scores gave response 1 -1e\+38, whose sums"),
        (([1.0] * 4, [{}] * 4), "2 scores for 4 responses; expected one per response: the first part"),
        (0.5, r"scores are of type float; pass a list"),
        (torch.tensor(1.0), r"scores are of type Tensor; pass a list: update\(batch, \[…\]\)"),
        (np.array(1.0), r"scores are of type ndarray; pass a list: update\(batch, \[…\]\)"),
        ({1.0, 2.0, 3.0, 4.0}, r"scores are of type set; pass a list"),
        (dict.fromkeys(range(4), 0.5), r"scores are of type dict; pass a list: update\(batch, \[…\]\)"),
    ):
        with pytest.raises(RewardError, match=line):
            trainer.update(batch, scores)
    metrics = trainer.update(batch, scored(batch.responses))
    assert metrics["policy/optimizer_steps"] > 0
    assert metrics["update"] == 1
    with pytest.raises(ConfigError, match="update 1 has trained on this batch"):
        trainer.update(batch, scored(batch.responses))
    for call in ("update", "evaluate"):
        with pytest.raises(
            ConfigError, match=rf"^{call} takes a batch from sample\(\) or batch\(\), not one of type list"
        ):
            getattr(trainer, call)(["text"], [1.0])
    with pytest.raises(OutputError, match="run"):
        kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES)
    with pytest.raises(OutputError, match="process is training in"):
        kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES, resume=True)
    trainer.close()
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    with pytest.raises(ConfigError, match="is closed"):
        trainer.sample(PROMPTS)
    trainer.close()
    assert len(rows(tmp_path / "run")) == 1
    assert not (tmp_path / "run" / "incidents.jsonl").exists(), "a call that was refused is none of the run"


def test_what_was_measured_before_the_judge_failed_is_not_measured_again(policy: Path, tmp_path: Path) -> None:
    judge, ready = tmp_path / "judge.py", tmp_path / "ready"
    judge.write_text(
        f"import os\n\ndef length(completions, **_):\n    assert os.path.exists({str(ready)!r})\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    settings = {"evaluate.judge": f"{judge}:length", "eval_every": 3, "reward_functions.retries": 0}
    found: dict[str, Any] = {"prompts": PROMPTS, "eval_prompts": ["The crew"], "reward": scored}
    with kedge.PpoTrainer(model=policy, out=tmp_path / "run", **found, **SIZES, **settings) as trainer:
        batch = trainer.sample()
        with pytest.raises(RewardError, match="length raised AssertionError"):
            trainer.update(batch)
        ready.touch()
        assert trainer.update(batch)["update"] == 1
    fixed = [row["fixed"] for row in read_samples(tmp_path / "run") if row["update"] == 0]
    assert fixed == [0, 1]


def test_a_start_is_judged_once_if_the_reward_fails_after_the_judge(policy: Path, tmp_path: Path) -> None:
    judge, failing = tmp_path / "judge.py", [True]
    judge.write_text(
        f"def noted(completions, **_):\n    open({str(tmp_path / 'calls')!r}, 'a').write('call ')\n    return [1.0]\n"
    )

    def reward(completions: list[str], **columns: Any) -> list[float]:
        assert not (failing and len(completions) == 1)
        return [float(len(text)) for text in completions]

    settings = {"evaluate.judge": f"{judge}:noted", "eval_every": 3, "reward_functions.retries": 0}
    found: dict[str, Any] = {"prompts": PROMPTS, "eval_prompts": ["The crew"], "reward": reward}
    with kedge.PpoTrainer(model=policy, out=tmp_path / "run", **found, **SIZES, **settings) as trainer:
        batch = trainer.sample()
        with pytest.raises(RewardError, match="AssertionError"):
            trainer.update(batch)
        failing.clear()
        trainer.update(batch)
    [start] = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert start["eval/win_rate"] == 0.5
    assert (tmp_path / "calls").read_text() == "call "


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"responses": ["a"]}, "2 prompts for 1 response;"),
        ({"responses": []}, "no responses"),
        ({"responses": "ab"}, r"responses are of type str; pass a list: batch\(\[…\], \[…\]\)"),
        ({"responses": ["a", [9999]]}, "response 1 has the token id 9999"),
        ({"responses": ["a", [0, 2]]}, "response 1 has the padding token"),
        ({"responses": ["a", [5, 2]], "logprobs": [[-1.0, -1.0], [-1.0]]}, "response 1 has 2 tokens of the policy's"),
        ({"responses": ["a", [5, 2]], "logprobs": [[-1.0, -1.0], [-1.0, 3.0]]}, "response 1 has the log probability"),
        ({"responses": ["a", [("b", False)]]}, "response 1 has no token of the policy's own"),
        ({"responses": ["a", []]}, "response 1 has no token of the policy's own"),
        ({"responses": ["a", []], "stopped": [True, True]}, "response 1 does not end with a stop token"),
        ({"responses": ["a", "b" * 40]}, "response 1 has .* tokens, and rollout.max_new_tokens is 8"),
        ({"responses": ["a", 5]}, "response 1 is of type int; expected a text"),
        ({"responses": ["a", [5]], "stopped": [True, True]}, "response 1 does not end with a stop token"),
        ({"responses": ["a", "b"], "groups": [0, 0]}, "responses 0 and 1 are in one group"),
        ({"responses": ["a", "b"], "groups": 5}, "groups are of type int; expected one per response"),
        (
            {"responses": ["a", "b"], "groups": [[0], [1]]},
            "groups has an entry of type list; expected the number of each",
        ),
        (
            {"responses": ["a", "b"], "logprobs": [-1.0, -1.0]},
            "log probabilities of response 0 are of type float; exp",
        ),
        ({"responses": ["a", [([5], [])]]}, "call 0 of response 1 has no sampled tokens"),
        ({"responses": ["a", [([], [5])]]}, "call 0 of response 1 has read no tokens"),
        ({"responses": ["a", [([5], [2]), ([5], [9999])]]}, "call 1 of response 1 has the token id 9999"),
        ({"responses": ["a", [([5], [6]), ("b", True)]]}, r"response 1 has the part \('b', True\); expected a text"),
        ({"responses": ["a", [([5], "b")]]}, r"response 1 has the part \(\[5\], 'b'\); expected a text"),
        ({"responses": ["a", [([5], [6]), ([7] * 9, [6])]]}, "response 1 has 11 tokens, and rollout.max_new_tokens is"),
        ({"responses": ["a", [([5] * 249, [6])]]}, "call 0 of response 1 read 249 tokens; the context leaves 248"),
        (
            {"responses": ["a", [([5], [6, 2]), ([7], [2])]], "logprobs": [[-1.0, -1.0], [[-1.0], [-1.0]]]},
            "call 0 of response 1 has 2 tokens of the policy's own, its stop token included, and 1 log prob",
        ),
        (
            {"responses": ["a", [([5], [6, 2]), ([7], [2])]], "logprobs": [[-1.0, -1.0], [-1.0, -1.0, -1.0]]},
            "response 1 has 2 calls; expected a list of log probabilities for each",
        ),
        ({"responses": ["a", "b"], "policy_version": 3}, "policy_version is 3; expected 0 to 0"),
        ({"responses": np.array([5, 6])}, "response 0 is of type int64; expected a text"),
        ({"responses": ["a", [5]], "logprobs": [[-1.0, -1.0], [-math.inf]]}, r"response 1 has .* -inf; expected a fin"),
        ({"responses": ["a", [5]], "logprobs": [[-1.0, -1.0], [-1e39]]}, r"response 1 has .* -1e\+39; expected a fin"),
    ],
)
def test_a_batch_that_cannot_be_used_is_refused(
    policy: Path, tmp_path: Path, arguments: dict[str, Any], line: str
) -> None:
    trainer = kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES)
    with pytest.raises(DataError, match=line):
        trainer.batch(prompts=PROMPTS[:2], **arguments)
    trainer.close()
    assert not (tmp_path / "run").exists(), "no update was made"


@pytest.mark.parametrize(
    ("prompts", "line"),
    [
        ("The boat", r"prompts are of type str; pass a list: {}\(\[…\]"),
        ({"prompt": "The boat"}, r"prompts are of type dict; pass a list: {}\(\[…\]"),
        (5, r"prompts are of type int; pass a list: {}\(\[…\]"),
        ([], "the list of prompts is empty"),
    ],
)
def test_prompts_are_a_list_with_entries(policy: Path, tmp_path: Path, prompts: Any, line: str) -> None:
    trainer = kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES)
    for name in ("sample", "generate"):
        with pytest.raises(DataError, match=line.format(name)):
            getattr(trainer, name)(prompts)
    with pytest.raises(DataError, match=line.format("batch") if prompts else "0 prompts for 1 response;"):
        trainer.batch(prompts, [" sank"])
    trainer.close()


def test_an_exception_in_the_loop_saves_the_run(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def loop() -> None:
        with kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES) as trainer:
            batch = trainer.sample(PROMPTS)
            trainer.update(batch, scored(batch.responses))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert "resume=True" in capsys.readouterr().err
    with kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES, resume=True) as trainer:
        assert trainer.done == 1
        for _ in trainer.updates():
            batch = trainer.sample(PROMPTS)
            trainer.update(batch, scored(batch.responses))
        with pytest.raises(ConfigError, match=r"has made its updates \(ppo\.num_updates=3\)"):
            trainer.sample(PROMPTS)
    ending = json.loads((tmp_path / "run" / "finished.json").read_text())
    assert "ended" not in json.dumps(ending)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_before_the_first_update_leaves_no_run(
    policy: Path, tmp_path: Path, error: type[BaseException]
) -> None:
    def loop() -> None:
        with kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES) as trainer:
            trainer.sample(PROMPTS)
            raise error

    with pytest.raises(error):
        loop()
    assert not (tmp_path / "run").exists()


def test_a_sample_that_failed_draws_the_same_prompts_again(policy: Path, tmp_path: Path) -> None:
    down = tmp_path / "down"

    class World(Rooms):
        def reset(self, *args: Any, **row: Any) -> Any:
            if down.exists():
                raise RuntimeError("the world is down")
            return super().reset(*args, **row)

    drawn = list[list[str]]()
    for number in range(2):
        settings = {**SIZES, "num_prompts": 2, "max_new_tokens": 24}
        out = tmp_path / f"run-{number}"
        with kedge.PpoTrainer(model=policy, prompts=PROMPTS, environment=World, out=out, **settings) as trainer:
            if number:
                down.touch()
                with pytest.raises(EnvError, match="the world is down"):
                    trainer.sample()
                down.unlink()
            drawn.append(trainer.sample().prompts)
    assert drawn[0] == drawn[1]


def test_a_resumed_loop_generates_what_the_run_would_have(policy: Path, tmp_path: Path) -> None:
    def loop(folder: str, last: int) -> list[list[str]]:
        found = list[list[str]]()
        options: Any = {"out": tmp_path / folder, "resume": True, "checkpoint": {"every": 1}}
        with kedge.PpoTrainer(model=policy, **options, **SIZES) as trainer:
            for update in trainer.updates():
                if update > last:
                    break
                found.append(trainer.generate(PROMPTS) + trainer.generate(PROMPTS))
                trainer.update(trainer.sample(PROMPTS), [0.0, 1.0, 0.0, 1.0])
        return found

    assert loop("whole", 3) == [*loop("parts", 2), *loop("parts", 3)]


def test_interrupts_between_the_calls_are_the_callers(policy: Path, tmp_path: Path) -> None:
    with kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES) as trainer:
        batch = trainer.sample(PROMPTS)
        trainer.update(batch, scored(batch.responses))
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert trainer.update(trainer.sample(PROMPTS), [1.0, 0.0, 1.0, 0.0])
    assert len(rows(tmp_path / "run")) == 2


def test_an_interrupt_in_an_update_that_is_still_made_ends_no_loop(policy: Path, tmp_path: Path) -> None:
    with kedge.PpoTrainer(model=policy, prompts=PROMPTS, out=tmp_path / "run", **SIZES) as trainer:

        def interrupt(*_: object) -> None:
            hook.remove()  # a second signal would cut the update short
            signal.raise_signal(signal.SIGINT)

        batch = trainer.sample()
        hook = trainer.roles.optimizer.register_step_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.update(batch, scored(batch.responses))
        for _ in trainer.updates():
            batch = trainer.sample()
            trainer.update(batch, scored(batch.responses))
    assert [row["update"] for row in rows(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.parametrize("failing", ["on_update", "checkpoint"])
def test_an_error_after_a_complete_update_does_not_repeat_it(policy: Path, tmp_path: Path, failing: str) -> None:
    failures = [OutputError("the disk is full")]

    def fail(*_: object) -> None:
        if failures:
            raise failures.pop()

    settings = {**SIZES, "checkpoint": {"every": 1}, "prompts": PROMPTS}
    if failing == "on_update":
        settings["on_update"] = fail
    with kedge.PpoTrainer(model=policy, out=tmp_path / "run", **settings) as trainer:
        if failing == "checkpoint":
            save = trainer._loop.save
            trainer._loop.save = lambda: (fail(), save())
        for number in trainer.updates():
            batch = trainer.sample()
            if number == 1:
                with pytest.raises(OutputError, match="the disk is full"):
                    trainer.update(batch, scored(batch.responses))
                with pytest.raises(ConfigError, match="update 1 has trained on this batch"):
                    trainer.update(batch, scored(batch.responses))
            else:
                trainer.update(batch, scored(batch.responses))
    trained(policy, tmp_path / "whole", checkpoint={"every": 1})
    assert_same(tmp_path / "run", tmp_path / "whole")


CALLS: dict[str, Any] = {
    "sample": lambda trainer, _: trainer.sample(),
    "generate": lambda trainer, _: trainer.generate(PROMPTS),
    "batch": lambda trainer, _: trainer.batch(PROMPTS, [" sank"] * 4),
    "evaluate": lambda trainer, batch: trainer.evaluate(batch),
    "update": lambda trainer, batch: trainer.update(batch),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """A folder for the loops of the next test that no signal interrupts, and the names of those that were made."""
    return tmp_path_factory.mktemp("whole"), set()


@pytest.mark.parametrize(
    ("call", "signum", "error"),
    [*((call, signal.SIGINT, KeyboardInterrupt) for call in CALLS), ("sample", signal.SIGTERM, Terminated)],
)
def test_a_signal_ends_the_call_in_which_it_came_and_no_other(
    policy: Path, whole: tuple[Path, set[str]], tmp_path: Path, call: str, signum: int, error: type[BaseException]
) -> None:
    """Whatever the call does, nothing of it or of the signal is left: the run is that without it, to the bit."""
    pressed: list[str] = []

    def press(where: str) -> None:
        if pressed == ["armed"]:
            pressed[:] = [where]
            signal.raise_signal(signum)
            pressed.append("went on")

    def reward(completions: list[str]) -> list[float]:
        press("reward")
        return scored(completions)

    def loop(folder: Path, *, interrupted: bool) -> None:
        settings = {**SIZES, "num_updates": 4, "prompts": PROMPTS, "reward": reward}
        with kedge.PpoTrainer(model=policy, out=folder, **settings) as trainer:
            trainer.policy.get_input_embeddings().register_forward_pre_hook(lambda *_: press("policy"))
            for update in trainer.updates():
                batch = trainer.sample()
                if interrupted and update < 4:  # twice in one run, and in its first update
                    pressed[:] = ["armed"]
                    with pytest.raises(error):
                        CALLS[call](trainer, batch)
                    assert pressed == ["reward" if call in ("evaluate", "update") else "policy"]
                if call == "sample":
                    batch = trainer.sample()
                trainer.update(batch)

    folder, made = whole
    name = "sampled twice" if call == "sample" else "sampled once"
    if name not in made:
        loop(folder / name, interrupted=False)
        made.add(name)
    loop(tmp_path / "interrupted", interrupted=True)
    assert_same(folder / name, tmp_path / "interrupted")


def test_an_interrupt_in_save_comes_after_the_model_is_whole(policy: Path, tmp_path: Path) -> None:
    def pressed_save() -> None:
        signal.raise_signal(signal.SIGINT)
        save()

    with kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES) as trainer:
        trainer.update(trainer.sample(PROMPTS), [1.0, 0.0, 1.0, 0.0])
        save = trainer._loop.save
        trainer._loop.save = pressed_save
        with pytest.raises(KeyboardInterrupt):
            trainer.save()
        trainer._loop.save = save
        assert (tmp_path / "run" / "model" / "model.safetensors").exists()
        assert trainer.update(trainer.sample(PROMPTS), [1.0, 0.0, 1.0, 0.0])["update"] == 2


def test_a_signal_in_close_lets_it_end(policy: Path, tmp_path: Path) -> None:
    trainer = kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES)
    trainer.update(trainer.sample(PROMPTS), [1.0, 0.0, 1.0, 0.0])
    save = trainer._loop.save

    def pressed_save() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        save()

    trainer._loop.save = pressed_save
    with pytest.raises(Terminated):
        trainer.close()
    assert json.loads((tmp_path / "run" / "finished.json").read_text())["updates"] == 1
    assert (tmp_path / "run" / "checkpoints" / "update-000001").exists()


@pytest.mark.parametrize("function", ["trainer", "ppo"])
def test_a_second_interrupt_in_a_call_ends_it_and_loses_no_finished_update(
    policy: Path, tmp_path: Path, function: str
) -> None:
    log = tmp_path / "run" / "metrics.jsonl"

    def press() -> None:
        if log.exists() and len(rows(tmp_path / "run")) == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the call goes on after the second one")

    def reward(completions: list[str]) -> list[float]:
        if function == "ppo":
            press()
        return scored(completions)

    settings = {**SIZES, "prompts": PROMPTS, "reward": reward, "out": tmp_path / "run"}

    def loop() -> None:
        with kedge.PpoTrainer(model=policy, **settings) as trainer:
            trainer._trainer.estimate, estimate = (
                (lambda *a, **k: (press(), estimate(*a, **k))[1]),
                trainer._trainer.estimate,
            )
            for batch in sampled(trainer):
                trainer.update(batch)

    with pytest.raises(KeyboardInterrupt):
        kedge.ppo(model=policy, **settings) if function == "ppo" else loop()
    assert (tmp_path / "run" / "checkpoints" / "update-000002").exists()
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert len(rows(tmp_path / "run")) == 2


FORGETFUL = """
import sys, kedge
trainer = kedge.PpoTrainer(model=sys.argv[1], out="run", num_updates=3, num_prompts=4, max_new_tokens=8)
trainer.update(trainer.sample(["The boat"] * 4), [1.0, 0.0, 1.0, 0.0])
"""


@pytest.mark.parametrize("ending", ["", "raise ZeroDivisionError"])
def test_a_trainer_that_is_never_closed_saves_when_the_process_ends(policy: Path, tmp_path: Path, ending: str) -> None:
    if ending:
        done = forked_python(FORGETFUL + ending, policy, cwd=tmp_path)
    else:  # the interpreter's own exit
        command = [sys.executable, "-c", FORGETFUL, policy]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ("Traceback" in done.stderr, "ignored" in done.stderr) == (bool(ending), False), done.stderr
    left = {path.name for path in (tmp_path / "run").glob("*")}
    assert left >= {"model", "report.html"}
    assert (tmp_path / "run" / "checkpoints" / "update-000001").exists()
    assert json.loads((tmp_path / "run" / "finished.json").read_text())["updates"] == 1


def test_a_forked_child_leaves_the_run_to_its_parent(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES) as trainer:
        batch = trainer.sample(PROMPTS)
        trainer.update(batch, scored(batch.responses))
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: 1)
            trainer.close()
        assert not (tmp_path / "run" / "finished.json").exists()
    assert (tmp_path / "run" / "finished.json").exists()


FORKING = """
import os, sys, kedge
from pathlib import Path

def files():
    return {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}

trainer = kedge.PpoTrainer(model=sys.argv[1], out="run", num_updates=3, num_prompts=4, max_new_tokens=8)
trainer.update(trainer.sample(["The boat"] * 4), [1.0, 0.0, 1.0, 0.0])
batch, before = trainer.sample(["The boat"] * 4), files()
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    assert files() == before
    trainer.update(batch, [1.0, 0.0, 1.0, 0.0])
    trainer.close()
else:
    {child}
    sys.exit()
"""
REFUSED = """
    for call in (lambda: trainer.update(batch, [1.0] * 4), lambda: trainer.sample(["The boat"]), trainer.save):
        try:
            call()
            sys.exit(1)
        except kedge.KedgeError as error:
            assert "trains in run, and a fork of it cannot" in str(error)
"""


@pytest.mark.parametrize("child", [REFUSED, "with trainer: pass", "del trainer, batch", "raise ZeroDivisionError"])
def test_what_a_forked_child_does_changes_nothing_of_the_run(policy: Path, tmp_path: Path, child: str) -> None:
    script = FORKING.replace("{child}", child).replace("[1] == 0", "[1] == 256" if "raise" in child else "[1] == 0")
    done = forked_python(script, policy, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ignored" not in done.stderr
    assert [row["update"] for row in rows(tmp_path / "run")] == [1, 2]
    assert json.loads((tmp_path / "run" / "finished.json").read_text())["updates"] == 2


def test_a_trainer_that_nothing_refers_to_is_closed(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES)
    batch = trainer.sample(PROMPTS)
    trainer.update(batch, scored(batch.responses))
    del batch, trainer
    gc.collect()
    [resume] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Resume")]
    assert resume.startswith("Resume: the same loop with kedge.PpoTrainer(")
    assert json.loads((tmp_path / "run" / "finished.json").read_text())["updates"] == 1


@pytest.mark.parametrize("is_collected", [False, True])
def test_a_trainer_that_cannot_be_saved_is_closed(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_collected: bool
) -> None:
    def fail() -> None:
        raise OutputError("the disk is full")

    trainer = kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES)
    batch = trainer.sample(PROMPTS)
    trainer.update(batch, scored(batch.responses))
    trainer._loop.save = fail
    if not is_collected:
        with pytest.raises(OutputError, match="the disk is full"):
            trainer.close()
    del batch, trainer
    gc.collect()
    assert ("error: the disk is full" in capsys.readouterr().err) == is_collected
    claim(tmp_path / "run")  # which is free


def test_evaluating_and_generating_change_no_training(policy: Path, tmp_path: Path) -> None:
    trained(policy, tmp_path / "plain")
    with kedge.PpoTrainer(model=policy, prompts=PROMPTS, out=tmp_path / "run", **SIZES) as trainer:
        for batch in sampled(trainer):
            assert len(trainer.generate(PROMPTS[:2], greedy=True)) == 2
            assert "objective/kl" in trainer.evaluate(batch, scored(batch.responses))
            trainer.update(batch, scored(batch.responses))
            assert trainer.save() == tmp_path / "run" / "model"
    assert_same(tmp_path / "plain", tmp_path / "run")


def test_a_teacher_needs_no_scores(policy: Path, tmp_path: Path) -> None:
    settings = {**SIZES, "preset": "distill", "teacher": policy, "learning_rate": 1e-3, "eval_every": 1}
    settings["data.eval_fraction"] = 0.5
    kedge.ppo(model=policy, prompts=PROMPTS, out=tmp_path / "stage", **settings)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in PROMPTS))
    settings["data.prompts"] = [str(prompts)]  # as a setting, in a configuration for instance
    with kedge.PpoTrainer(model=policy, out=tmp_path / "loop", **settings) as trainer:
        for batch in sampled(trainer):
            assert trainer.evaluate(batch)["objective/kl"] is not None
            trainer.update(batch)
    assert_same(tmp_path / "stage", tmp_path / "loop")


def test_a_start_whose_judge_fails_is_measured_by_the_next_call(policy: Path, tmp_path: Path) -> None:
    down = tmp_path / "down"
    down.touch()
    judge = f"import os\ndef judge(completions, **_):\n    assert not os.path.exists({str(down)!r})\n"
    (tmp_path / "judge.py").write_text(f"{judge}    return [float(len(text)) for text in completions]\n")
    settings = {"eval_every": 1, "evaluate.judge": f"{tmp_path / 'judge.py'}:judge", "reward": scored, **SIZES}
    with kedge.PpoTrainer(
        model=policy, prompts=PROMPTS, eval_prompts=["The crew"], out=tmp_path / "run", **settings
    ) as trainer:
        batch = trainer.sample()
        with pytest.raises(RewardError, match="judge raised AssertionError"):
            trainer.update(batch)
        down.unlink()
        trainer.update(batch)
    measured = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [row["update"] for row in measured] == [0, 1]
    assert measured[0]["eval/win_rate"] == 0.5


def test_conversations_rows_and_scores_per_token(tmp_path: Path) -> None:
    chat = save_tiny_policy(tmp_path / "chat", tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE))
    talks = [[{"role": "user", "content": text}] for text in PROMPTS]
    with kedge.PpoTrainer(model=chat, out=tmp_path / "run", **SIZES) as trainer:
        batch = trainer.sample(talks)
        assert batch.prompts[0].endswith("<|assistant|>\n")
        trainer.update(batch, [torch.full((len(ids),), 0.1) for ids in batch.response_ids])
        asked = [{"prompt": text, "answer": [n]} for n, text in enumerate(PROMPTS)]
        batch = trainer.sample(asked)
        assert [answer.pop() for answer in batch.columns["answer"]] == [0, 1, 2, 3]
        assert [row["answer"] for row in asked] == [[0], [1], [2], [3]]
        metrics = trainer.update(batch, [1.0, None, 0.0, 1.0])
    assert metrics["reward/unscored"] == 1


def test_a_batch_is_evaluated_with_the_current_weights(policy: Path, tmp_path: Path) -> None:
    names = ("objective/kl", "value/mean", "value/explained_variance")
    with kedge.PpoTrainer(model=policy, out=tmp_path / "run", **SIZES) as trainer:
        batch = trainer.sample(PROMPTS[:4])
        scores = [0.0, 1.0, 2.0, 3.0]
        before = trainer.evaluate(batch, scores)
        trainer.update(batch, scores)
        again = trainer.batch(batch.prompt_ids, batch.response_ids)
        after, known = trainer.evaluate(batch, scores), trainer.evaluate(again, scores)
        assert [after[name] for name in names] == pytest.approx([known[name] for name in names])
        assert abs(after["objective/kl"] - before["objective/kl"]) > 1e-4


def test_evaluating_leaves_the_score_of_no_stop_token_to_the_first_update(policy: Path, tmp_path: Path) -> None:
    reward = save_tiny_reward_model(tmp_path / "reward", seed=3)
    with kedge.PpoTrainer(model=policy, reward=reward, out=tmp_path / "run", **SIZES, num_fixed_prompts=0) as trainer:
        batch = trainer.sample(PROMPTS[:4])
        assert "reward/total" in trainer.evaluate(batch)
        assert trainer.roles.missing_eos is not None
        assert not trainer.roles.missing_eos.is_known
        trainer.update(batch)
        assert trainer.roles.missing_eos.is_known


def test_the_greedy_response_follows_the_same_tokens_and_has_the_same_limit(policy: Path, tmp_path: Path) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def lengths(completion_ids: list[list[int]], prompt_ids: list[list[int]], **_: object) -> list[float]:
        seen.extend(zip(map(len, prompt_ids), map(len, completion_ids), strict=True))  # type: ignore[arg-type]
        return [float(len(ids)) for ids in completion_ids]

    settings = {**SIZES, "advantage": "remax", "num_responses": 2, "num_fixed_prompts": 0}
    with kedge.PpoTrainer(model=policy, reward=lengths, out=tmp_path / "run", **settings) as trainer:
        text = list(tiny_tokenizer().encode("he", add_special_tokens=False))
        letters = [token for letter in "he" for token in tiny_tokenizer().encode(letter, add_special_tokens=False)]
        assert letters != text
        trainer.update(trainer.sample([letters], max_new_tokens=3))
    assert {length for length, _ in seen} == {len(letters)}  # type: ignore[comparison-overlap]
    assert len(seen) == 3
    assert max(length for _, length in seen) == 3


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_the_critic_learns_on_where_the_kl_ends_the_policys_steps_before_the_first(
    policy: Path, tmp_path: Path, critic: str
) -> None:
    settings = {**SIZES, "old_logprobs": "sampler", "early_stop_kl": 0.01, "ppo.critic": critic}
    with kedge.PpoTrainer(model=policy, out=tmp_path / "run", **settings) as trainer:
        batch = trainer.sample(PROMPTS[:4])
        logprobs = [[each - 0.5 * (place % 2) for place, each in enumerate(row)] for row in batch.logprobs]
        given = trainer.batch(batch.prompt_ids, batch.response_ids, logprobs=logprobs)
        row = trainer.update(given, [0.0, 1.0, 2.0, 3.0])
        assert row["value/extra_loss"] > 0


@pytest.mark.parametrize("thread", [False, True], ids=["on_update", "thread"])
def test_a_call_in_the_middle_of_another_is_refused(policy: Path, tmp_path: Path, thread: bool) -> None:
    """It changes nothing: the run is complete, as it is without such calls."""
    refused = list[str]()

    def call_all() -> None:
        calls = [lambda: trainer.generate(PROMPTS), trainer.sample, lambda: trainer.update(batch), trainer.save]
        for call in [*calls, trainer.close]:
            with pytest.raises(ConfigError, match=r"a call of the trainer of .* has not returned yet") as error:
                call()
            refused.append(str(error.value))

    def on_update(_: kedge.Update) -> None:
        if not thread:
            return call_all()
        other = threading.Thread(target=call_all)
        other.start()
        other.join()

    settings = {**SIZES, "num_updates": 1, "prompts": PROMPTS}
    with kedge.PpoTrainer(model=policy, out=tmp_path / "run", on_update=on_update, **settings) as trainer:
        batch = trainer.sample()
        trainer.update(batch, scored(batch.responses))
    assert len(refused) == 5
    assert json.loads((tmp_path / "run" / "finished.json").read_text())["updates"] == 1


def test_an_interrupt_at_the_end_of_a_call_leaves_nothing_of_what_it_drew(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(folder: Path, *, interrupted: bool) -> list[Any]:
        found = list[Any]()
        with kedge.PpoTrainer(model=policy, prompts=PROMPTS, out=folder, **{**SIZES, "num_prompts": 1}) as trainer:
            for call in (lambda: trainer.generate(PROMPTS), lambda: trainer.sample().rollout.response_ids.tolist()):
                if interrupted:
                    with monkeypatch.context() as patch:
                        patch.setattr(trainer._stop, "raise_if_requested", lambda: signal.raise_signal(signal.SIGINT))
                        with pytest.raises(KeyboardInterrupt):
                            call()
                found.append(call())
        return found

    assert drawn(tmp_path / "whole", interrupted=False) == drawn(tmp_path / "interrupted", interrupted=True)


def test_the_scores_of_an_interrupted_update_count_once(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known(folder: Path, *, interrupted: bool) -> Any:
        with kedge.PpoTrainer(model=policy, prompts=PROMPTS, out=folder, advantage="spo", **SIZES) as trainer:
            batch = trainer.sample()
            if interrupted:
                with monkeypatch.context() as patch:
                    patch.setattr(trainer._trainer, "improve", Mock(side_effect=KeyboardInterrupt))
                    with pytest.raises(KeyboardInterrupt):
                        trainer.update(batch, scored(batch.responses))
            trainer.update(batch, scored(batch.responses))
            assert trainer._trainer.prompt_means is not None
            return trainer._trainer.prompt_means.state_dict()

    assert known(tmp_path / "whole", interrupted=False) == known(tmp_path / "interrupted", interrupted=True)


def test_a_closed_trainer_has_no_processes(policy: Path, tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text(
        "def length(completions):\n    return [float(len(text)) for text in completions]\n\n\n"
        "class World:\n"
        "    def reset(self, row, seed):\n        return None\n\n"
        "    def step(self, text):\n        return ' yes', 1.0, True, False\n"
    )
    before = psutil.Process().children()
    parts = {"environment": f"{code}:World", "reward": f"{code}:length", "eval_prompts": PROMPTS, "eval_every": 3}
    settings = {**SIZES, **parts, "evaluate": {"judge": f"{code}:length"}, "prompts": ["A sail", "The sea"]}
    trainer = kedge.PpoTrainer(model=policy, out=tmp_path / "run", **settings)
    assert len(psutil.Process().children()) == len(before) + 3
    trainer.close()
    assert psutil.Process().children() == before
    assert trainer.roles.reward.names

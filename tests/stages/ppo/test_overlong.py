"""Responses that were cut off, masked: no step on them, their scores in the baselines, their figures in the metrics."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kedge.algorithm.experience import ENDINGS, Experience
from kedge.rewards import ScoredTerms, Verdict
from kedge.rewards.score import ScoredRollout
from kedge.runs.run import Resume
from kedge.stages.ppo import run_ppo, trainer
from kedge.stages.ppo.sampling import SampledBatch
from kedge_base.errors import NumericsError
from kedge_base.run_folder.output import INCIDENTS_FILE
from kedge_base.run_folder.record_format import read_json_lines, read_samples
from tests.models.test_actor_critic import make_rollout
from tests.stages.ppo.test_ppo import PROMPTS, configure, metrics_without_times
from tests.tiny import save_tiny_policy, tiny_tokenizer

STOPS = list(range(4, 4 + len(tiny_tokenizer()) // 6))
"""A sixth of the tokens end a response, so that about half of the responses of 4 tokens are cut off."""

SIZES: dict[str, Any] = {"stop_token": STOPS, "max_new_tokens": 4, "num_prompts": 6, "num_responses": 4, "kl_coef": 0.0,
                         "num_samples": 100, "missing_eos_score": "mask"}  # fmt: skip


class Reward:
    """Scores a response by its tokens; with `drops_cut`, one that was cut off has no score. Keeps what it saw."""

    def __init__(self, *, drops_cut: bool = False, limit: int = 100) -> None:
        self._drops_cut, self._limit = drops_cut, limit
        self.seen: list[list[tuple[str, float, bool, int]]] = []

    def __call__(self, prompts: list[str], completion_ids: list[list[int]], stopped: list[bool], **_: Any) -> Any:
        if len(self.seen) == self._limit:
            raise KeyboardInterrupt
        scores = [sum(ids) % 7 / 7 for ids in completion_ids]
        self.seen.append(list(zip(prompts, scores, stopped, map(len, completion_ids), strict=True)))
        return [
            None if self._drops_cut and not ended else Verdict(score, "right")
            for score, ended in zip(scores, stopped, strict=True)
        ]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


def train(policy: Path, out: Path, reward: Reward, **settings: Any) -> list[dict[str, Any]]:
    resume = settings.pop("resume", None)
    run_ppo(configure(policy, out, **{**SIZES, **settings}), prompts=PROMPTS, reward=reward, resume=resume)
    return metrics_without_times(out)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in other)


@pytest.mark.parametrize(("num_minibatches", "num_passes"), [(1, 2), (2, 1)])
def test_experience_costs_what_was_evaluated_also_of_masked_responses(policy, tmp_path, num_minibatches, num_passes):
    # The reference reads all of them, and so does the policy in the pass for a single minibatch, which has other rows.
    settings = {"num_minibatches": num_minibatches, "kl_coef": 0.1, "advantage": "to_go", "whiten_advantages": False}
    for row in train(policy, tmp_path / "run", Reward(), **settings):
        assert row["response/masked"] > 0
        assert row["flops/experience"] == num_passes * row["flops/rollout"]


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_it_trains_as_if_the_cut_responses_had_not_been_sampled(policy, tmp_path, num_minibatches):
    # Rewards to go need no other response, so that leaving rows out is all there is to it.
    alone = {"advantage": "to_go", "whiten_advantages": False, "num_minibatches": num_minibatches}
    masked = train(policy, tmp_path / "masked", Reward(), **alone)
    train(policy, tmp_path / "left out", Reward(drops_cut=True), **alone, missing_eos_score=None)
    kept = train(policy, tmp_path / "kept", Reward(), **alone, missing_eos_score=None)
    found, expected, other = (weights(tmp_path / name) for name in ("masked", "left out", "kept"))
    # In a single minibatch the old log probabilities come from a pass over other rows, and are rounded differently.
    assert apart(found, expected) < 1e-6
    assert apart(other, expected) > 1e-3
    assert masked[0]["policy/optimizer_steps"] == kept[0]["policy/optimizer_steps"] == 2 * num_minibatches


def test_their_scores_count_in_the_baselines_and_their_figures_in_the_metrics(policy, tmp_path):
    reward = Reward()
    rows = train(policy, tmp_path / "run", reward, advantage="dr_grpo", num_updates=1)
    [row], [seen] = rows, reward.seen
    cut = [each for each in seen if not each[2]]
    assert 0 < len(cut) < len(seen) == 24
    assert row["response/masked"] == pytest.approx(len(cut) / 24)
    assert row["response/eos_rate"] == pytest.approx(1 - len(cut) / 24)
    assert row["response/length"] == pytest.approx(mean(length for *_, length in seen))
    assert row["reward/score_mean"] == pytest.approx(mean(score for _, score, *_ in seen), rel=1e-6)
    assert row["group/unused"] == row["reward/unscored"] == 0
    [details] = read_json_lines(tmp_path / "run/details.jsonl")  # quantiles at 0, 5, … 100 %
    assert details["scores"][0] == pytest.approx(min(score for _, score, *_ in seen))
    assert (details["lengths"][0], details["lengths"][-1]) == (min(row[3] for row in seen), max(row[3] for row in seen))
    assert details["scores"][-1] == pytest.approx(max(score for _, score, *_ in seen), rel=1e-5)
    assert details["lengths"][10] == median(row[3] for row in seen)
    groups = defaultdict[str, list[float]](list)
    for prompt, score, *_ in seen:
        groups[prompt].append(score)
    samples = read_samples(tmp_path / "run")
    assert len(samples) == 24 - len(cut)
    for sample in samples:
        assert sample["stopped"]
        expected = sample["score"] - mean(groups[sample["prompt"]])
        assert sample["advantages"] == pytest.approx([expected] * len(sample["tokens"]), abs=1e-6)


def test_the_masked_share_is_of_the_responses_that_would_be_trained_on(policy, tmp_path):
    """Groups without spread are left out with all their responses, cut off or not."""
    seen: list[tuple[str, bool]] = []

    def flat_where_known(prompts: list[str], completion_ids: list[list[int]], stopped: list[bool], **_: Any) -> Any:
        seen.extend(zip(prompts, stopped, strict=True))
        flat = set(prompts[: len(prompts) // 2])
        return [0.5 if prompt in flat else sum(ids) for prompt, ids in zip(prompts, completion_ids, strict=True)]

    settings = {"advantage": "dr_grpo", "num_updates": 1, "constant_groups": "drop"}
    [row] = train(policy, tmp_path / "run", flat_where_known, **settings)
    flat = {prompt for prompt, _ in seen[: len(seen) // 2]}
    kept = [ended for prompt, ended in seen if prompt not in flat]
    assert 0 < len(kept) == len(seen) - row["group/unused"] < len(seen)
    assert 0 < kept.count(False) < len(kept)
    assert row["response/masked"] == pytest.approx(kept.count(False) / len(kept))


def test_masking_changes_no_figure_of_the_responses_before_the_first_step(policy, tmp_path):
    """The KL of the same responses is the same, and the score minus its cost is the total."""
    reference = {"reference": str(save_tiny_policy(tmp_path / "reference", seed=2)), "kl_coef": 0.05, "num_updates": 1}
    [masked], [kept] = (
        train(policy, tmp_path / str(mode), Reward(), **reference, missing_eos_score=mode) for mode in ("mask", None)
    )
    assert 0 < masked.pop("response/masked") < 1
    before = ("objective/", "reward/", "response/", "value/mean", "value/std", "value/returns", "group/", "score/")
    figures = {name: value for name, value in kept.items() if name.startswith(before)}
    assert figures["objective/kl"] > 1e-3
    assert {name: masked[name] for name in figures} == pytest.approx(figures, rel=1e-5)
    assert masked["reward/total"] == pytest.approx(masked["reward/score_mean"] - masked["reward/kl"], rel=1e-5)


def test_of_episodes_those_are_masked_that_were_cut_off():
    rollout = make_rollout()  # the first of three ends with a stop token
    empty = torch.zeros_like(rollout.logprobs)
    episodes = replace(rollout, cut_off=torch.tensor([False, False, True]))
    ran_out = replace(episodes, ending=torch.tensor([ENDINGS.index(e) for e in ("max_turns", "max_tokens", "timeout")]))
    for sampled, kept in ((rollout, [0]), (episodes, [0, 1]), (ran_out, [0])):
        scored = ScoredRollout(sampled, torch.arange(3.0), None, ["p"] * 3, ScoredTerms([0.0] * 3, {}))
        experience = Experience(sampled, scored.scores, empty, None, None, empty, sampled.action_mask, empty, empty)
        batch, left = SampledBatch([], [sampled], 3, scored, scored).masked(experience)
        assert left.scores.tolist() == batch.trained.scores.tolist() == kept
        assert batch.num_masked == 3 - len(kept)


def test_lengths_of_right_and_wrong_responses(policy, tmp_path):
    reward = Reward()
    [row] = train(policy, tmp_path / "run", reward, num_updates=1, missing_eos_score=None)
    right = [length for _, score, _, length in reward.seen[0] if score > 0]
    wrong = [length for _, score, _, length in reward.seen[0] if score <= 0]
    assert row["response/length_right"] == pytest.approx(mean(right))
    assert row["response/length_wrong"] == pytest.approx(mean(wrong))
    assert "response/masked" not in row


def test_no_step_is_taken_where_every_response_was_cut_off(policy, tmp_path):
    rows = train(policy, tmp_path / "run", Reward(), stop_token=None, max_new_tokens=2, num_prompts=1, num_responses=2)
    assert [row["response/masked"] for row in rows] == [1, 1]
    assert [row["policy/optimizer_steps"] for row in rows] == [0, 0]
    before, after = load_file(policy / "model.safetensors"), weights(tmp_path / "run")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_run_with_a_critic_goes_on_to_the_bit(policy, tmp_path):
    whole = train(policy, tmp_path / "whole", Reward())
    with pytest.raises(KeyboardInterrupt):
        train(policy, tmp_path / "run", Reward(limit=1))
    assert train(policy, tmp_path / "run", Reward(), resume=Resume()) == whole
    found, expected = weights(tmp_path / "run"), weights(tmp_path / "whole")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_response_behind_a_bad_step_is_described_although_others_are_masked(policy, tmp_path, monkeypatch):
    steps_of, expected = trainer.PpoUpdate, []

    def sabotaged(learner: Any, optimizer: Any, experience: Experience, *rest: Any, **settings: Any) -> Any:
        advantages = experience.advantages.clone()
        advantages[5] = torch.inf
        ids = experience.rollout.response_ids[5][experience.action_mask[5]]
        expected.append((tiny_tokenizer().decode(ids), float(experience.total_scores[5])))
        return steps_of(learner, optimizer, replace(experience, advantages=advantages), *rest, **settings)

    monkeypatch.setattr(trainer, "PpoUpdate", sabotaged)
    with pytest.raises(NumericsError, match="of response 5 is"):
        train(policy, tmp_path / "run", Reward())
    [incident] = read_json_lines(tmp_path / "run" / INCIDENTS_FILE)
    assert incident["row"] == 5
    assert [(incident["response"], incident["score"])] == expected

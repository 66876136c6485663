"""Groups without spread: kept, dropped or resampled; what is said about it, and resumed to the bit."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kedge.algorithm.experience import Rollout
from kedge.config import config_from_settings, schedule_in_words
from kedge.data import Prompt
from kedge.rewards import CallLimits, load_reward
from kedge.rewards.score import ScoredRollout, score_rollout
from kedge.runs.run import Resume
from kedge.stages.ppo import run_ppo
from kedge.stages.ppo.sampling import SampledBatch, Sampling, next_round_size
from kedge.stages.ppo.settings import PpoSettings
from kedge.training.runtime import Stopwatch
from kedge_base.errors import ConfigError, UnscoredError
from kedge_base.run_folder.record_format import read_samples
from tests.models.test_actor_critic import make_rollout
from tests.rewards.test_score import scored
from tests.stages.ppo.test_ppo import PROMPTS, configure, metrics_without_times
from tests.tiny import save_tiny_policy, tiny_tokenizer

SOLVED = PROMPTS[:4]
"""The prompts whose responses all score 1."""
SIZES = {"num_prompts": 3, "num_responses": 3, "num_minibatches": 1, "num_samples": 100, "kl_coef": 0.0}


class Reward:
    """Scores the length of a response, and 1 for every response to a solved prompt; keeps the scores that it gave."""

    def __init__(self, solved: list[str] = SOLVED, *, limit: int = 100) -> None:
        self._solved, self.given, self._limit = solved, list[list[float]](), limit

    def __call__(self, prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.given.append(
            [
                1.0 if prompt in self._solved else float(sum(ids))
                for prompt, ids in zip(prompts, completion_ids, strict=True)
            ]
        )
        if len(self.given) == self._limit:
            raise KeyboardInterrupt
        return self.given[-1]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


def train(
    policy: Path, out: Path, reward: Reward, *, resume: Resume | None = None, **settings: Any
) -> list[dict[str, Any]]:
    config = configure(policy, out, **{**SIZES, "constant_groups": "resample", **settings})
    run_ppo(config, prompts=PROMPTS, reward=reward, resume=resume)
    return metrics_without_times(out)


@pytest.fixture(scope="module")
def whole(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reward]:
    folder, reward = tmp_path_factory.mktemp("runs") / "whole", Reward()
    train(policy, folder, reward)
    return folder, reward


def test_resampling_fills_the_update_with_groups_that_have_spread(whole: tuple[Path, Reward]) -> None:
    folder, reward = whole
    rows, trained = metrics_without_times(folder), read_samples(folder)
    rounds = iter(reward.given)
    for row in rows:
        prompts = [each["prompt"] for each in trained if each["update"] == row["update"]]
        assert len(prompts) == 9
        assert not set(prompts) & set(SOLVED)
        scores = [score for _ in range(int(row["group/resamples"]) + 1) for score in next(rounds)]
        solved = sum(score == 1.0 for score in scores)
        assert row["reward/score_mean"] == pytest.approx(sum(scores) / len(scores), rel=1e-5)
        assert row["group/constant"] == pytest.approx(solved / len(scores))
        assert row["group/sampled"] == len(scores)
        assert row["group/unused"] == len(scores) - 9 >= solved
    assert sum(row["group/resamples"] for row in rows) > 0
    assert next(rounds, None) is None
    flops = [row["flops/rollout"] / row["flops/train"] for row in rows]
    assert min(flops) > 1 / 6  # two epochs, of a pass and its gradient each, on only a part of what was sampled


def test_a_resampled_run_goes_on_to_the_bit(whole: tuple[Path, Reward], policy: Path, tmp_path: Path) -> None:
    folder, reward = whole
    first = int(metrics_without_times(folder)[0]["group/resamples"]) + 1
    assert first > 1  # the position in the prompts depends on the scores
    with pytest.raises(KeyboardInterrupt):
        train(policy, tmp_path / "run", Reward(limit=first + 1))
    rows = train(policy, tmp_path / "run", after := Reward(), resume=Resume())
    assert rows == metrics_without_times(folder)
    assert after.given == reward.given[first:]
    weights = "model/model.safetensors"
    assert (tmp_path / "run" / weights).read_bytes() == (folder / weights).read_bytes()


def test_dropping_trains_on_what_is_left_and_says_so(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = train(policy, tmp_path / "run", Reward(), constant_groups="drop", num_prompts=6, value_warmup_updates=1)
    assert [row["group/unused"] for row in rows] == [0, 12]  # the critic's own update keeps them
    assert [row["group/resamples"] for row in rows] == [0, 0]
    prompts = [row["prompt"] for row in read_samples(tmp_path / "run") if row["update"] == 2]
    assert sorted(set(prompts)) == sorted(PROMPTS[4:])
    shown = capsys.readouterr()
    line = "update 2: the responses of 4 of 6 groups all score the same; 12 of 18 responses are not trained on"
    assert line in " ".join((shown.out + shown.err).split())


def test_without_any_spread_no_step_is_taken(policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = train(
        policy,
        tmp_path / "run",
        Reward(PROMPTS),
        constant_groups={"resample": 2},
        num_prompts=2,
        num_updates=1,
        entropy_target=3.0,
        critic="separate",
    )
    [row] = rows
    assert row["flops/experience"] > 0  # the critic's values: no step counts their pass
    assert row["policy/optimizer_steps"] == row["flops/train"] == 0
    assert (row["group/constant"], row["group/resamples"], row["group/unused"]) == (1.0, 2, 18)
    before, after = load_file(policy / "model.safetensors"), load_file(tmp_path / "run/model/model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    shown = capsys.readouterr()
    assert "update 1: no group has spread, and no step is taken" in " ".join((shown.out + shown.err).split())


def test_an_update_is_smaller_where_the_rounds_do_not_fill_it(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"constant_groups": {"resample": 1}, "num_updates": 1, "num_minibatches": 9}
    [row] = train(policy, tmp_path / "run", Reward(PROMPTS[:5]), **settings)
    assert (row["group/resamples"], row["group/unused"], row["group/constant"]) == (1, 15, pytest.approx(5 / 6))
    assert len(read_samples(tmp_path / "run")) == 3
    assert row["policy/optimizer_steps"] == 2 * 3  # not 2 * 9: each of three rows is a minibatch
    step = sum(row[name] for name in row if name.startswith("flops/")) / row["cost/sft_steps"]
    assert row["flops/train"] == pytest.approx(2 * step)  # and yet two whole epochs
    shown = capsys.readouterr()
    assert "update 1: the rounds of ppo.constant_groups=resample ended with 1 of 3 groups" in " ".join(
        (shown.out + shown.err).split()
    )


def test_a_round_draws_what_should_be_enough_and_never_more_than_a_whole_update() -> None:
    assert next_round_size(64, 64, 48) == 22  # 16 missing, of which three in four have spread
    assert next_round_size(64, 64, 63) == 2
    assert next_round_size(64, 64, 8) == 64
    assert next_round_size(64, 128, 0) == 64


def test_prompts_without_spread_rest_and_the_run_resumes_to_the_bit(policy: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"constant_groups": "keep", "num_prompts": 2, "num_updates": 6, "data": {"rest": 2}}
    rows = train(policy, tmp_path / "whole", Reward(), **settings)
    samples = read_samples(tmp_path / "whole")
    prompts = [{each["prompt"] for each in samples if each["update"] == update} for update in range(1, 7)]
    # A pass over six prompts, of which four are solved; then two passes over the others, and one over all.
    assert set.union(*prompts[:3]) == set(PROMPTS)
    assert prompts[3] == prompts[4] == set(PROMPTS) - set(SOLVED)
    assert prompts[5] & set(SOLVED)
    solved = [len(set.union(*prompts[: update + 1]) & set(SOLVED)) for update in range(3)]
    assert [row["prompt/resting"] for row in rows[:3]] == pytest.approx([count / 6 for count in solved])
    with pytest.raises(KeyboardInterrupt):
        train(policy, tmp_path / "run", Reward(limit=4), **settings)
    assert train(policy, tmp_path / "run", Reward(), resume=Resume(), **settings) == rows


def test_prompts_with_spread_are_drawn_more_often_and_the_run_resumes_to_the_bit(policy: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"constant_groups": "keep", "num_prompts": 3, "num_updates": 6}
    settings["data"] = {"draw": "by_spread"}
    rows = train(policy, tmp_path / "whole", Reward(), **settings)
    samples = read_samples(tmp_path / "whole")
    drawn = [
        [each["prompt"] for each in samples if each["update"] in (2 * turn + 1, 2 * turn + 2)] for turn in range(3)
    ]
    # Four of six prompts are solved: weights of 1/4 each, against 6 in all for the other two, so 0.86 of six draws.
    solved = [sum(prompt in SOLVED for prompt in each) / 3 for each in drawn]
    assert solved[0] == 4
    assert max(solved[1:]) <= 2
    with pytest.raises(KeyboardInterrupt):
        train(policy, tmp_path / "run", Reward(limit=4), **settings)
    assert train(policy, tmp_path / "run", Reward(), resume=Resume(), **settings) == rows


def test_groups_of_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data.draw={evenly: 1} compares the responses .* rollout.num_responses=1"):
        configure(tmp_path, tmp_path / "run", data={"rest": 1})
    with pytest.raises(ConfigError, match=r"^data.draw=by_spread compares .* or data.draw=evenly"):
        configure(tmp_path, tmp_path / "run", data={"draw": "by_spread"})
    with pytest.raises(ConfigError, match=r"^ppo.constant_groups=drop compares .* rollout.num_responses=1"):
        configure(tmp_path, tmp_path / "run", constant_groups="drop")


def test_the_schedule_says_what_is_left_out() -> None:
    groups = {"num_responses": 2, "constant_groups": {"resample": 3}}
    resampled = schedule_in_words(config_from_settings("ppo", groups), 1000)
    assert "  samples others in their place, in at most 3 additional rounds,\n" in resampled
    assert "It uses at least 12,800 prompts from the 1,000 available" in resampled
    assert "the greedy one" in schedule_in_words(config_from_settings("ppo", {"advantage": "remax"}))
    assert "leaves out" not in schedule_in_words(config_from_settings("ppo", {"num_responses": 2}), 1000)


def test_remax_compares_each_response_with_the_greedy_one_to_its_prompt(policy: Path, tmp_path: Path) -> None:
    """Slow loop: greedy decoding by transformers' own model, token by token, and the advantages of the samples."""
    rows = train(
        policy,
        tmp_path / "run",
        Reward(),
        constant_groups="keep",
        advantage="remax",
        num_updates=1,
        num_prompts=6,
        num_responses=2,
    )
    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)
    baselines: dict[str, float] = {}
    for prompt in PROMPTS:
        ids, start = tokenizer(prompt)["input_ids"], len(tokenizer(prompt)["input_ids"])
        while len(ids) < start + 8 and (len(ids) == start or ids[-1] != tokenizer.eos_token_id):
            logits = model(torch.tensor([ids])).logits[0, -1]
            logits[tokenizer.pad_token_id] = -torch.inf  # which a policy never says
            ids.append(int(logits.argmax()))
        baselines[prompt] = 1.0 if prompt in SOLVED else float(sum(ids[start:]))
    samples = read_samples(tmp_path / "run")
    assert len(samples) == 12
    for sample in samples:
        expected = sample["score"] - baselines[sample["prompt"]]
        assert sample["advantages"] == pytest.approx([expected] * len(sample["tokens"]), abs=1e-3)
    assert len({sample["score"] - baselines[sample["prompt"]] for sample in samples}) > 3
    [row] = rows
    assert row["reward/greedy_mean"] == pytest.approx(sum(baselines.values()) / 6)
    plain = train(policy, tmp_path / "plain", Reward(), constant_groups="keep", num_updates=1, num_prompts=6)
    assert "reward/greedy_mean" not in plain[0]
    assert row["flops/rollout"] > row["flops/experience"]  # the greedy responses are sampled, but not evaluated


def test_spo_compares_each_response_with_the_earlier_ones_to_its_prompt(policy: Path, tmp_path: Path) -> None:
    """By hand for two responses to each of six prompts an update, with ρ = ½; resumed to the bit."""
    settings: dict[str, Any] = {"advantage": {"spo": 0.5}, "whiten_advantages": False, "kl_coef": 0.0}
    settings |= {"num_prompts": 6, "num_responses": 2, "constant_groups": "keep"}
    rows = train(policy, tmp_path / "run", Reward(), num_updates=3, **settings)
    known, overall = dict[str, tuple[float, float]](), (0.0, 0.0)
    for update in (1, 2, 3):
        samples = [each for each in read_samples(tmp_path / "run") if each["update"] == update]
        left: list[float] = []
        for sample in samples:
            before = known.get(sample["prompt"], overall)[1]
            left.append(sample["score"] - before)
            assert sample["advantages"] == pytest.approx([sample["score"] - before] * len(sample["tokens"]), abs=1e-3)
        saved = 1 - statistics.pvariance(left) / statistics.pvariance([sample["score"] for sample in samples])
        assert rows[update - 1]["prompt/known"] == (update > 1)
        assert rows[update - 1]["prompt/variance_saved"] == pytest.approx(saved, abs=1e-4)
        assert (saved > 0.1) == (update > 1)
        number = overall[0] / 2 + len(samples)
        total = overall[0] / 2 * overall[1] + sum(sample["score"] for sample in samples)
        overall = (number, total / number)
        for prompt in {sample["prompt"] for sample in samples}:
            own = [sample["score"] for sample in samples if sample["prompt"] == prompt]
            weight, mean = known.get(prompt, (2.0, overall[1]))
            number = weight / 2 + len(own)
            known[prompt] = (number, (weight / 2 * mean + sum(own)) / number)
    settings |= {"num_updates": 3, "checkpoint.every": 1}
    with pytest.raises(KeyboardInterrupt):
        train(policy, tmp_path / "other", Reward(limit=3), **settings)
    assert train(policy, tmp_path / "other", Reward(), resume=Resume(), **settings) == rows


def test_the_scores_of_groups_that_are_not_trained_on_count_in_the_means_of_prompts(
    policy: Path, tmp_path: Path
) -> None:
    """Prompts that are solved in the first update alone are trained on in the second."""

    class SolvedFirst(Reward):
        def __call__(self, *arguments: Any, **columns: Any) -> list[float]:
            self._solved = [] if self.given else SOLVED
            return super().__call__(*arguments, **columns)

    settings = {"advantage": "spo", "num_prompts": 6, "num_responses": 2, "num_updates": 2, "constant_groups": "drop"}
    first, second = train(policy, tmp_path / "run", SolvedFirst(), **settings)
    assert (first["group/unused"], second["group/unused"]) == (2 * len(SOLVED), 0)
    assert (first["prompt/known"], second["prompt/known"]) == (0.0, 1.0)


@pytest.mark.parametrize(("base", "num_responses"), [("rloo", 2), ("reinforce++", 1)])
def test_a_critic_that_adds_starts_from_the_estimator_without_one(
    policy: Path, tmp_path: Path, base: str, num_responses: int
) -> None:
    """A new critic's values are 0, and so is its weight."""
    found = {}
    for name in (base, f"{base}_critic"):
        settings: dict[str, Any] = {"advantage": name, "num_responses": num_responses, "constant_groups": "keep"}
        settings |= {"critic": "separate", "num_prompts": 8, "num_updates": 3, "critic_learning_rate": 0.03}
        found[name] = train(policy, tmp_path / name, Reward(), **settings, num_critic_epochs=4)
    (first, *_), (plain, *_) = found[f"{base}_critic"], found[base]
    assert (first["advantage/critic_weight"], first["advantage/variance_saved"]) == (0, 0)
    assert "advantage/critic_weight" not in plain
    same = ("policy/loss", "policy/approx_kl", "policy/grad_norm", "reward/score_mean")
    assert {key: first[key] for key in same} == {key: plain[key] for key in same}
    one, other = (
        [each["advantages"] for each in read_samples(tmp_path / name) if each["update"] == 1] for name in found
    )
    assert one == other
    for row in found[f"{base}_critic"]:
        assert 0 <= row["advantage/critic_weight"] <= 1
        assert row["advantage/variance_saved"] <= 1


@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_rewards_per_token_reach_the_tokens_that_they_were_given_for(
    policy: Path, tmp_path: Path, advantage: str
) -> None:
    given: list[list[float]] = []

    def per_token(completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
        given.extend([[float(id % 7) for id in ids] for ids in completion_ids])
        return given

    config = configure(policy, tmp_path / "run", **{**SIZES, "advantage": advantage, "num_updates": 1})
    run_ppo(config, prompts=PROMPTS, reward=per_token)
    samples = read_samples(tmp_path / "run")
    assert [sample["rewards"] for sample in samples] == given
    for row, sample in enumerate(samples):
        group = [steps for steps, other in zip(given, samples, strict=True) if other["prompt"] == sample["prompt"]]
        assert len(group) == 3
        every = [number for steps in group for number in steps]
        others = [number for steps in group if steps is not given[row] for number in steps]
        mean, unit = statistics.fmean(others), 1.0
        if advantage == "grpo":
            mean, unit = statistics.fmean(every), statistics.stdev(every)
        expected = [sum((number - mean) / unit for number in given[row][place:]) for place in range(len(given[row]))]
        assert sample["advantages"] == pytest.approx(expected, abs=1e-4)


class Scripted:
    """A trainer in its first update: two prompts get two responses and one, with these scores; None: the call fails."""

    update, trains_policy, pad_id = 1, True, 0

    def __init__(self, *scores: list[float | None] | None, **settings: Any) -> None:
        config = config_from_settings("ppo", {"num_prompts": 2, "num_responses": 2, **settings})
        self.settings = PpoSettings.of(config, exact=True)
        limits = CallLimits(on_error="drop", retries=0)
        self._reward, self._scores = load_reward([self.judge], limits=limits), iter(scores)

    def judge(self, completions: list[str]) -> list[float | None]:
        assert self._given is not None, "the call fails"
        return self._given

    def publish(self, version: int) -> dict[str, float]:
        return {}

    def sample(self, *_: Any, greedy: bool = False, **__: Any) -> Rollout:
        rollout = replace(make_rollout(fill=7), group=torch.tensor([0, 0, 1]))
        return make_rollout(fill=7).select(slice(0, 2)) if greedy else rollout

    def score(self, rollout: Rollout, *_: Any, scores: object = None) -> ScoredRollout:
        self._given = next(self._scores)
        prompts = [Prompt("Tell me") for _ in range(rollout.num_responses)]
        return score_rollout(rollout, prompts, self._reward, tiny_tokenizer(), max_new_tokens=5)

    def batch(self) -> SampledBatch:
        sampling = Sampling(cast(Any, self), cast(Any, self), say=lambda _: None)
        return sampling.batch(1, Stopwatch(torch.device("cpu")))

    def next(self, count: int) -> list[Prompt]:
        return [Prompt("Tell me") for _ in range(count)]


def test_a_round_without_any_score_counts_among_the_sampled_and_the_unscored() -> None:
    batch = Scripted([1.0, 1.0, 2.0], None, [3.0, 4.0, None], constant_groups={"resample": 2}).batch()
    metrics = batch.metrics()
    assert (metrics["group/resamples"], metrics["group/sampled"], metrics["reward/unscored"]) == (2, 9, 4)
    assert metrics["reward/judge_given_up"] == 3
    assert batch.num_scored == 5
    assert batch.num_tokens == 3 * make_rollout(fill=7).num_tokens


def test_responses_whose_greedy_one_has_no_score_count_among_the_unscored() -> None:
    batch = Scripted([1.0, 2.0, 3.0], [None, 0.5], advantage="remax").batch()
    assert (batch.metrics()["reward/unscored"], batch.num_scored) == (2, 1)
    lost = {"advantage": "remax", "constant_groups": {"resample": 1}}
    batch = Scripted([1.0, 2.0, 3.0], [0.5, 0.5], [1.0, None, None], [None, 0.5], **lost).batch()
    assert (batch.metrics()["reward/unscored"], batch.metrics()["group/sampled"]) == (3, 6)


def test_responses_are_compared_with_the_greedy_one_of_their_group_and_left_out_if_it_has_no_score() -> None:
    rollout = replace(make_rollout(fill=7), group=torch.tensor([4, 1, 4]))
    ours = scored(lambda completions: [1.0, 2.0, 3.0], rollout=rollout)
    greedy = scored(lambda completions: [None, None, 0.5], rollout=rollout)
    compared = ours.compared_with(greedy)
    assert compared.baseline is not None
    assert compared.baseline.tolist() == [0.5, 0.5]
    assert compared.prompts == ["prompt 0", "prompt 2"]
    assert compared.metrics()["reward/greedy_mean"] == 0.5
    with pytest.raises(UnscoredError, match="greedy response"):
        ours.compared_with(replace(greedy, rollout=replace(greedy.rollout, group=torch.tensor([9]))))

"""The training of a critic end to end: its returns, resuming to the bit, its model in PPO, and refused settings."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kedge.config import check_stage, config_from_settings
from kedge.runs.run import Resume, open_run
from kedge.stages.critic import CriticResult, run_critic
from kedge.stages.critic import sampling as critic_sampling
from kedge.stages.critic.parts import PartStore
from kedge.stages.critic.sampling import CriticInputs, as_first_update
from kedge.stages.ppo.critics import with_saved_critic
from kedge.stages.ppo.roles import load_roles
from kedge.training.supervised.returns import ReturnsLoss, SampledReturns, measure_explained
from kedge_base.errors import ConfigError
from kedge_plan.plan import count_stage
from kedge_plan.rows import Lengths
from tests.tiny import save_tiny_policy, tiny_tokenizer

PROMPTS = [f"The {thing} {verb}" for thing in ("boat", "tide", "sun", "rope") for verb in ("is", "was", "will")]
GAMMA, NO_END = 0.5, -3.0


def length(completions: list[str], **_: object) -> list[float]:
    return [len(text) / 4 for text in completions]


def rising(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[list[float]]:
    """A process reward: 1 for the first token, 2 for the second and so on."""
    return [[float(place + 1) for place in range(len(ids))] for ids in completion_ids]


def settings(policy: Path, out: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(policy),
        "out": str(out),
        "num_responses": 2,
        "num_epochs": 2,
        "batch_size": 6,
        "learning_rate": 1e-3,
        "gamma": GAMMA,
        "missing_eos_score": NO_END,
        "rollout.num_prompts": 5,
        "max_new_tokens": 6,
        "data.eval_fraction": 0.25,
        "checkpoint.every": 1,
        "runtime.report": False,
        **more,
    }


def train(policy: Path, out: Path, *, resume: bool = False, callback: Any = None, **more: Any) -> CriticResult:
    config = config_from_settings("critic", settings(policy, out, **more))
    options = {"resume": Resume() if resume else None, "callback": callback}
    return run_critic(config, prompts=PROMPTS, reward=[length, rising], **options)


def weights(result: CriticResult) -> dict[str, torch.Tensor]:
    return load_file(result.model / "model.safetensors")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, policy: Path) -> CriticResult:
    return train(policy, tmp_path_factory.mktemp("runs") / "critic")


def parts_of(result: CriticResult) -> list[SampledReturns]:
    index = json.loads((result.folder / "sampled" / "index.json").read_text())
    store = PartStore(result.folder / "sampled", index["fingerprint"])
    parts = [store.read(number) for number in range(store.num_kept)]
    return [part.returns for part in parts if part is not None]


def test_returns_are_the_discounted_sums_of_what_ppo_would_pay(trained: CriticResult) -> None:
    """Token scores at their tokens, the response's score or that of a missing stop token at its last one."""
    parts = parts_of(trained)
    assert [part.rollout.num_responses for part in parts] == [10, 8, 6], "9 prompts in chunks of 5, and 3 held out"
    ends = set()
    for part in parts:
        for row in range(part.rollout.num_responses):
            num = int(part.mask[row].sum())
            ends.add(bool(part.rollout.stopped[row]))
            rewards = [float(place + 1) for place in range(num)]
            if not part.rollout.stopped[row]:
                rewards[-1] += NO_END
                expected = [sum(GAMMA ** (k - t) * rewards[k] for k in range(t, num)) for t in range(num)]
                assert part.returns[row, :num].tolist() == pytest.approx(expected, rel=1e-5)
    assert False in ends


def test_returns_by_turn_are_those_of_the_first_tokens(policy: Path, tmp_path: Path) -> None:
    """A response is one turn, within which nothing is discounted."""
    for part in parts_of(train(policy, tmp_path / "run", **{"ppo.credit": "turn", "missing_eos_score": None})):
        assert torch.equal(part.mask, part.rollout.action_mask & (part.rollout.action_mask.cumsum(-1) == 1))
        for row, num in enumerate(part.rollout.action_mask.sum(-1).tolist()):
            text = float(part.returns[row, 0]) - num * (num + 1) / 2  # the score of `length`
            assert text >= 0
            assert 4 * text == pytest.approx(round(4 * text), abs=1e-4)


def test_settings_have_the_values_of_the_first_update(policy: Path, tmp_path: Path) -> None:
    schedules = {"rollout.max_new_tokens": {1: 3, 10: 6}, "ppo.gamma": {1: 0.5, 10: 1.0}}
    more = {"missing_eos_score": None, "schedules": schedules}
    for part in parts_of(train(policy, tmp_path / "run", **more)):
        for row, num in enumerate(part.mask.sum(-1).tolist()):
            assert num <= 3
            short = float(part.rollout.stopped[row])
            rewards = [float(place + 1) for place in range(num)]
            assert short or num == 3
            [*_, first] = [sum(0.5**k * each for k, each in enumerate(rewards))]
            assert part.returns[row, 0] >= first - 1e-5


def test_whitened_rewards_of_the_prompts_that_are_left_over_have_the_scale_of_an_update(
    policy: Path, tmp_path: Path
) -> None:
    more = {"rollout.num_prompts": 4, "whiten_rewards": True}
    config = config_from_settings("critic", settings(policy, tmp_path / "run", **more))
    [subject] = [count_stage(config, "critic", lengths=Lengths((4,), rows=12)).subject]
    assert subject.num_units == 3, "as planned"
    parts = parts_of(train(policy, tmp_path / "run", **more))
    assert [part.rollout.num_responses for part in parts] == [8, 10, 6], "9 prompts in chunks of 4, and 3 held out"


@pytest.mark.parametrize("stage", ["critic", "rlhf"])
def test_a_kl_to_the_model_itself_is_refused_only_where_fine_tuning_comes_first(
    stage: str, policy: Path, tmp_path: Path
) -> None:
    inputs: dict[str, Any] = {f"data.{name}": ["p.jsonl"] for name in ("prompts", "demonstrations", "comparisons")}
    if stage == "critic":
        inputs = {"data.prompts": ["p.jsonl"], "reward": [{"source": "mine.py:f"}]}
    else:
        inputs |= {"rlhf.train_critic": True}
    given = {"model": str(policy), "out": str(tmp_path), **inputs, "ppo.reference": str(policy)}
    with pytest.raises(ConfigError, match=r"ppo.kl_in=loss") if stage == "rlhf" else nullcontext():
        check_stage(config_from_settings(stage, given), stage)


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ({}, True),
        ({"kl_in": "score"}, True),
        ({"kl_in": "loss"}, False),
        ({"kl_coef": 0.0, "measure_kl": True}, False),
        ({"schedules": {"ppo.kl_coef": {1: 0.0, 5: 0.1}}}, False),
        ({"kl_coef": 0.0, "measure_kl": True, "schedules": {"ppo.kl_coef": {1: 0.1, 5: 0.0}}}, True),
    ],
)
def test_a_kl_to_another_model_in_the_first_returns_is_refused(
    policy: Path, tmp_path: Path, more: dict[str, Any], refused: bool
) -> None:
    inputs = {"data.prompts": ["p.jsonl"], "reward": [{"source": "mine.py:f"}], "ppo.reference": "teacher"}
    config = config_from_settings("critic", settings(policy, tmp_path / "run", **inputs, **more))
    with pytest.raises(ConfigError, match=r"ppo.reference=teacher: .*ppo.kl_in=loss") if refused else nullcontext():
        check_stage(config, "critic")


def test_responses_that_are_masked_are_not_fitted_to(policy: Path, tmp_path: Path) -> None:
    stops = list(range(4, 4 + len(tiny_tokenizer()) // 6))
    given = {"missing_eos_score": "mask", "stop_token": stops}
    parts = parts_of(train(policy, tmp_path / "run", **given))
    assert all(part.rollout.stopped.all() for part in parts)
    assert 0 < sum(part.rollout.num_responses for part in parts) < 24


def test_the_summary_measures_held_out_prompts(trained: CriticResult) -> None:
    summary = json.loads((trained.folder / "summary.json").read_text())
    assert summary == trained.summary
    assert summary["measured_on"] == "held-out prompts"
    counts = [summary[name] for name in ("num_prompts", "num_responses", "num_held_out_prompts", "num_steps")]
    assert counts == [9, 18, 3, 6]
    explained = summary["explained_variance"]
    assert explained["low"] <= explained["value"] <= explained["high"]
    assert summary["missing_eos_score"] == NO_END
    rows = [json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["eval/explained_variance"] == pytest.approx(explained["value"], abs=1e-4)


def test_ppo_starts_from_the_critic_with_the_same_values(trained: CriticResult, policy: Path, tmp_path: Path) -> None:
    config = config_from_settings(
        "ppo", {"model": str(policy), "out": str(tmp_path / "run"), "critic_init": str(trained.folder)}
    )
    config = with_saved_critic(config)
    run = open_run(config, "ppo", in_memory={"data.prompts": PROMPTS, "reward": length})
    roles = load_roles(config, run)
    held_out = parts_of(trained)[-1]
    loss = ReturnsLoss(roles.actor_critic, held_out, center=0.0, unit=1.0)
    explained = measure_explained(loss, range(held_out.rollout.num_responses))
    assert explained["explained_variance"] == pytest.approx(trained.summary["explained_variance"], abs=1e-6)


def test_a_run_that_is_interrupted_twice_ends_with_the_same_bits(
    trained: CriticResult, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While sampling, with a part damaged in addition, and while training."""
    out, sample = tmp_path / "run", critic_sampling.sample_part

    def stop_at_third(inputs: Any, number: int, *rest: Any) -> Any:
        if number == 2:
            raise KeyboardInterrupt
        return sample(inputs, number, *rest)

    monkeypatch.setattr(critic_sampling, "sample_part", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        train(policy, out)
    second = out / "sampled" / "part-000002.safetensors"
    second.write_bytes(second.read_bytes()[:-1] + b"?")
    sampled: list[int] = []

    def counted(inputs: Any, number: int, *rest: Any) -> Any:
        sampled.append(number)
        return sample(inputs, number, *rest)

    def stop_at_step(update: Any) -> None:
        if update.number == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(critic_sampling, "sample_part", counted)
    with pytest.raises(KeyboardInterrupt):
        train(policy, out, resume=True, callback=stop_at_step)
    assert sampled == [1, 2], "the damaged part, and those after it"
    resumed = train(policy, out, resume=True)
    assert sampled == [1, 2]
    first, again = weights(trained), weights(resumed)
    assert all(torch.equal(first[name], again[name]) for name in first)
    times = ("sampling_seconds",)
    assert {k: v for k, v in resumed.summary.items() if k not in times} == {
        k: v for k, v in trained.summary.items() if k not in times
    }
    configs = [json.loads((each.model / "config.json").read_text()) for each in (trained, resumed)]
    assert configs[0]["kedge_score_shift"] == configs[1]["kedge_score_shift"] != 0.0


def test_a_shared_critic_is_the_policy_with_a_head_beside_it(policy: Path, tmp_path: Path) -> None:
    result = train(policy, tmp_path / "run", kind="shared", score_at="after_last")
    before, after = load_file(policy / "model.safetensors"), weights(result)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert load_file(result.model / "value_head/model.safetensors")["weight"].abs().max() > 0
    assert result.summary["num_steps"] == 1
    assert with_saved_critic(
        config_from_settings("ppo", {"critic_init": str(result.folder), "model": str(policy)})
    ).ppo.resolved_critic == "shared"  # fmt: skip


def test_parts_of_other_inputs_or_settings_are_not_used(trained: CriticResult, policy: Path, tmp_path: Path) -> None:
    def key(**more: Any) -> dict[str, str]:
        config = config_from_settings("critic", settings(policy, tmp_path / "run", **more))
        steps: Any = SimpleNamespace(run=SimpleNamespace(fingerprint={"model": "a hash"}, precision="fp32", rewards=[]))
        roles: Any = None
        return CriticInputs(
            as_first_update(config, holds_out=True), config.critic.num_prompts, roles, steps
        ).sampling_key

    assert key() == key(num_epochs=7, batch_size=2)
    assert (
        len({str(key(**more)) for more in ({}, {"gamma": 1.0}, {"num_responses": 3}, {"critic.num_prompts": 4})}) == 4
    )
    assert PartStore(trained.folder / "sampled", {"model": "another hash"}).num_kept == 0


def test_a_head_on_the_policy_has_no_other_start(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"critic\.base is what a separate critic starts from"):
        train(policy, tmp_path / "run", kind="shared", base="reward")

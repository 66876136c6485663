"""What PPO holds in bf16, and what it says about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kedge
from tests.tiny import save_tiny_policy, save_tiny_reward_model


def test_the_error_of_a_rounded_reference_is_measured_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiny policy's weights are large and random: every role in bf16 costs about 0.03 nats per token."""
    policy = save_tiny_policy(tmp_path / "policy")
    bytes_of, error_of = {}, {}
    for dtype in ("fp32", "bf16"):
        kedge.ppo(
            model=policy,
            prompts=["The boat", "A sailor"],
            reward=lambda completions, **_: [float(len(each)) for each in completions],
            out=tmp_path / dtype,
            num_updates=2,
            max_new_tokens=8,
            device="cpu",
            precision="fp32",
            frozen_dtype=dtype,
            report=False,
            offload="frozen",
        )
        first, second = map(json.loads, (tmp_path / dtype / "metrics.jsonl").read_text().splitlines())
        assert "objective/reference_error" not in second
        error_of[dtype] = first["objective/reference_error"]
        bytes_of[dtype] = json.loads((tmp_path / dtype / "roles.json").read_text())["reference"]["weights_bytes"]
    assert error_of["fp32"] < 1e-6
    assert 0.003 < error_of["bf16"] < 0.3
    norms = 5 * 16 * 4
    assert bytes_of["bf16"] == (bytes_of["fp32"] - norms) // 2 + norms
    output = "".join(capsys.readouterr())
    assert output.count("runtime.offload=frozen has no effect on cpu") == 2
    assert output.count("Held in bf16, the reference differs") == (error_of["bf16"] > 0.01)


@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_what_fewer_bits_do_to_scores_and_kl_is_measured_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    policy, reward = save_tiny_policy(tmp_path / "policy"), save_tiny_reward_model(tmp_path / "reward", seed=1)
    prompts = [f"{name} {number}" for name in ("The boat", "A sailor", "My rope") for number in range(4)]
    settings = {
        "num_prompts": 4,
        "num_updates": 2,
        "max_new_tokens": 8,
        "critic": "separate",
        "value_warmup_updates": 1,
    }

    def run(out: Path, **more: object) -> list[dict[str, float]]:
        kedge.ppo(
            model=policy, reward={reward: 2.0}, prompts=prompts, out=out, device="cpu", precision="fp32", report=False,
            frozen_dtype=dtype, **settings, **more,
        )  # fmt: skip
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    first, second = run(tmp_path / "run")
    roles = json.loads((tmp_path / "run" / "roles.json").read_text())
    assert 0 < first["objective/reference_error"] <= first["objective/reference_error_max"]
    assert first["reward/rounding_error"] == 2 * roles["reward: reward"]["rounding_error"] > 0
    assert not {name for name in second if "rounding_error" in name or "reference_error" in name}
    assert roles["reference"]["parameters"] == roles["policy"]["parameters"]
    assert roles["reference"]["weights_bytes"] < 2.5 * roles["policy"]["parameters"]  # most are embeddings here
    # The critic starts as a copy of the reward model, and is trained: it was copied before that.
    assert roles["critic"]["weights_bytes"] == 4 * roles["critic"]["parameters"]
    output = "".join(capsys.readouterr())
    assert output.count("With weights in fewer bits, reward scores 8 prompts differently by ") == 1
    assert output.count(f"Held in {dtype}, the reference differs") == (first["objective/reference_error"] > 0.01)
    assert [row["objective/kl"] for row in run(tmp_path / "again")] == [row["objective/kl"] for row in (first, second)]

"""What PPO holds in bf16, and what it says about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kedge
from tests.tiny import save_tiny_policy


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
            offload_frozen=True,
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
    assert output.count("runtime.offload_frozen has no effect on cpu") == 2
    assert output.count("Held in bf16, the reference differs") == (error_of["bf16"] > 0.01)

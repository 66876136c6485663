"""Runs on a CUDA GPU. Without one these tests are skipped; `pytest tests/test_gpu.py` takes a minute or two with one.

That a GPU trains as a CPU does, for every stage and kind of run, is what `python -m tests.identity` compares.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import kedge
from kedge.models import LanguageModel, Precision, TokenRows, autocast
from kedge.rollout import Sampler
from tests.models.families import ARCHITECTURES, causal_lm
from tests.tiny import save_tiny_policy, tiny_tokenizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

TEXTS = ["The boat", "A sailor", "My rope", "Our anchor"]
ROWS = [{"prompt": text, "completion": f" and {text.lower()}."} for text in TEXTS]
PAIRS = [{"prompt": text, "chosen": " is here", "rejected": " no no"} for text in TEXTS]
COMMON: dict[str, Any] = {"device": "cuda", "report": False}
PPO: dict[str, Any] = {**COMMON, "prompts": TEXTS, "num_prompts": 4, "num_updates": 4, "max_new_tokens": 6}
KINDS: dict[str, dict[str, Any]] = {
    "shared": {"critic": "shared", "rollout.num_responses": 2},
    "separate": {"critic": "separate", "value_warmup_updates": 1, "num_minibatches": 2},
    "grpo": {"preset": "grpo", "rollout.num_responses": 4},
    "share": {"preset": "grpo", "rollout.num_responses": 4, "num_epochs": 0.5},
    "lora": {"critic": "shared", "adapter": {"kind": "lora", "rank": 4}},
    "ahead": {"critic": "shared", "max_staleness": 1},
    "readout": {"critic": "readout", "num_minibatches": 2},
    "frozen": {"critic": "frozen"},
}


def vowels(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


def weights_of(run: Path) -> dict[str, Tensor]:
    files = sorted((run / "model").rglob("*.safetensors"))
    return {f"{path.parent.name}/{name}": weight for path in files for name, weight in load_file(path).items()}


def assert_same_weights(one: Path, other: Path) -> None:
    found, expected = weights_of(one), weights_of(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def _run(*arguments: str) -> str:
    """What a Python process prints, which finds this folder's modules."""
    root = Path(__file__).parents[1]
    paths = [str(root), str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, *arguments], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_packed_rows_and_shared_prompts_are_those_of_each_row_alone(name: str, precision: Precision) -> None:
    model = LanguageModel(causal_lm(name).cuda(), tiny_tokenizer())
    prompts, of_row = ([5, 6, 7, 8], [20, 21]), (0, 1, 0, 0, 1)
    texts = [[*prompts[number], *range(60 + 9 * row, 64 + 9 * row + row)] for row, number in enumerate(of_row)]
    rows = TokenRows.of(texts, "cuda")
    shared = replace(rows, prompts=tuple((number, len(prompts[number])) for number in of_row))
    weights = torch.randn(len(rows.ids), 16, generator=torch.Generator().manual_seed(0)).cuda() / len(rows.ids)
    near = {"atol": 2e-5, "rtol": 2e-5} if precision == "fp32" else {"atol": 5e-2, "rtol": 5e-2}

    def states_and_gradients(hidden: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        with autocast(precision, "cuda"):
            found = hidden().float()
        (found * weights).sum().backward()
        gradient = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        model.zero_grad()
        return found.detach(), gradient

    def alone() -> Tensor:
        rows = (torch.tensor([text], device="cuda") for text in texts)
        return torch.cat([model.causal.base_model(input_ids=row).last_hidden_state[0] for row in rows])

    expected = states_and_gradients(alone)
    for given in (rows, shared):
        for found, right in zip(states_and_gradients(lambda given=given: model.hidden(given)), expected, strict=True):
            torch.testing.assert_close(found, right, **near)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("start", [[], [*range(50, 60)]], ids=["", "with a common start"])
def test_it_samples_what_a_cpu_samples(name: str, start: list[int]) -> None:
    prompts = [[*start, *rest] for rest in ([5, 6, 7, 8], [20, 21], [5, 6, 7, 8])]
    found = []
    for device in ("cpu", "cuda"):
        model = LanguageModel(causal_lm(name).to(device), tiny_tokenizer(), value_head=True)
        sampler = Sampler(model, pad_id=0, stop_tokens=[2], max_new_tokens=24)
        found.append(sampler.generate(prompts, seeds=range(3)))
    cpu, gpu = found
    assert torch.equal(gpu.response_ids.cpu(), cpu.response_ids)
    torch.testing.assert_close(gpu.logprobs.cpu(), cpu.logprobs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_sampler_and_trainer_agree_in_bf16(kind: str, policy: Path, tmp_path: Path) -> None:
    run = kedge.ppo(model=policy, reward=vowels, out=tmp_path / "run", precision="bf16", **{**PPO, **KINDS[kind]})
    assert all(value == value for row in run.metrics for value in row.values() if isinstance(value, float))
    assert all(0 < row["memory/device"] < 1 for row in run.metrics)
    if kind != "ahead":
        assert abs(run.metrics[0]["policy/ratio_mean"] - 1) < 0.05


def test_every_stage_runs(policy: Path, tmp_path: Path) -> None:
    sft = kedge.sft(model=policy, demonstrations=ROWS, out=tmp_path / "sft", batch_size=2, **COMMON)
    reward = kedge.reward(model=sft.model, comparisons=PAIRS, out=tmp_path / "reward", batch_size=2, **COMMON)
    given = {"prompts": TEXTS * 4, "reward": reward.model, "max_new_tokens": 6, **COMMON}
    critic = kedge.critic(model=sft.model, out=tmp_path / "critic", **given)
    run = kedge.ppo(
        model=sft.model, critic=critic.model, out=tmp_path / "ppo", num_prompts=4, num_updates=2,
        **{"rollout.num_responses": 2, "ppo.eval_every": 1}, **given,
    )  # fmt: skip
    kedge.generate(model=run.model, out=tmp_path / "generate", prompts=TEXTS, reward=reward.model, **COMMON)
    won = kedge.evaluate(
        model=run.model, against=sft.model, prompts=TEXTS, judge=reward.model, out=tmp_path / "evaluate", **COMMON
    )
    assert 0 <= won.win_rate.value <= 1
    assert all(row["memory/device"] > 0 for row in run.metrics)


@pytest.mark.parametrize("kind", KINDS)
def test_deterministic_runs_are_equal_also_when_stopped_and_offloaded(kind: str, policy: Path, tmp_path: Path) -> None:
    """In a process of its own: the deterministic kernels are chosen before the first use of the device."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "import kedge\n"
        "from tests.test_gpu import KINDS, PPO, vowels\n"
        "kind, model, out = sys.argv[1:]\n"
        "def stop(update):\n"
        "    if update.number == 2:\n"
        "        raise KeyboardInterrupt\n"
        "def run(name, **more):\n"
        "    return kedge.ppo(model=model, reward=vowels, out=f'{out}/{name}', **{**PPO, **KINDS[kind], **more},\n"
        "                     **{'runtime.deterministic': True})\n"
        "run('whole')\n"
        "run('again')\n"
        "run('moved', **{'runtime.offload': ['frozen', 'optimizer']})\n"
        "try:\n"
        "    run('stopped', on_update=stop)\n"
        "except KeyboardInterrupt:\n"
        "    run('stopped', resume=True)\n"
    )
    _run(str(script), kind, str(policy), str(tmp_path))
    for name in ("again", "moved", "stopped"):
        assert_same_weights(tmp_path / name, tmp_path / "whole")


@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_a_base_in_fewer_bits(dtype: str, policy: Path, tmp_path: Path) -> None:
    if dtype == "nf4":
        pytest.importorskip("bitsandbytes")
    adapter = {"kind": "lora", "rank": 4, "base_dtype": dtype}
    run = kedge.ppo(model=policy, reward=vowels, out=tmp_path / "run", adapter=adapter, critic="shared", **PPO)
    roles = json.loads((tmp_path / "run" / "roles.json").read_text())
    assert roles["base"]["weights_bytes"] < 4 * roles["base"]["parameters"]
    assert abs(run.metrics[0]["objective/reference_error"]) < 1e-5

"""Model sizes that fit on each card: planned peaks of PPO runs of published shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from bench.tables import renewed
from kedge.config import load_config
from kedge_plan.devices import DEVICES
from kedge_plan.plan import count_stage
from kedge_plan.report import MachinePlan
from kedge_plan.rows import Lengths

GIB = 2**30
PROMPT = 512
RESPONSE = 512


def _qwen(hidden: int, layers: int, heads: int, wide: int, *, tied: bool) -> PreTrainedConfig:
    return Qwen2Config(
        vocab_size=151_936, hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=2 if tied else 8, tie_word_embeddings=tied, dtype="bfloat16",
    )  # fmt: skip


def _llama(hidden: int, layers: int, heads: int, wide: int) -> PreTrainedConfig:
    return LlamaConfig(
        vocab_size=128_256, hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, dtype="bfloat16",
    )  # fmt: skip


SIZES: Mapping[str, PreTrainedConfig] = {
    "0.5B (Qwen2.5)": _qwen(896, 24, 14, 4864, tied=True),
    "1.5B (Qwen2.5)": _qwen(1536, 28, 12, 8960, tied=True),
    "3B (Qwen2.5)": _qwen(2048, 36, 16, 11_008, tied=True),
    "8B (Llama 3.1)": _llama(4096, 32, 32, 14_336),
    "14B (Qwen2.5)": _qwen(5120, 48, 40, 13_824, tied=False),
    "32B (Qwen2.5)": _qwen(5120, 64, 40, 27_648, tied=False),
    "70B (Llama 3.1)": _llama(8192, 80, 64, 28_672),
}
CHECKPOINTED: Mapping[str, Any] = {"runtime.activation_checkpointing": True, "runtime.micro_batch_tokens": 2048}
SMALL: Mapping[str, Any] = {"optimization.optimizer": "adamw8bit", "runtime.frozen_dtype": "int8"}
RUNS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "full, recomputed": CHECKPOINTED,
    "the same, 8-bit Adam, reference in int8": {**CHECKPOINTED, **SMALL},
    "adapter, recomputed": {**CHECKPOINTED, "adapter.kind": "lora"},
    "adapter on a base in nf4": {**CHECKPOINTED, "adapter.kind": "lora", "adapter.base_dtype": "nf4"},
}
CARDS = ("4090", "a100-40", "h100", "h200")


def with_sizes(page: str) -> str:
    """The page with the table between its marks."""
    return renewed(page, "sizes", _table())


def _table() -> str:
    lines = [f"| model | {' | '.join(RUNS)} |", f"|---|{'---|' * len(RUNS)}"]
    for name, config in SIZES.items():
        lines.append(f"| {name} | {' | '.join(_cell(config, settings) for settings in RUNS.values())} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def plan_of_size(model: PreTrainedConfig, settings: Mapping[str, Any]) -> MachinePlan:
    """The plan of a PPO run of this shape on a card."""
    with TemporaryDirectory(prefix="kedge-bench-plan-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model.to_dict(), default=str))
        flags = {"model": folder, "rollout.max_new_tokens": RESPONSE, **settings}
        config = load_config(None, (), flags, None, stage="ppo")
        return count_stage(config, "ppo", accelerator=True, lengths=Lengths((PROMPT,))).plan()


def _cell(model: PreTrainedConfig, settings: Mapping[str, Any]) -> str:
    """The peak in GiB, and the smallest card that holds it."""
    plan = plan_of_size(model, settings)
    fitting = [name for name in CARDS if plan.needed <= (DEVICES[name].memory or 0)]
    return f"{plan.needed / GIB:,.0f} ({fitting[0]})" if fitting else f"{plan.needed / GIB:,.0f}"

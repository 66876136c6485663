# pyright: reportMissingImports=false
"""Runs a trainer of TRL 1.16 on a model folder, in a separate environment; writes a row per step to OUT/metrics.jsonl.

python -I peer_trainers.py grpo MODEL DATA OUT --steps=4 --precision=fp32 --responses=8 --batch=32 …
"""

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import (
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

MAX_LENGTH = 1024


class Rows(TrainerCallback):
    """Writes a row after every step."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w", encoding="utf-8")

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Write the row."""
        self.file.write(json.dumps({"update": state.global_step}) + "\n")
        self.file.flush()


def main() -> None:
    """Train for the requested steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("trainer", "model"):
        parser.add_argument(name)
    for name in ("data", "out"):
        parser.add_argument(name, type=Path)
    for name in ("steps", "responses", "batch", "max-new-tokens", "rows"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--precision")
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    common: dict[str, Any] = {
        "output_dir": str(options.out / "trl"),
        "max_steps": options.steps,
        "learning_rate": options.learning_rate,
        "bf16": options.precision == "bf16",
        "model_init_kwargs": {"dtype": "float32"},
        "gradient_checkpointing": options.checkpointing,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }

    def rows(name: str) -> Any:
        return load_dataset("json", data_files=str(options.data / name), split="train")

    chosen: dict[str, Any] = {"model": options.model, "callbacks": [Rows(options.out / "metrics.jsonl")]}
    if options.trainer in ("grpo", "rloo"):
        config, trainer = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[options.trainer]
        args = config(
            per_device_train_batch_size=options.batch,
            num_generations=options.responses,
            max_completion_length=options.max_new_tokens,
            beta={"grpo": 0.04, "rloo": 0.03}[options.trainer],  # kedge's presets
            **common,
        )
        chosen |= {"reward_funcs": runpy.run_path(str(options.data / "reward.py"))["words"]}
        chosen |= {"train_dataset": rows("prompts.jsonl")}
    elif options.trainer == "sft":
        args = SFTConfig(per_device_train_batch_size=options.rows, max_length=MAX_LENGTH, **common)
        trainer, chosen["train_dataset"] = SFTTrainer, rows("demonstrations.jsonl")
    else:
        args = RewardConfig(per_device_train_batch_size=options.rows, max_length=MAX_LENGTH, **common)
        trainer, chosen["train_dataset"] = RewardTrainer, rows("comparisons.jsonl")
    chosen["processing_class"] = AutoTokenizer.from_pretrained(options.model)
    trainer(args=args, **chosen).train()


if __name__ == "__main__":
    main()

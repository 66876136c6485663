# pyright: reportMissingImports=false
"""Runs PPO of TRL 1.12.0, the last release that has it, on a workload, in a separate environment.

    python peer.py WORKLOAD OUT --updates 5 --batch 32 --max-response 64 --epochs 4 --seed 0 --learning-rate 1e-9

Writes a row per update to OUT/metrics.jsonl, with kedge's field names. Gradient accumulation is off, because with it
TRL's loop does not take the configured steps.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
import trl.experimental.ppo.ppo_trainer as trl_ppo
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer


def now() -> float:
    """The time, after pending GPU work has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Meter(TrainerCallback):
    """Writes a row per update: seconds of each phase, and real tokens per second.

    The phases are kedge's: `experience` is reference and critic, `train` is the remainder, mainly the epochs.
    """

    def __init__(self, rows: TextIO) -> None:
        self.rows = rows
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.num_tokens = self.num_updates = 0
        self.started = 0.0

    def timed(self, function: Callable[..., Any], phase_of: Callable[..., str | None]) -> Callable[..., Any]:
        """Wrap a function to add its seconds to the phase that `phase_of` returns for its arguments, if any."""

        def measured(*args: Any, **options: Any) -> Any:
            phase = phase_of(*args)
            started = now()
            result = function(*args, **options)
            if phase:
                self.seconds[phase] += now() - started
            return result

        return measured

    def counted(self, sample: Callable[..., Any], stop: int) -> Callable[..., Any]:
        """Wrap TRL's sampler to count the tokens of prompts and of responses up to their EOS."""

        def counting(model: Any, prompts: torch.Tensor, batch: int, pad: int, config: Any) -> Any:
            sequences, logits = sample(model, prompts, batch, pad, config)
            ended = (sequences[:, prompts.shape[1] :] == stop).cumsum(1)
            # A token counts if there is no EOS before it; EOS itself counts.
            before = torch.cat([torch.zeros_like(ended[:, :1]), ended[:, :-1]], dim=1)
            self.num_tokens += int((prompts != pad).sum() + (before == 0).sum())
            return sequences, logits

        return counting

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the first update's clock."""
        self.started = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Write the update's row and start the next one's clock."""
        total = now() - self.started
        self.num_updates += 1
        phases = {phase: self.seconds[phase] for phase in ("rollout", "reward", "experience")}
        phases |= {"train": total - sum(phases.values()), "update": total}
        times = {f"time/{phase}": seconds for phase, seconds in phases.items()}
        row = {"update": self.num_updates, **times, "tokens_per_second": self.num_tokens / total}
        self.rows.write(json.dumps(row) + "\n")
        self.rows.flush()
        self.seconds.clear()
        self.num_tokens = 0
        self.started = now()


def train(options: argparse.Namespace, rows: TextIO) -> None:
    """Load the four models in float32 and train for the requested updates."""
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.workload / "policy", padding_side="left")
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(options.workload / "policy", dtype=torch.float32) for _ in range(2)
    )
    critic, reward = (
        AutoModelForSequenceClassification.from_pretrained(
            options.workload / "reward", num_labels=1, dtype=torch.float32
        )
        for _ in range(2)
    )
    meter = Meter(rows)
    sample = meter.counted(trl_ppo.batch_generation, tokenizer.eos_token_id)
    trl_ppo.batch_generation = meter.timed(sample, lambda *_: "rollout")
    trl_ppo.forward = meter.timed(trl_ppo.forward, lambda *_: None if torch.is_grad_enabled() else "experience")
    trl_ppo.get_reward = meter.timed(
        trl_ppo.get_reward, lambda model, *_: "experience" if model is critic else "reward"
    )
    adapter: dict[str, Any] = {}
    if options.rank:  # the base without its adapter is the reference; the critic is trained whole
        from peft import LoraConfig

        lora = LoraConfig(
            r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        adapter = {"peft_config": lora}
        reference = None
    trainer = PPOTrainer(
        args=configuration(options),
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=critic,
        train_dataset=prompts(options.workload / "prompts.jsonl", options.batch * options.updates),
        callbacks=[meter],
        **adapter,
    )
    trainer.train()


def prompts(path: Path, count: int) -> Dataset:
    """The prompts of the run, repeated if there are too few."""
    ids = [json.loads(line)["input_ids"] for line in path.read_text(encoding="utf-8").splitlines()]
    return Dataset.from_dict({"input_ids": [ids[index % len(ids)] for index in range(count)]})


def configuration(options: argparse.Namespace) -> PPOConfig:
    """TRL's settings. The others (clip ranges, γ, λ, value coefficient, β) have the same defaults as in kedge."""
    return PPOConfig(
        output_dir=str(options.out),
        per_device_train_batch_size=options.batch,
        local_rollout_forward_batch_size=options.batch,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        num_ppo_epochs=options.epochs,
        total_episodes=options.batch * options.updates,
        response_length=options.max_response,
        temperature=1.0,
        stop_token="eos",
        learning_rate=options.learning_rate,
        seed=options.seed,
        bf16=options.bf16,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        num_sample_generations=0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", type=Path)
    parser.add_argument("out", type=Path)
    for name in ("updates", "batch", "max-response", "epochs", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--rank", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    chosen = arguments()
    chosen.out.mkdir(parents=True, exist_ok=True)
    with (chosen.out / "metrics.jsonl").open("w", encoding="utf-8") as file:
        train(chosen, file)

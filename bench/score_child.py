# pyright: reportMissingImports=false
"""One run of `bench.score`, in the Python of kedge or of TRL: `python score_child.py SPEC`.

It trains, and stops its clock every few updates while the policy is saved and measured.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # TRL's Python has no kedge: its verifiers


class Clock:
    """Seconds since the command was started, without those in which the policy is measured."""

    def __init__(self, folder: Path, started: float, every: int, last: int) -> None:
        self.folder, self.started, self.every, self.last = folder, started, every, last
        self.parent = os.getppid()

    def reached(self, update: int, model: Any, tokenizer: Any) -> bool:
        """Have the policy measured, if it is time; True if the run can end."""
        if update % self.every and update != self.last:
            return False
        paused = time.time()
        out = self.folder / "policy"
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        asked, answer = self.folder / "asked.json", self.folder / "answer.json"
        part = asked.with_suffix(".part")
        part.write_text(json.dumps({"update": update, "seconds": paused - self.started}), encoding="utf-8")
        part.replace(asked)
        while not answer.is_file():
            time.sleep(0.02)
            if os.getppid() != self.parent:
                sys.exit("the bench has ended")
        is_reached = json.loads(answer.read_text(encoding="utf-8"))
        answer.unlink()
        self.started += time.time() - paused
        return is_reached


def run_kedge(spec: dict[str, Any], clock: Clock) -> None:
    """A run of `kedge ppo`."""
    import kedge

    def watch(update: kedge.Update) -> None:
        if clock.reached(update.number, update.model, update.tokenizer):
            update.stop("the score is reached")

    kedge.ppo(
        model=spec["model"],
        prompts=spec["prompts"],
        reward=spec["reward"],
        out=Path(spec["folder"]) / "run",
        on_update=watch,
        **spec["settings"],
    )


def run_trl(spec: dict[str, Any], clock: Clock) -> None:
    """A run of TRL's GRPO."""
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if clock.reached(state.global_step, others["model"], tokenizer):
                control.should_training_stop = True

    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    GRPOTrainer(
        model=spec["model"],
        reward_funcs=reward_of(spec["reward"]),
        args=GRPOConfig(output_dir=f"{spec['folder']}/run", save_strategy="no", report_to="none", **spec["settings"]),
        train_dataset=load_dataset("json", data_files=spec["prompts"], split="train"),
        processing_class=tokenizer,
        callbacks=[Watch()],
    ).train()


def reward_of(name: str) -> Any:
    """A reward function as TRL calls it: kedge's verifiers are made for that, one of a file gets texts."""
    place, _, function = name.rpartition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), function)
    score = runpy.run_path(place)[function]

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        return [float(each["score"]) for each in score([each[-1]["content"] for each in completions])]

    return reward


def main() -> None:
    """Read the run's description, and train."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    clock = Clock(Path(spec["folder"]), spec["started"], spec["every"], spec["num_updates"])
    {"kedge": run_kedge, "TRL": run_trl}[spec["system"]](spec, clock)


if __name__ == "__main__":
    main()

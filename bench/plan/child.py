"""Measures one run in this process: `python -m bench.plan.child CASE live|process`; prints one line of JSON."""

from __future__ import annotations

import ctypes
import json
import resource
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig, Qwen2Config

from bench.plan.cases import Case
from bench.plan.shallow import save_shallow, text_of
from kedge.config import load_config
from kedge.models.live_bytes import LiveBytes
from kedge.stages.critic import run_critic
from kedge.stages.ppo import run_ppo
from kedge.stages.reward import run_reward
from kedge.stages.sft import run_sft
from kedge.training.runtime import set_threads
from kedge_plan.devices import measured_speed
from kedge_plan.plan import count_stage

KIB = 2**10
MIB = 2**20
ROWS = {"sft": ("demonstrations", ("completion",)), "reward": ("comparisons", ("chosen", "rejected"))}
"""The role of the rows of a stage that samples nothing, and their columns beside the prompt."""
TIMED = 4
"""Updates of a timed run: all but the first are measured."""


def config_of(case: Case) -> PreTrainedConfig:
    """The architecture of a case."""
    tokens: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if case.family == "gpt2":
        return GPT2Config(
            vocab_size=case.vocabulary, n_embd=case.hidden, n_layer=case.layers, n_head=4, n_positions=512, **tokens
        )
    kind = LlamaConfig if case.family == "llama" else Qwen2Config
    return kind(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        intermediate_size=(4 if case.family == "llama" else 3) * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=case.family == "qwen2",
        **tokens,
    )


class HeapState(ctypes.Structure):
    """The result of glibc's `mallinfo2`; `arena` is the heap's size."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    ))  # fmt: skip


def heap_bytes() -> int:
    """The size of the heap; a run that keeps freed memory never makes it smaller, so at its end it is the largest."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = HeapState
    return int(mallinfo().arena)


def make_models(case: Case, folder: Path) -> None:
    """A policy and a reward model with random weights."""
    for name in ("policy", "reward"):
        save_shallow(config_of(case), folder / name, scalar=name == "reward")


def any_reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Scores that differ between responses."""
    return [float(sum(map(ord, text[:40])) % 97) for text in completions]


def main() -> None:
    """Plan the run, run it, and print both."""
    case = Case(**json.loads(sys.argv[1]))
    how = sys.argv[2]
    with TemporaryDirectory(prefix="kedge-bench-plan-") as scratch:
        folder = Path(scratch)
        make_models(case, folder)
        reward = {"reward": str(folder / "reward")} if case.reward else {}
        role, columns = ROWS.get(case.stage, ("prompts", ()))
        prompts = text_of([case.prompt] * 64)
        texts = text_of([case.response - 1] * 65)  # and EOS
        answers = pairwise(texts)
        rows = folder / "rows.jsonl"
        pairs = zip(prompts, answers, strict=True)
        rows.write_text(
            "\n".join(
                json.dumps({"prompt": prompt, **dict(zip(columns, each, strict=False))}) for prompt, each in pairs
            )
        )
        flags = {"model": str(folder / "policy"), f"data.{role}": [str(rows)], "out": str(folder / "out"), **reward}
        longer = {"ppo.num_updates": TIMED} if (case.stage, how) == ("ppo", "process") else {}
        config = load_config(None, (), {**flags, **case.settings, **longer}, None, stage=case.stage)
        given = None if case.reward else any_reward
        set_threads(1)
        # The processor's seconds of the only thread: a machine that does other work does not change them much.
        clock = time.process_time
        precision = "bf16" if case.precision == "bf16" else "fp32"
        speed = measured_speed(torch.device("cpu"), precision, width=case.hidden, clock=clock)
        counted = count_stage(config, case.stage)
        plan = counted.plan(speed=speed)
        found: dict[str, Any] = {
            "planned": plan.peak.bytes / MIB,
            "phase": plan.peak.name,
            "planned seconds": plan.seconds,
            "planned times": {phase.name: phase.seconds for phase in plan.phases},
            "speed": [speed.flops, speed.bandwidth, speed.functions, speed.call],
        }
        heap = heap_bytes()
        baseline = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
        counter = LiveBytes()
        ends = list[float]()
        if how == "live":
            with counter:
                if case.stage in ROWS:
                    (run_sft if case.stage == "sft" else run_reward)(config)
                else:
                    (run_ppo if case.stage == "ppo" else run_critic)(config, reward=given)
            found["live"] = counter.peak / MIB
        else:
            (run_ppo if case.stage == "ppo" else run_critic)(
                config, reward=given, callback=lambda update: ends.append(clock())
            )
            found["heap"] = (heap_bytes() - heap) / MIB
            found["process"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB - baseline) / MIB
            if case.stage == "ppo":
                # The median: where Python collects its garbage in an update, that one takes a fifth longer.
                found["seconds"] = median(after - before for before, after in pairwise(ends))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

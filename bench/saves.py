"""Checkpoints of sharded weights, measured: `python -m bench.saves` prints the table of bench/RESULTS.md.

Two ranks save and load 77 million parameters with Adam's moments: whole, in parts, and in parts with PyTorch's own
writer and reader; its files are read again to hash them. Each case is a separate launch. Memory is the largest
anonymous memory of a rank during a save, beyond what it held before.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from transformers import LlamaConfig, LlamaForCausalLM

from kedge.models import ActorCritic, ModelCard, load_language_model, load_tokenizer, save_policy
from kedge.models.sharded import shard_model
from kedge.ranks import Ranks
from kedge.ranks.start import join_ranks
from kedge.training.checkpoint.files import record_file
from kedge.training.checkpoint.model_folder import CheckpointModel
from kedge.training.checkpoint.state import (
    RunState,
    TrainingState,
    module_tensors,
    optimizer_state,
    restore_module,
    restore_optimizer,
)
from kedge.training.checkpoint.store import Checkpoint, newest_valid
from kedge.training.optimizer import build_optimizer
from tests.tiny import tiny_tokenizer

RANKS = 2
SAVES = 7
UNTIMED = 2
CASES = {"whole": "whole, by the first rank", "parts": "in parts", "torch": "in parts, by PyTorch's writer and reader"}


def main() -> None:
    """Measure and print."""
    print("| | seconds to save, median | least to most | to check | to load | MiB: first rank | second rank |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        save_source(Path(name) / "source")
        for case, title in CASES.items():
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            subprocess.run([sys.executable, *launch, "-m", "bench.saves", name, case], check=True, env=environment)
            first, second = (json.loads((Path(name) / f"{case}-{rank}.json").read_bytes()) for rank in range(RANKS))
            saves = first["save"]
            figures = [f"{statistics.median(saves):.1f}", f"{min(saves):.1f}–{max(saves):.1f}"]
            figures += [f"{first[each]:.1f}" for each in ("check", "load")]
            figures += [f"{max(each['memory']):.0f}" for each in (first, second)]
            print(f"| {title} | {' | '.join(figures)} |", flush=True)


def save_source(folder: Path) -> None:
    """A random Llama of 77 million parameters."""
    config = LlamaConfig(
        vocab_size=13_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12,
        num_key_value_heads=12, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def measure(place: Path, case: str) -> None:
    """One case, on every rank."""
    ranks = join_ranks("shard")
    tokenizer = load_tokenizer(place / "source")
    policy = load_language_model(place / "source", tokenizer=tokenizer, value_head=True)
    shard_model(policy, ranks)
    module = ActorCritic(policy)
    optimizer = build_optimizer(module.parameters(), learning_rate=1e-4)
    for weight in module.parameters():
        weight.grad = torch.full_like(weight, 0.1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    folder = place / case
    state = TrainingState({"actor_critic": module}, optimizer)

    def save_model(path: Path, update: int, weights: dict[str, torch.Tensor] | None) -> Path:
        return save_policy(policy, tokenizer, path, card=ModelCard("ppo", "policy"), weights=weights)

    run = RunState(
        folder, kind="ppo", fingerprint={}, keep=1, found=None, model=CheckpointModel(policy.causal, save_model),
        best=None, ranks=ranks, sharded_above=None if case == "whole" else 0,
    )  # fmt: skip
    run.restore(state)
    run.remember()
    save: Callable[[int], object] = (
        run.save if case != "torch" else lambda number: save_with_torch(folder / str(number), state, ranks)
    )
    seconds, memory = zip(*(timed(lambda number=number: save(number), ranks) for number in range(SAVES)), strict=True)
    check = 0.0
    if case == "torch":
        loading, _ = timed(lambda: load_with_torch(folder / str(SAVES - 1), state), ranks)
    else:
        check, _ = timed(lambda: newest_valid(folder, on_rejected=print, ranks=ranks), ranks)
        found = newest_valid(folder, on_rejected=print)
        assert found is not None
        loading, _ = timed(lambda: load(found, state), ranks)
    figures = {"save": seconds[UNTIMED:], "memory": memory, "check": check, "load": loading}
    (place / f"{case}-{ranks.number}.json").write_text(json.dumps(figures), encoding="utf-8")


def load(found: Checkpoint, state: TrainingState) -> None:
    """Restore weights and moments from a checkpoint that has been checked."""
    restore_module(state.modules["actor_critic"], found.stored("actor_critic"))
    restore_optimizer(state.optimizer, found.stored("optimizer"), found.state["optimizer"])


def save_with_torch(folder: Path, state: TrainingState, ranks: Ranks) -> None:
    """Save weights and moments with PyTorch's writer; each rank hashes its files."""
    for group, tensors in groups_of(state).items():
        save_distributed(tensors, storage_writer=HuggingFaceStorageWriter(str(folder / group), save_distributed=True))
        record_file(folder / group / f"shard-{ranks.number + 1:05d}-model-00001-of-00001.safetensors")


def load_with_torch(folder: Path, state: TrainingState) -> None:
    """Load them into the tensors that are there."""
    for group, tensors in groups_of(state).items():
        load_distributed(tensors, storage_reader=HuggingFaceStorageReader(str(folder / group)))


def groups_of(state: TrainingState) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and moments, in parts."""
    weights = {name: each.detach() for name, each in module_tensors(state.modules["actor_critic"]).items()}
    return {"actor_critic": weights, "optimizer": optimizer_state(state.optimizer, gathered=False)[0]}


def timed(do: Callable[[], object], ranks: Ranks) -> tuple[float, float]:
    """Seconds until all ranks have done something, and this one's largest memory meanwhile, MiB beyond that before."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    ranks.wait()
    start = anonymous_memory()
    ended = threading.Event()
    largest = [0]

    def watch() -> None:
        while not ended.wait(0.002):
            largest[0] = max(largest[0], anonymous_memory())

    thread = threading.Thread(target=watch)
    began = time.monotonic()
    thread.start()
    do()
    ranks.wait()
    seconds = time.monotonic() - began
    ended.set()
    thread.join()
    return seconds, (largest[0] - start) / 2**20


def anonymous_memory() -> int:
    """Bytes of this process in memory that are not pages of a file."""
    resident, shared = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(Path(sys.argv[1]), sys.argv[2])
    else:
        main()

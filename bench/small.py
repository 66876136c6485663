"""Optimizers with small states, measured: `python -m bench.small` prints a table of docs/less-memory.md.

A Llama of 30 million parameters is trained on one batch of random tokens; rounds of all kinds alternate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from kedge.models.matrices import inner_matrices
from kedge.training.optimizer import build_optimizer
from kedge.training.optimizer_kinds import Optimizer, OptimizerKind

ROUNDS = 5
ROWS, TOKENS, VOCAB = 4, 128, 8192


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    tokens = torch.randint(VOCAB, (ROWS, TOKENS))
    runs = {kind: _Run(kind, tokens) for kind in get_args(OptimizerKind)}
    for each in runs.values():
        each.step()
    for _ in range(ROUNDS):
        for each in runs.values():
            each.step()
    print("| | bytes per weight | seconds per step of the optimizer | of gradients, for 512 tokens |")
    print("|---|---|---|---|")
    for kind, each in runs.items():
        steps, gradients = (statistics.median(seconds[1:]) for seconds in (each.steps, each.gradients))
        print(f"| `{kind}` | {each.kept() / each.size:.2f} | {steps:.2f} | {gradients:.1f} |")


class _Run:
    """A model and its optimizer, and the seconds of each step."""

    def __init__(self, kind: OptimizerKind, tokens: Tensor) -> None:
        self.model, self.tokens = model_of_30_million(), tokens
        parameters = list(self.model.parameters())
        self.optimizer: Optimizer = build_optimizer(
            parameters, kind=kind, learning_rate=1e-4, inner_matrices=inner_matrices(self.model)
        )
        self.size = sum(each.numel() for each in parameters)
        self.steps: list[float] = []
        self.gradients: list[float] = []

    def step(self) -> None:
        self.gradients.append(seconds_of(self._gradients))
        self.steps.append(seconds_of(self.optimizer.step))
        self.optimizer.zero_grad()

    def _gradients(self) -> None:
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()

    def kept(self) -> int:
        """The bytes of the optimizer's state; what parameters share counts once."""
        tensors = [
            each
            for state in self.optimizer.state.values()
            for each in state.values()
            if isinstance(each, Tensor) and each.numel() > 1
        ]
        return sum({each.data_ptr(): each.nbytes for each in tensors}.values())


def model_of_30_million() -> nn.Module:
    """A Llama of 12 layers with tied embeddings."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 448,
        "intermediate_size": 1152,
        "num_hidden_layers": 12,
        "num_attention_heads": 7,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, tie_word_embeddings=True, **sizes))


def seconds_of(do: Callable[[], object]) -> float:
    """The seconds that a call takes."""
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()

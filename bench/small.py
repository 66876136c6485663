"""Small optimizers, and weights in few bits: `python -m bench.small` prints the tables of bench/plan/RESULTS.md.

A Llama of 30 million parameters is trained on one batch of random tokens, and held in every number format; rounds of
all kinds alternate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, get_args

import torch
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kedge.models import FrozenDtype, LanguageModel, Precision, TokenRows, autocast, hold_frozen
from kedge.models.frozen import num_weights
from kedge.models.pretrained import inner_matrices
from kedge.training.optimizer import build_optimizer
from kedge.training.optimizer_kinds import Optimizer, OptimizerKind

ROUNDS = 5
ROWS = 4
TOKENS = 128
VOCAB = 8192
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    tokens = torch.randint(VOCAB, (ROWS, TOKENS))
    optimizers(tokens)
    number_formats(tokens)


def optimizers(tokens: Tensor) -> None:
    """Print the table of optimizers."""
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


@torch.no_grad()
def number_formats(tokens: Tensor) -> None:
    """Print the table of number formats."""
    formats = {each: held(each) for each in get_args(FrozenDtype)[1:]}
    rows = TokenRows.of(tokens.tolist(), tokens.device)
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for name, model in formats.items():
            for precision in PRECISIONS if name == "fp32" else PRECISIONS[1:]:
                with autocast(precision, tokens.device):
                    taken = seconds_of(lambda model=model: model.logits(model.hidden(rows)))
                seconds.setdefault((name, precision), []).append(taken)
    print("\n| weights | products | bytes per weight | in layers | seconds per pass of 512 tokens |")
    print("|---|---|---|---|---|")
    for (name, precision), taken in seconds.items():
        model = formats[name].causal
        whole = bytes_per_weight(model)
        inner = bytes_per_weight(model.get_submodule("model.layers"))
        print(f"| `{name}` | {precision} | {whole:.2f} | {inner:.2f} | {statistics.median(taken):.2f} |")


def held(dtype: FrozenDtype) -> LanguageModel:
    """The model in a number format."""
    vocabulary = {"<pad>": 0, **{f"<{number}>": number for number in range(1, VOCAB)}}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<pad>"))
    model = LanguageModel(model_of_30_million(), PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>"))
    hold_frozen(model, dtype, "fp32")
    return model


def bytes_per_weight(module: nn.Module) -> float:
    """The bytes of a module's parameters, for each weight that they represent."""
    return sum(each.nbytes for each in module.parameters()) / num_weights(module.parameters())


class _Run:
    """A model and its optimizer, and the seconds of each step."""

    def __init__(self, kind: OptimizerKind, tokens: Tensor) -> None:
        self.model = model_of_30_million()
        self.tokens = tokens
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


def model_of_30_million() -> LlamaForCausalLM:
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

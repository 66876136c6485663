"""The two supervised losses: imitate a completion, and rank responses as people did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from kedge.algorithm import ranking_loss, token_logprobs_and_entropy
from kedge.data import Comparison, EncodedExample, Ranking, encode_example
from kedge.models import LanguageModel, ScalarModel, TokenRows, autocast

__all__ = ["CompletionLoss", "RankedResponses", "RankingLoss", "RunPrecision"]

RunPrecision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class CompletionLoss:
    """Cross-entropy of the completion's tokens, EOS included; prompt and padding do not count.

    −Σ log π(token | what stands before it) / number of completion tokens

    The output layer runs at the positions that count and nowhere else: over a large vocabulary it is most of the cost.

    Args:
        model: What learns.
        precision: Number format of the matrix products.

    Source: spec §3.7, §2.1.
    """

    model: LanguageModel
    precision: RunPrecision = "fp32"

    def weight(self, example: EncodedExample) -> float:
        """Tokens that the loss counts: the completion's; the first token of a row has nothing before it."""
        return min(len(example.completion), self.length(example) - 1)

    def length(self, example: EncodedExample) -> int:
        """Tokens of prompt and completion."""
        return len(example.prompt) + len(example.completion)

    def sums(self, examples: Sequence[EncodedExample]) -> Mapping[str, Tensor]:
        """`loss` in nats, and `token_accuracy`: tokens that the model thinks most likely; sums over counted tokens."""
        device = self.model.device
        texts = [[*example.prompt, *example.completion] for example in examples]
        # A text's last token is a target alone: nobody's loss needs what the model says after it.
        rows = TokenRows.of([text[:-1] or text for text in texts], device)
        spans = [range(max(len(example.prompt), 1), len(text)) for example, text in zip(examples, texts, strict=True)]
        targets = [text[place] for text, span in zip(texts, spans, strict=True) for place in span]
        states = [start + place - 1 for start, span in zip(rows.starts, spans, strict=True) for place in span]
        with autocast(self.precision, device):
            hidden = self.model.hidden(rows)[torch.tensor(states, dtype=torch.long, device=device)]
            logprobs, correct = self.model.over_logits(
                _logprobs_and_hits, hidden, torch.tensor(targets, dtype=torch.long, device=device)
            )
        return {"loss": -logprobs.sum(), "token_accuracy": correct.sum()}


def _logprobs_and_hits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logprobs, _ = token_logprobs_and_entropy(logits, targets)
    return logprobs, logits.detach().argmax(dim=-1) == targets


@dataclass(frozen=True)
class RankedResponses:
    """One prompt's responses as token ids, the prompt in front of each.

    Attributes:
        rows: Prompt and response, EOS included; the best first.
        ranks: One per row, ascending; a smaller rank is better, equal ranks are ties. Not all are equal.
        lengths: Characters of each response: what a judge would see who looks at nothing else.
        margin: By how much the first of two scores should lead.
    """

    rows: tuple[list[int], ...]
    ranks: tuple[float, ...]
    lengths: tuple[int, ...]
    margin: float = 0.0

    @classmethod
    def encode(cls, tokenizer: PreTrainedTokenizerBase, record: Comparison | Ranking) -> RankedResponses:
        """The token ids of a comparison's or a ranking's responses."""
        if isinstance(record, Comparison):
            ranked: list[tuple[float, str]] = [(0.0, record.chosen), (1.0, record.rejected)]
            margin = record.margin or 0.0
        else:
            ranked = sorted(zip(record.ranks, record.responses, strict=True), key=itemgetter(0))
            margin = 0.0
        ranks, responses = zip(*ranked, strict=True)
        encoded = [encode_example(tokenizer, record.prompt, response) for response in responses]
        rows = tuple([*example.prompt, *example.completion] for example in encoded)
        return cls(rows, ranks, tuple(len(response) for response in responses), margin)


@dataclass(frozen=True)
class RankingLoss:
    """Negative log likelihood of the human order: the mean over a prompt's pairs, then over prompts.

    Both responses of a pair, and all K of a ranked list, go through one forward pass.

    Args:
        model: What learns to score.
        precision: Number format of the matrix products.

    Source: spec §3.9, §3.10.
    """

    model: ScalarModel
    precision: RunPrecision = "fp32"

    def weight(self, example: RankedResponses) -> float:
        """Every prompt counts the same, however many responses it has."""
        return 1.0

    def length(self, example: RankedResponses) -> int:
        """Tokens of all its rows."""
        return sum(len(row) for row in example.rows)

    def sums(self, examples: Sequence[RankedResponses]) -> Mapping[str, Tensor]:
        """`loss` in nats and `accuracy`, the share of a prompt's pairs in the right order; sums over prompts."""
        rows = TokenRows.of([row for example in examples for row in example.rows], self.model.device)
        with autocast(self.precision, self.model.device):
            together = self.model.scores(rows)
        device, sizes = together.device, [len(example.rows) for example in examples]
        scores = pad_sequence(list(together.split(sizes)), batch_first=True)
        ranks = pad_sequence([torch.tensor(example.ranks) for example in examples], True, padding_value=math.nan).to(
            device
        )
        # A pair with a margin is a pair whose better response starts with a handicap.
        handicaps = torch.zeros_like(scores)
        handicaps[:, 0] = torch.tensor([example.margin for example in examples])
        better = ranks[:, :, None] < ranks[:, None, :]
        right = (1 + torch.sign(scores[:, :, None] - scores[:, None, :])).where(better, 0.0) / 2
        return {
            "loss": ranking_loss(scores - handicaps, ranks) * len(examples),
            "accuracy": (right.sum((1, 2)) / better.sum((1, 2))).sum(),
        }

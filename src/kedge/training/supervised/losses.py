"""The supervised losses: cross-entropy of completions, and ranking of responses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from kedge.algorithm import ranking_loss, token_logprobs
from kedge.algorithm.preference import Ties, initial_tie
from kedge.data import Comparison, EncodedExample, Ranking, encode_example
from kedge.models import LanguageModel, Precision, ScalarModel, TokenRows, autocast
from kedge.ranks import Prompts


@dataclass(frozen=True)
class CompletionLoss:
    """Cross-entropy of the completions' tokens, including EOS; prompts, other turns and padding do not count.

    loss = −Σ log π(token | tokens before it) / number of completion tokens

    The output layer, most of the cost with a large vocabulary, runs only at the counted positions.

    Args:
        model: The model to train.
        precision: Number format of the matrix products.

    Source: spec §3.7, §2.1.
    """

    model: LanguageModel
    precision: Precision = "fp32"

    def weight(self, example: EncodedExample) -> float:
        """Number of counted tokens."""
        return len(example.learned())

    def length(self, example: EncodedExample) -> int:
        """Number of tokens in prompt and completion."""
        return len(example.prompt) + len(example.completion)

    def tokens_read(self, examples: Sequence[EncodedExample]) -> tuple[list[int], Prompts]:
        """Tokens of each example; none are shared."""
        return [self.length(example) for example in examples], None

    def sums(self, examples: Sequence[EncodedExample]) -> Mapping[str, Tensor]:
        """Sums over the counted tokens: `loss` in nats, and `token_accuracy`, the number of tokens that the model
        predicts.
        """
        device = self.model.device
        texts = [[*example.prompt, *example.completion] for example in examples]
        # A text's last token is only a target: the model need not read it.
        rows = TokenRows.of([text[:-1] or text for text in texts], device)
        spans = [example.learned() for example in examples]
        targets = [text[place] for text, span in zip(texts, spans, strict=True) for place in span]
        states = [start + place - 1 for start, span in zip(rows.starts, spans, strict=True) for place in span]
        with autocast(self.precision, device):
            hidden = self.model.hidden(rows)[torch.tensor(states, dtype=torch.long, device=device)]
            logprobs, correct = self.model.over_logits(
                _logprobs_and_hits, hidden, torch.tensor(targets, dtype=torch.long, device=device)
            )
        return {"loss": -logprobs.sum(), "token_accuracy": correct.sum()}


def _logprobs_and_hits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return token_logprobs(logits, targets), logits.detach().argmax(dim=-1) == targets


@dataclass(frozen=True)
class RankedResponses:
    """A prompt's ranked responses as token ids.

    Attributes:
        rows: Prompt plus response, including EOS; best first.
        ranks: One per row, ascending; a smaller rank is better, equal ranks are ties.
        lengths: Length of each response in characters, for the length baseline.
        margin: Margin by which the chosen score should exceed the rejected one.
    """

    rows: tuple[list[int], ...]
    ranks: tuple[float, ...]
    lengths: tuple[int, ...]
    margin: float = 0.0

    @classmethod
    def encode(cls, tokenizer: PreTrainedTokenizerBase, record: Comparison | Ranking) -> RankedResponses:
        """Encode the responses of a comparison or a ranking."""
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
    """Bradley–Terry loss of ranked responses: mean over a prompt's pairs, then over prompts.

    pair loss = −log σ(better − worse − margin)

    All responses to a prompt are in one forward pass, which reads shared prefixes only once.

    Args:
        model: The reward model to train.
        precision: Number format of the matrix products.
        ties: What equal ranks are; see `ranking_loss`.
        tie: How likely they are; learned with the model.

    Source: spec §3.9, §3.10.
    """

    model: ScalarModel
    precision: Precision = "fp32"
    ties: Ties = "drop"
    tie: nn.Parameter | None = None

    @classmethod
    def start(
        cls, model: ScalarModel, precision: Precision, ties: Ties, examples: Sequence[RankedResponses]
    ) -> RankingLoss:
        """The loss at the start of training, when all scores are about equal: ties are as likely as in the examples."""
        if ties == "drop":
            return cls(model, precision)
        pairs = [pair for example in examples for pair in combinations(example.ranks, 2)]
        share = sum(first == second for first, second in pairs) / max(1, len(pairs))
        return cls(model, precision, ties, nn.Parameter(torch.tensor(initial_tie(share), device=model.device)))

    def weight(self, example: RankedResponses) -> float:
        """1: every prompt has the same weight, regardless of its number of responses."""
        return 1.0

    def length(self, example: RankedResponses) -> int:
        """Number of tokens in all rows."""
        return sum(len(row) for row in example.rows)

    def tokens_read(self, examples: Sequence[RankedResponses]) -> tuple[list[int], Prompts]:
        """Tokens of each example, counting those that its rows share once; and the pieces of its rows."""
        pieces = iter(self.model.pieces([row for example in examples for row in example.rows]))
        distinct = [dict(piece for _ in example.rows for piece in next(pieces)) for example in examples]
        return [sum(each.values()) for each in distinct], [tuple(each.items()) for each in distinct]

    def sums(self, examples: Sequence[RankedResponses]) -> Mapping[str, Tensor]:
        """Sums over prompts: `loss` in nats, and `accuracy`, the share of a prompt's pairs ordered correctly."""
        rows = [row for example in examples for row in example.rows]
        packed = TokenRows.of(rows, self.model.device, self.model.pieces(rows))
        with autocast(self.precision, self.model.device):
            flat = self.model.scores(packed)
        sizes = [len(example.rows) for example in examples]
        scores = pad_sequence(list(flat.split(sizes)), True)
        # Places, since float32 would make ties of large ranks, such as negated scores, that are close together.
        places = [torch.tensor([*map(each.ranks.index, each.ranks)]).float() for each in examples]
        ranks = pad_sequence(places, True, padding_value=math.nan).to(flat.device)
        # Subtracting a comparison's margin from its better score is the loss with a margin.
        margins = torch.zeros_like(scores)
        margins[:, 0] = torch.tensor([example.margin for example in examples])
        better = ranks[:, :, None] < ranks[:, None, :]
        right = (1 + torch.sign(scores[:, :, None] - scores[:, None, :])).where(better, 0.0) / 2
        loss = ranking_loss(scores - margins, ranks, ties=self.ties, tie=self.tie)
        counts = better.sum((1, 2))
        accuracy = torch.where(counts > 0, right.sum((1, 2)) / counts, 0.5)  # 0.5: all are tied
        return {"loss": loss * len(examples), "accuracy": accuracy.sum()}

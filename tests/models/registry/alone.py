"""What everything is compared with: plain transformers, one row at a time, without padding or cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.models.registry.sizes import PAD, WORDS

Rows = Sequence[Sequence[int]]


def logprobs_alone(causal: PreTrainedModel, rows: Rows, temperature: float = 1.0) -> list[Tensor]:
    """Of each row, the log probability of every word at every position, `[tokens, words]`."""
    logits = (causal(input_ids=torch.tensor([row]), use_cache=False).logits[0].float() for row in rows)
    return [words_only(own / temperature) for own in logits]


def words_only(logits: Tensor) -> Tensor:
    """Log probabilities if padding and ids without a word are never sampled; without those ids."""
    allowed = [word for word in range(WORDS) if word != PAD]
    return logits[..., allowed].log_softmax(dim=-1)


def taken(logprobs: Sequence[Tensor], rows: Rows) -> list[Tensor]:
    """Of each row, the log probability of every token after the first."""
    places = {word: place for place, word in enumerate(word for word in range(WORDS) if word != PAD)}
    targets = [torch.tensor([places[token] for token in row[1:]]) for row in rows]
    return [own[:-1].gather(1, target[:, None])[:, 0] for own, target in zip(logprobs, targets, strict=True)]


def scores_alone(classifier: PreTrainedModel, rows: Rows) -> Tensor:
    """Each row's score."""
    return torch.cat([classifier(input_ids=torch.tensor([row])).logits.float().flatten() for row in rows])


def gradients(model: nn.Module, total: Tensor) -> dict[str, Tensor]:
    """The gradient of a number in each parameter; 0 where it has none."""
    model.zero_grad()
    total.backward()
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in model.named_parameters()
    }


def relative_error(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest relative error of a parameter's gradient; a parameter with hardly any gradient counts less."""
    floor = 1e-3 * float(torch.stack([gradient.norm() for gradient in theirs.values()]).norm())
    errors = [float((ours[name] - theirs[name]).norm() / (theirs[name].norm() + floor)) for name in theirs]
    return max(errors)

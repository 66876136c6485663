"""The chunked output layer: same outputs and gradients, and never the logits of a whole batch at once."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kedge.algorithm.experience import PolicyOutputs, Rollout
from kedge.models import ActorCritic, language
from tests.models.families import language_model
from tests.models.test_actor_critic import RESPONSES, make_rollout

VOCABULARY = 300
NUM_TOKENS = sum(map(len, RESPONSES))


class Sums(TorchDispatchMode):
    """Counts the sums that make an entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.nansum.default
        return func(*args, **(kwargs or {}))


class LargestTensor(TorchDispatchMode):
    """Size of the largest tensor returned by any operation, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return outputs


def evaluate(rollout: Rollout, *, entropy_gradient: bool) -> tuple[PolicyOutputs, list[torch.Tensor], int]:
    models = ActorCritic(language_model("llama", value_head=True))
    with LargestTensor() as largest:
        outputs = models(rollout, temperature=0.7, entropy_gradient=entropy_gradient)
        terms = outputs.logprobs.square() + outputs.entropy.square() + outputs.values.square()
        (terms.sum() / 100).backward()
    return outputs, [weight.grad for weight in models.parameters() if weight.grad is not None], largest.numel


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("rows_at_a_time", [1, 2, NUM_TOKENS - 1])
def test_chunks_give_what_the_whole_gives(entropy_gradient, rows_at_a_time, monkeypatch):
    whole, whole_gradients, _ = evaluate(make_rollout(), entropy_gradient=entropy_gradient)
    monkeypatch.setattr(language, "MAX_LOGITS", rows_at_a_time * VOCABULARY)
    chunked, chunked_gradients, _ = evaluate(make_rollout(), entropy_gradient=entropy_gradient)
    for name in ("logprobs", "entropy", "values"):
        torch.testing.assert_close(getattr(chunked, name), getattr(whole, name), atol=1e-6, rtol=1e-6)
    for one, other in zip(chunked_gradients, whole_gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_the_logits_of_a_batch_are_never_held_together(monkeypatch):
    rollout, rows = make_rollout(), torch.arange(3).repeat(8)
    rollout, num_tokens = rollout.select(rows), 8 * NUM_TOKENS
    *_, at_once = evaluate(rollout, entropy_gradient=True)
    assert at_once == num_tokens * VOCABULARY
    monkeypatch.setattr(language, "MAX_LOGITS", 4 * VOCABULARY)
    *_, in_chunks = evaluate(rollout, entropy_gradient=True)
    # The weights of the output layer are as large as the logits of 16 tokens.
    assert in_chunks == 16 * VOCABULARY


def test_entropies_without_a_gradient_are_computed_once_per_chunk(monkeypatch):
    monkeypatch.setattr(language, "MAX_LOGITS", VOCABULARY)
    models = ActorCritic(language_model("llama", value_head=True))
    with Sums() as sums:
        outputs = models(make_rollout(), temperature=0.7)
        assert sums.count == NUM_TOKENS
        outputs.logprobs.sum().backward()
    assert sums.count == NUM_TOKENS, "the backward pass computes the logits again, and no entropy"


def test_a_reference_computes_no_entropy():
    model = language_model("llama")
    with torch.no_grad(), Sums() as sums:
        language.response_logprobs(model, make_rollout(), temperature=0.7)
    assert sums.count == 0
